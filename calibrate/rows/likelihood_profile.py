"""Likelihood profiles: log p of each row's target as a function of beta.

A fit evaluates log p of every row some thousand times. A profile stores log p, its slope and its
curvature at N_NODES nodes, evenly spaced in log beta, with quintic Hermite interpolation between
them, so that fits and folds do not read the logits again. The interpolation error is at most 5e-5
nats on rows of normal logits, and 2e-4 on the worst rows known, with one item far above thousands
of equal ones.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from calibrate.core.masking import NO_WEIGHT
from calibrate.core.row_batches import in_batches
from calibrate.core.rule import horner
from calibrate.rows.root_finding import jax_defaults

N_STEPS = 128
N_NODES = N_STEPS + 1
# Each item is evaluated at all nodes, so that masked items cost more than in other kernels.
FEW_ITEMS_OF_A_PROFILE = 1 << 19
ROWS_OF_SUM = 128  # whose values as float64 stay in the cache: all at once take 5 times as long
N_VALUES = 3  # at a node: log p, and its first and second derivative in the node number
# Coefficients of t^0 to t^5, a row each for value, slope and curvature at t = 0, and at t = 1.
QUINTIC = np.array(
    [
        [1, 0, 0, -10, 15, -6],
        [0, 1, 0, -6, 8, -3],
        [0, 0, 0.5, -1.5, 1.5, -0.5],
        [0, 0, 0, 10, -15, 6],
        [0, 0, 0, -4, 7, -3],
        [0, 0, 0, 0.5, -1, 0.5],
    ]
)


class Profile(NamedTuple):
    """log p_t of rows, and its derivatives, for beta in [low, high]."""

    series: np.ndarray  # (lines, N_NODES * N_VALUES) float32
    lines: np.ndarray  # (rows,) the line of each row, so that folds share the series
    low: float
    high: float
    step: float  # distance between nodes in log beta
    concave: bool = True  # in beta, if every row has one target

    def take(self, rows: np.ndarray) -> "Profile":
        """The profile of some of the rows, by bool or positions."""
        return self._replace(lines=self.lines[rows])

    def weighted_sum(self, weight: np.ndarray) -> "Profile":
        """The weighted sum of all rows at equal beta, as the profile of one row."""
        total = np.zeros((1, self.series.shape[1]))
        for first in range(0, len(self.lines), ROWS_OF_SUM):
            part = slice(first, first + ROWS_OF_SUM)
            total += weight[part] @ self.series[self.lines[part]].astype(float)
        return self._replace(series=total, lines=np.zeros(1, int))

    def log_p(self, beta: np.ndarray) -> np.ndarray:
        """(rows,) log p_t at a beta for each row, clipped to [low, high]."""
        coefficients, t = self._read(beta)
        return np.asarray(horner(t, list(coefficients)))

    def log_p_at_each(self, betas: np.ndarray) -> np.ndarray:
        """(betas,) log p_t of the first row at several betas."""
        return self.take(np.zeros(len(betas), int)).log_p(betas)

    def derivatives(self, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(rows,) log p_t and its first and second derivative in beta, within [low, high]."""
        value, first, second = _interpolate(*self._read(beta))
        first, second = first / self.step, second / self.step**2  # in log beta
        return value, first / beta, (second - first) / beta**2

    def nodes(self) -> np.ndarray:
        """(N_NODES,) betas of the nodes."""
        return nodes(self.low, self.high)

    def _read(self, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(6, rows) coefficients of t^5 to 1 between the nodes next to each beta, and its t."""
        place = np.log(np.clip(beta, self.low, self.high) / self.low) / self.step
        first = np.minimum(place.astype(int), N_STEPS - 1)
        begin = self.series.shape[1] * self.lines + N_VALUES * first
        values = self.series.take(np.arange(2 * N_VALUES)[:, None] + begin)
        return QUINTIC.T[::-1] @ values, place - first


def _interpolate(coefficients: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, ...]:
    """(rows,) value and two derivatives at t of polynomials, coefficients (6, rows) of t^5 to 1."""
    value: np.ndarray = coefficients[0]
    first, half_second = np.zeros_like(value), np.zeros_like(value)
    for coefficient in coefficients[1:]:  # Horner's rule
        half_second = half_second * t + first
        first = first * t + value
        value = value * t + coefficient
    return value, first, 2 * half_second


def nodes(low: float, high: float) -> np.ndarray:
    """(N_NODES,) betas from low to high, evenly spaced in log beta."""
    return np.geomspace(low, high, N_NODES)


@jax_defaults()
def make_profile(logits: np.ndarray, target: np.ndarray, low: float, high: float) -> Profile:
    """Evaluates log p_T(beta) = log sum over T of exp(beta z_t) - log sum_j exp(beta z_j).

    Args:
      logits: (rows, n) float32, finite or -inf (masked).
      target: (rows,) int, an unmasked position; or (rows, n) bool, True at one or more of them.
      low, high: bounds of beta, > 0.
    """
    target = _positions(np.asarray(target))
    betas, step = nodes(low, high), math.log(high / low) / N_STEPS
    each = np.broadcast_to(betas.astype(np.float32), (len(logits), N_NODES))
    series = np.empty((len(logits), N_NODES, N_VALUES), np.float32)
    arrays = np.asarray(logits, np.float32), target, each
    for part, (z, t, beta) in in_batches(*arrays, few_items=FEW_ITEMS_OF_A_PROFILE):
        value, slope, curvature = np.asarray(_evaluate(z, t, beta), np.float64)
        first = slope * betas
        second = first + curvature * betas**2  # in log beta
        derivatives = np.stack([value, step * first, step**2 * second], axis=-1)
        series[part] = derivatives[: part.stop - part.start]
    flat = series.reshape(len(logits), N_NODES * N_VALUES)
    return Profile(flat, np.arange(len(logits)), low, high, step, concave=target.ndim == 1)


def join_profiles(parts: Sequence[Profile]) -> Profile:
    """Concatenates profiles."""
    series = np.concatenate([part.series[part.lines] for part in parts])
    concave = all(part.concave for part in parts)
    return parts[0]._replace(series=series, lines=np.arange(len(series)), concave=concave)


@jax_defaults()
def log_p(logits: np.ndarray, target: np.ndarray, betas: np.ndarray) -> np.ndarray:
    """(rows, k) float32 log p_T at k betas > 0 for each row, (rows, k); see `make_profile`."""
    values = np.empty(betas.shape, np.float32)
    batches = in_batches(
        np.asarray(logits, np.float32), _positions(np.asarray(target)), betas.astype(np.float32)
    )
    for part, batch in batches:
        values[part] = np.asarray(_evaluate(*batch)[0])[: part.stop - part.start]
    return values


def _positions(target: np.ndarray) -> np.ndarray:
    """(rows,) positions if each row has one target, otherwise the masks unchanged."""
    one_each = target.ndim > 1 and (target.sum(axis=1) == 1).all()
    return target.argmax(axis=1) if one_each else target


@jax.jit
def _evaluate(logits: jax.Array, target: jax.Array, betas: jax.Array) -> jax.Array:
    """(3, rows, k): log p_T at betas (rows, k), and its first and second derivative in beta."""
    shifted = jnp.maximum(logits - jnp.max(logits, axis=1, keepdims=True), NO_WEIGHT)
    several = target.ndim > 1
    if several:
        best = jnp.max(jnp.where(target, shifted, -jnp.inf), axis=1)
        among = jnp.maximum(jnp.where(target, shifted - best[:, None], -jnp.inf), NO_WEIGHT)
    else:
        best = jnp.take_along_axis(shifted, target[:, None], axis=1)[:, 0]

    def at(beta: jax.Array) -> jax.Array:
        of_target = jnp.stack([beta * best, best, jnp.zeros_like(best)])
        if several:
            of_target = of_target + _log_sum(among, beta)
        return of_target - _log_sum(shifted, beta)

    return jnp.moveaxis(jax.lax.map(at, betas.T), 0, -1)


def _log_sum(v: jax.Array, beta: jax.Array) -> jax.Array:
    """(3, rows) log sum exp(beta v), and its derivatives, mean and variance of v."""
    weight = jnp.exp(beta[:, None] * v)
    total = jnp.sum(weight, axis=1)
    mean = jnp.sum(weight * v, axis=1) / total
    variance = jnp.sum(weight * (v - mean[:, None]) ** 2, axis=1) / total
    return jnp.stack([jnp.log(total), mean, variance])
