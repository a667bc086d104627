"""The likelihood profile: each row's log p_t(beta) and its slope at nodes of log beta.

Objectives, folds and resamples read these numbers, never the logits again. Beside it is the profile
of a row whose target is drawn from plain softmax: E[log p(beta)] under p(1) = beta E_1[z] - log Z.

Between two nodes log p is a quintic in the node number: it has the value and slope at both, and the
curvature there that values and slopes at the next nodes suggest. One item in front of n that are
alike has log Z turn within some 1 / log n of log beta, anywhere: nodes are evenly spaced.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from calibrate.core.masking import NO_WEIGHT
from calibrate.core.row_batches import in_batches

N_STEPS = 28  # between the bounds; a node more lies beyond each
N_NODES = N_STEPS + 3
POOLED_IN = 8  # parts, of columns
# Four times the quintic between t = 0 and 1, lowest power of t first, that goes with a value or a
# slope of 1 at t = -1, 0, 1 or 2. Curvature at 0: 2 (f(1) - 2 f(0) + f(-1)) - (f'(1) - f'(-1)) / 2.
FOUR_QUINTICS = [
    [0, 0, 4, -12, 12, -4],  # value at -1
    [0, 0, 1, -3, 3, -1],  # slope at -1
    [4, 0, -8, -12, 28, -12],  # value at 0
    [0, 4, 0, -23, 30, -11],
    [0, 0, 4, 20, -32, 12],  # value at 1
    [0, 0, -1, -13, 25, -11],
    [0, 0, 0, 4, -8, 4],  # value at 2
    [0, 0, 0, -1, 2, -1],
]
QUINTICS = np.array(FOUR_QUINTICS) / 4
SLOPES_IN_T = QUINTICS[:, 1:] * np.arange(1, 6)
DERIVATIVES = (QUINTICS, SLOPES_IN_T, SLOPES_IN_T[:, 1:] * np.arange(1, 5))
NEAR = np.arange(len(QUINTICS))  # columns of a series, from those of the node before t = 0


class Profile(NamedTuple):
    """log p_t of rows over beta in [low, high], and its derivatives."""

    # (rows, 2 N_NODES): by node the value and the slope in the node number; `log_p` and
    # `derivatives` also read (objectives, rows, 2 N_NODES)
    series: np.ndarray
    low: float
    high: float
    concave: bool = True  # in beta, as where every row has one target

    def take(self, rows: np.ndarray | slice) -> "Profile":
        """The profile of some of the rows."""
        return self._replace(series=self.series[rows])

    def mix(self, other: "Profile", weight: float) -> "Profile":
        """The profile with the other at this weight, and itself at 1 - weight, row by row."""
        return self._replace(series=(1 - weight) * self.series + weight * other.series)

    def power(self, q: float) -> "Profile":
        """The profile of the score (p^q - 1) / q in place of log p, q = 0; it is not concave."""
        if q == 0:
            return self
        value, series = self.series[:, ::2], np.empty_like(self.series)
        series[:, ::2] = np.expm1(q * value) / q
        series[:, 1::2] = np.exp(q * value) * self.series[:, 1::2]
        return self._replace(series=series, concave=False)

    def pool(self, cell: np.ndarray, weight: np.ndarray, n_cells: int) -> "Profile":
        """Rows of one cell, which have one beta, added up, each times its weight."""
        from scipy.sparse import csc_array

        one_each = np.arange(len(cell) + 1)
        sums = csc_array((weight, cell, one_each), (n_cells, len(cell)))
        # SciPy copies a series of another dtype than float64: then in parts.
        n_parts = 1 if self.series.dtype == np.float64 else POOLED_IN
        parts = np.array_split(self.series, n_parts, axis=1)
        return self._replace(series=np.hstack([sums @ part for part in parts]))

    def log_p(self, beta: np.ndarray) -> np.ndarray:
        """(..., rows) log p_t at betas of each row, (..., rows), within the bounds."""
        return self._at(beta, 0)[0]

    def log_p_at_each(self, betas: np.ndarray) -> np.ndarray:
        """(rows, betas) log p_t of every row at each of some betas within the bounds."""
        return self._at_each(betas, 0)[0].astype(np.float64)

    def with_slope_at_each(self, betas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same, and its slope in beta."""
        value, slope = self._at_each(betas, 1)
        return value, slope / (betas * _step(self.low, self.high))

    def derivatives(self, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(..., rows) log p_t and its first and second derivative in beta, which is <= 0."""
        step = _step(self.low, self.high)
        value, first, second = self._at(beta, 2)
        first, second = first / step, second / step**2  # in log beta
        return value, first / beta, (second - first) / beta**2

    def _at(self, beta: np.ndarray, order: int) -> list[np.ndarray]:
        """(..., rows) log p_t and its derivatives in the node number, up to an order."""
        first, t = self._place(beta)
        *shape, width = self.series.shape
        begin = width * np.arange(math.prod(shape)).reshape(shape)  # of a row in the flat series
        place = begin + 2 * first  # of its node before, two columns a node
        near = self.series.take(NEAR[:, None] + place.ravel())
        of_order = (quintics.T @ near for quintics in DERIVATIVES[: order + 1])
        return [_horner(powers.reshape(len(powers), *beta.shape), t) for powers in of_order]

    def _at_each(self, betas: np.ndarray, order: int) -> list[np.ndarray]:
        """(rows, betas) log p_t and its derivatives in the node number, up to an order."""
        first, t = self._place(betas)
        columns, values = 2 * first[:, None] + NEAR, []
        for quintics in DERIVATIVES[: order + 1]:
            of_beta = np.zeros((self.series.shape[1], len(betas)), self.series.dtype)
            weights = np.vander(t, quintics.shape[1], increasing=True) @ quintics.T
            of_beta[columns.T, np.arange(len(betas))] = weights.T
            values.append(self.series @ of_beta)
        return values

    def _place(self, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The last node before each beta, and the way from there to the next, from 0 to 1."""
        steps = np.log(beta / self.low) / _step(self.low, self.high)
        first = np.minimum(steps.astype(int), N_STEPS - 1)
        return first, steps - first


def _horner(c: np.ndarray, t: np.ndarray) -> np.ndarray:
    """(...) values at t of polynomials (k, ...), lowest power first."""
    value: np.ndarray = c[-1]
    for coefficient in c[-2::-1]:
        value *= t
        value += coefficient
    return value


def _step(low: float, high: float) -> float:
    """Distance of the nodes in log beta."""
    return math.log(high / low) / N_STEPS


def plain_power(plain: Profile, mean: np.ndarray, q: float) -> Profile:
    """The profile of the score (p^q - 1) / q, expected of a target drawn from plain softmax.

    E[p^q] = Z(1 + q beta) / (Z(1) Z(beta)^q), and log Z(beta) = beta mean - plain(beta), with plain
    and mean as `profile` returns them. q = 0 is log p.
    """
    if q == 0:
        return plain
    betas = nodes(plain.low, plain.high)
    mean = mean[:, None]
    log_z = betas * mean - plain.series[:, ::2]
    log_z_slope = mean - plain.series[:, 1::2] / (betas * _step(plain.low, plain.high))
    at = np.clip(1 + q * betas, plain.low, betas[-1])
    of_at, slope_of_at = plain.with_slope_at_each(at)
    log_z_1 = mean - plain.with_slope_at_each(np.ones(1))[0]
    power = np.exp(at * mean - of_at - log_z_1 - q * log_z)
    slope = power * (mean - slope_of_at - log_z_slope)
    return from_nodes((power - 1) / q, slope, plain.low, plain.high)._replace(concave=False)


def profile(
    logits: np.ndarray, target: np.ndarray, low: float, high: float
) -> tuple[Profile, Profile, np.ndarray, np.ndarray]:
    """log p_t(beta) from its values and slopes at nodes; of a set of targets, their mass.

    log p_T(beta) = log sum over T of exp(beta z_t) - log sum_j exp(beta z_j).

    Args:
      logits: (rows, n) float32, finite or -inf (masked).
      target: (rows,) int, an unmasked position; or (rows, n) bool, True at one or more of them.
      low, high: bounds of beta, > 0.
    Returns:
      log p_t; the expected log p of a target that is drawn from plain softmax; and (rows,) each,
      the mean of z - max z and the variance of z under plain softmax. At bounds of 1 and 64 the
      worst rows known, one item in front of others that are alike, are within 2e-5 nats up to
      n = 1,024, 8e-5 at 16,384 and 3e-4 at 131,072; rows of normal or uniform logits are within
      3e-6 at any of these.
    """
    target = _positions(target)
    betas = nodes(low, high)
    of_target, expected, (mean, variance) = _evaluate(
        logits, target, np.broadcast_to(betas, (len(logits), len(betas)))
    )
    log_p = from_nodes(of_target[0], of_target[1], low, high)._replace(concave=target.ndim == 1)
    return log_p, from_nodes(expected[0], expected[1], low, high), mean, variance


def nodes(low: float, high: float) -> np.ndarray:
    """(N_NODES,) betas, evenly spaced in their logarithm; the first and last are out of bounds."""
    return np.asarray(low * np.exp(_step(low, high) * np.arange(-1, N_STEPS + 2)))


def from_nodes(value: np.ndarray, slope: np.ndarray, low: float, high: float) -> Profile:
    """The profile of rows with these values, and slopes in beta, at the nodes: (rows, N_NODES)."""
    of_node = slope * (_step(low, high) * nodes(low, high)).astype(slope.dtype)
    return Profile(np.stack([value, of_node], axis=2).reshape(-1, 2 * N_NODES), low, high)


def join_profiles(parts: Sequence[Profile]) -> Profile:
    """The profiles of all parts' rows, in order."""
    series = np.concatenate([part.series for part in parts])
    return parts[0]._replace(series=series, concave=all(part.concave for part in parts))


def log_p(logits: np.ndarray, target: np.ndarray, betas: np.ndarray) -> np.ndarray:
    """(rows, k) float32 log p_T at betas of each row, (rows, k) > 0, of rows as in `profile`."""
    return np.asarray(_evaluate(logits, _positions(np.asarray(target)), betas)[0][0])


def _positions(target: np.ndarray) -> np.ndarray:
    """(rows,) positions where each row has one target, else the sets as they are."""
    one_each = target.ndim > 1 and (target.sum(axis=1) == 1).all()
    return target.argmax(axis=1) if one_each else target


def _evaluate(logits: np.ndarray, target: np.ndarray, betas: np.ndarray) -> list[np.ndarray]:
    """Float32 likelihoods and moments of rows, at betas as in `log_p`.

    Returns log p_T and its slope in beta, (2, rows, k); the same, expected of a target that is
    drawn from plain softmax; the mean of z - max z and the variance of z under it, (2, rows).
    """
    logits = np.asarray(logits, np.float32)
    shapes = (betas.shape, betas.shape, (len(logits),))
    outputs = [np.empty((2, *shape), np.float32) for shape in shapes]
    for part, batch in in_batches(logits, target, betas.astype(np.float32)):
        for out, values in zip(outputs, _evaluate_batch(*batch), strict=True):
            out[:, part] = np.asarray(values)[:, : part.stop - part.start]
    return outputs


@jax.jit
def _evaluate_batch(
    logits: jax.Array, target: jax.Array, betas: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    shifted = jnp.maximum(logits - jnp.max(logits, axis=1, keepdims=True), NO_WEIGHT)
    several = target.ndim > 1
    if several:
        best = jnp.max(jnp.where(target, shifted, -jnp.inf), axis=1)
        among = jnp.maximum(jnp.where(target, shifted - best[:, None], -jnp.inf), NO_WEIGHT)
    else:
        best = jnp.take_along_axis(shifted, target[:, None], axis=1)[:, 0]
    p = jax.nn.softmax(shifted, axis=1)
    mean = jnp.sum(p * shifted, axis=1)
    variance = jnp.sum(p * (shifted - mean[:, None]) ** 2, axis=1)

    def linear(beta: jax.Array, slope: jax.Array) -> jax.Array:
        """(2, rows): the value and the slope of beta times a slope."""
        return jnp.stack([beta * slope, slope])

    def log_p_at(beta: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_all = _log_sum(shifted, beta)
        mass = _log_sum(among, beta) if several else 0.0
        return linear(beta, best) + mass - of_all, linear(beta, mean) - of_all

    of_target, expected = jax.lax.map(log_p_at, betas.T)  # (k, 2, rows)
    of_target, expected = (jnp.transpose(x, (1, 2, 0)) for x in (of_target, expected))
    return of_target, expected, jnp.stack([mean, variance])


def _log_sum(v: jax.Array, beta: jax.Array) -> jax.Array:
    """(2, rows): log sum exp(beta v) and its slope, the mean of v under softmax(beta v)."""
    w = jnp.exp(beta[:, None] * v)
    total = jnp.sum(w, axis=1)
    return jnp.stack([jnp.log(total), jnp.sum(w * v, axis=1) / total])
