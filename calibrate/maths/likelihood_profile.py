"""The likelihood profile: each row's log p_t(beta) as a short Chebyshev series in log beta.

Objectives, folds and resamples read these numbers, never the logits again.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.polynomial.chebyshev import chebvander

from calibrate.maths.row_blocks import in_blocks

N_NODES = 24


class Profile(NamedTuple):
    """log p_t of rows over beta in [low, high], and its derivatives."""

    series: np.ndarray  # (rows, N_NODES) float64, Chebyshev coefficients in log beta
    low: float
    high: float
    concave: bool = True  # in beta, as where every row has one target

    def take(self, rows: np.ndarray) -> "Profile":
        """The profile of some of the rows."""
        return self._replace(series=self.series[rows])

    def pool(self, cell: np.ndarray, weight: np.ndarray, n_cells: int) -> "Profile":
        """Rows of one cell added up, each times its weight: one row per cell.

        Where the rows of a cell have one beta, sums of log p_t lose nothing by it.
        """
        columns = [np.bincount(cell, weight * column, n_cells) for column in self.series.T]
        return self._replace(series=np.stack(columns, axis=1))

    def log_p(self, beta: np.ndarray) -> np.ndarray:
        """(rows,) log p_t at one beta of each row, within the bounds."""
        x, _ = self._place(beta)
        return _clenshaw(self.series, x)[0]

    def log_p_at_each(self, betas: np.ndarray) -> np.ndarray:
        """(rows, betas) log p_t of every row at each of some betas within the bounds."""
        x, _ = self._place(betas)
        return self.series @ chebvander(x, N_NODES - 1).T

    def derivatives(self, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(rows,) log p_t and its first and second derivative in beta; the second is <= 0."""
        x, half = self._place(beta)
        value, first, second = _clenshaw(self.series, x)
        first, second = first / half, second / half**2
        return value, first / beta, (second - first) / beta**2

    def _place(self, beta: np.ndarray) -> tuple[np.ndarray, float]:
        """Where log beta lies between the bounds, in [-1, 1], and half their distance."""
        middle, half = _span(self.low, self.high)
        return (np.log(beta) - middle) / half, half


def _span(low: float, high: float) -> tuple[float, float]:
    """Middle of the bounds of log beta, and half their distance."""
    return (math.log(high) + math.log(low)) / 2, (math.log(high) - math.log(low)) / 2


def _clenshaw(series: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Value, first and second derivative of sum_k c_k T_k(x), row by row."""
    b = [np.zeros_like(x) for _ in range(6)]  # b_k, b_k+1 and their first two derivatives
    for c in series.T[:0:-1]:
        b0 = c + 2 * x * b[0] - b[1]
        b1 = 2 * b[0] + 2 * x * b[2] - b[3]
        b2 = 4 * b[2] + 2 * x * b[4] - b[5]
        b = [b0, b[0], b1, b[2], b2, b[4]]
    value = series[:, 0] + x * b[0] - b[1]
    return value, b[0] + x * b[2] - b[3], 2 * b[2] + x * b[4] - b[5]


def profile(logits: np.ndarray, target: np.ndarray, low: float, high: float) -> Profile:
    """log p_t(beta) at Chebyshev nodes of log beta; of a set of targets, their total mass.

    log p_T(beta) = log sum over T of exp(beta z_t) - log sum_j exp(beta z_j).

    Args:
      logits: (rows, n) float32, finite or -inf (masked).
      target: (rows,) int, an unmasked position; or (rows, n) bool, True at one unmasked position
        or more.
      low: least beta, > 0.
      high: greatest beta.
    Returns:
      Profile of the rows. On the collections of trained heads it is within 5e-5 nats; of thousands
      of items that are nearly alike within 2e-3.
    """
    betas = np.broadcast_to(nodes(low, high), (len(logits), N_NODES))
    concave = target.ndim == 1 or bool((target.sum(axis=1) <= 1).all())
    return from_nodes(log_p(logits, target, betas), low, high)._replace(concave=concave)


def nodes(low: float, high: float) -> np.ndarray:
    """(N_NODES,) betas, Chebyshev nodes of their logarithm."""
    middle, half = _span(low, high)
    return np.asarray(np.exp(middle + half * np.cos(_angles())))


def from_nodes(values: np.ndarray, low: float, high: float) -> Profile:
    """The profile of rows with these values (rows, N_NODES) at the nodes."""
    to_series = 2 / N_NODES * np.cos(np.arange(N_NODES) * _angles()[:, None])
    to_series[:, 0] /= 2
    return Profile(values.astype(np.float64) @ to_series, low, high)


def _angles() -> np.ndarray:
    return (2 * np.arange(N_NODES) + 1) * np.pi / (2 * N_NODES)


def log_p(logits: np.ndarray, target: np.ndarray, betas: np.ndarray) -> np.ndarray:
    """log p_T(beta) = log sum over T of exp(beta z_t) - log sum_j exp(beta z_j), row by row.

    Args:
      logits: (rows, n), finite or -inf (masked).
      target: (rows,) int, an unmasked position; or (rows, n) bool, True at one unmasked position
        or more.
      betas: (rows, k), > 0: each row's own.
    Returns:
      (rows, k) float32, nats.
    """
    logits, target = np.asarray(logits, np.float32), np.asarray(target)
    if target.ndim == 1:
        target = np.arange(logits.shape[1]) == target[:, None]
    values = np.empty(betas.shape, np.float32)
    for part, block in in_blocks(logits, target, betas.astype(np.float32)):
        values[part] = np.asarray(_log_p(*block))[: part.stop - part.start]
    return values


@jax.jit
def _log_p(logits: jax.Array, target: jax.Array, betas: jax.Array) -> jax.Array:
    shifted = logits - jnp.max(logits, axis=1, keepdims=True)
    among = jnp.where(target, shifted, -jnp.inf)
    best = jnp.max(among, axis=1, keepdims=True)  # of the targets
    among = among - best

    def at(beta: jax.Array) -> jax.Array:
        mass = jnp.log(jnp.sum(jnp.exp(beta * among), axis=1))
        return (beta * best)[:, 0] + mass - jnp.log(jnp.sum(jnp.exp(beta * shifted), axis=1))

    values: jax.Array = jax.lax.map(at, betas.T[..., None])
    return values.T
