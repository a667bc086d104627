"""The optimal beta: the root of E_beta[z] = z_t, exact, batched and jitted.

With u = z - z_t scaled to a range of 1, P(beta) = sum over u > 0 of u exp(beta u) and N(beta) = sum
over u < 0 of |u| exp(beta u), the root is where g = log P - log N is 0. g rises and is nearly
linear in beta. Its first two derivatives come from the same exponentials, so Halley's method
from beta = 0 needs a handful of passes over the row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from calibrate.maths.blocks import in_blocks

# Row classes, tested in this order; UNSOLVED is an interior row that did not converge.
SHARP, FLAT, INTERIOR, UNSOLVED = 1, 2, 0, 3
STATUS_NAMES = {SHARP: "sharp", FLAT: "flat", INTERIOR: "interior", UNSOLVED: "unsolved"}

MAX_PASSES = 60


class OptimalBeta(NamedTuple):
    """Optimal beta and row class, one each per row."""

    beta: np.ndarray  # inf for SHARP rows, 0 for FLAT rows, NaN for UNSOLVED rows
    status: np.ndarray  # int8: INTERIOR, SHARP, FLAT or UNSOLVED


class _Passes(NamedTuple):
    """State of the iteration, (rows,) each, in units of 1 / range."""

    beta: jax.Array
    lower: jax.Array  # g < 0 here
    upper: jax.Array  # g > 0 here
    done: jax.Array
    n_passes: jax.Array


def optimal_beta(logits, target, where=None) -> OptimalBeta:
    """Inverse temperature that maximises the target's probability, row by row.

    Solves E_beta[z] = z_t for beta > 0; the left side rises with beta, so the root is unique.

    Args:
      logits: (..., n), finite or -inf (masked); float64 is solved in float64, the rest in float32.
      target: (...) int, an unmasked position in [0, n).
      where: (..., n) bool, True for real items; None means all.
    Returns:
      OptimalBeta(beta, status), each (...): beta is inf for SHARP rows (the target is the maximum
      and above the mean), 0 for FLAT rows (not above the mean: no positive optimum), NaN for
      UNSOLVED ones.
    Raises:
      ValueError: shapes that do not match, a target that is out of range or masked, a logit that
        is NaN or +inf (all checked on the host).
    Reference: Velickovic et al. 2024, section 3.
    """
    logits, target = _checked(logits, target, where)
    beta, status, _ = _solve_in_blocks(logits.reshape(-1, logits.shape[-1]), target.ravel())
    return OptimalBeta(beta.reshape(target.shape), status.reshape(target.shape))


def _checked(logits, target, where) -> tuple[np.ndarray, np.ndarray]:
    """Validated logits, masked items set to -inf, and targets."""
    logits, target = np.asarray(logits), np.asarray(target)
    if logits.ndim == 0 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"target has shape {target.shape}, logits {logits.shape}; "
            "give one target for each row of logits"
        )
    if not np.issubdtype(target.dtype, np.integer):
        raise ValueError(f"target has dtype {target.dtype}; give integer positions")
    if logits.dtype != np.float64:
        logits = logits.astype(np.float32)
    n = logits.shape[-1]
    target = target.astype(np.int64)
    outside = (target < 0) | (target >= n)
    if outside.any():
        raise ValueError(f"target {target[outside][0]} is not a position in [0, {n})")
    if where is not None:
        where = np.asarray(where, bool)
        if where.shape != logits.shape:
            raise ValueError(f"where has shape {where.shape}, logits {logits.shape}; give the same")
        logits = np.where(where, logits, logits.dtype.type(-np.inf))
    bad = ~(logits.max(axis=-1, initial=-np.inf) < np.inf)  # the maximum is NaN if any item is
    if bad.any():
        raise ValueError(f"logits of row {_first(bad)} hold NaN or +inf; leave such rows out")
    masked = np.take_along_axis(logits, target[..., None], axis=-1)[..., 0] == -np.inf
    if masked.any():
        raise ValueError(f"the target of row {_first(masked)} is masked; choose a real item")
    return logits, target.astype(np.int32)


def _first(rows: np.ndarray) -> tuple[int, ...]:
    return tuple(np.argwhere(rows)[0].tolist())


def _solve_in_blocks(logits, target) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """beta, status and number of passes for (rows, n) logits, in blocks of one traced shape."""
    rows = len(logits)
    beta = np.empty(rows, logits.dtype)
    status = np.empty(rows, np.int8)
    n_passes = np.empty(rows, np.int8)
    with jax.enable_x64(logits.dtype == np.float64):
        for part, block in in_blocks(logits, target):
            solved = _solve(*block)
            for out, values in zip((beta, status, n_passes), solved, strict=True):
                out[part] = np.asarray(values)[: part.stop - part.start]
    return beta, status, n_passes


@jax.jit
def _solve(logits: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Kernel: (rows, n) finite or -inf logits, targets in range -> beta, status, passes."""
    at_target = jnp.take_along_axis(logits, target[:, None], axis=1)
    u = jnp.where(logits == -jnp.inf, 0, logits - at_target)
    spread = jnp.max(u, axis=1) - jnp.min(u, axis=1)
    spread = jnp.where(spread > 0, spread, 1)
    v = u / spread[:, None]
    up = v > 0
    # As beta grows, the highest item dominates P and the nearest one below the target N.
    highest = jnp.max(v, axis=1)
    nearest = jnp.max(jnp.where(v < 0, v, -1), axis=1)
    exponent = v - jnp.where(up, highest[:, None], nearest[:, None])

    def halley(beta: jax.Array, weights: jax.Array | float) -> tuple[jax.Array, ...]:
        """P and N, each less its dominant exponential, g, and Halley's step for g."""
        moments = v * weights
        P, mean_up, variance_up = _moments(jnp.maximum(moments, 0), v)
        N, mean_down, variance_down = _moments(-jnp.minimum(moments, 0), v)
        g = beta * (highest - nearest) + jnp.log(P) - jnp.log(N)
        slope, bend = mean_up - mean_down, variance_up - variance_down
        newton = g / slope
        # Between 2/3 and twice Newton's step: far out, the curvature is no guide.
        return P, N, g, newton / (1 - jnp.clip(newton * bend / slope / 2, -0.5, 0.5))

    def one_pass(state: _Passes) -> _Passes:
        *_, g, step = halley(state.beta, jnp.exp(state.beta[:, None] * exponent))
        return _advance(state, g, step)

    # At beta = 0 every exponential is 1: the first pass classifies the rows as well.
    zero = jnp.zeros_like(spread)
    excess, deficit, g, step = halley(zero, 1.0)
    sharp = (excess == 0) & (deficit > 0)
    flat = (excess >= deficit) & ~sharp
    state = _Passes(zero, zero, zero + jnp.inf, sharp | flat, zero.astype(jnp.int8))
    state = jax.lax.while_loop(
        lambda state: ~jnp.all(state.done), one_pass, _advance(state, g, step)
    )
    solved = state.n_passes <= MAX_PASSES
    beta = jnp.where(solved, state.beta, jnp.nan) / spread
    beta = jnp.where(sharp, jnp.inf, jnp.where(flat, 0, beta))
    status = jnp.where(sharp, SHARP, jnp.where(flat, FLAT, jnp.where(solved, INTERIOR, UNSOLVED)))
    return beta, status.astype(jnp.int8), state.n_passes


def _moments(weights: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum of the weights (rows, n), and mean and variance of v under them, row by row."""
    total = jnp.sum(weights, axis=1)
    mean = jnp.sum(weights * v, axis=1) / total
    return total, mean, jnp.sum(weights * v * v, axis=1) / total - mean**2


def _advance(state: _Passes, g: jax.Array, step: jax.Array) -> _Passes:
    """One safeguarded step; a row is done when the step that it takes is the last needed.

    Halley's method converges with the third power: a step of relative size e leaves an error of
    about e^3, so one below half the cube root of eps is the last.
    """
    tolerance = 0.5 * jnp.cbrt(jnp.finfo(g.dtype).eps).astype(g.dtype)
    lower = jnp.where(g < 0, state.beta, state.lower)
    upper = jnp.where(g > 0, state.beta, state.upper)
    beta = state.beta - step
    last = jnp.abs(step) <= tolerance * beta
    inside = (beta > lower) & (beta < upper)
    bisection = jnp.where(upper < jnp.inf, (lower + upper) / 2, 2 * lower + 1)
    beta = jnp.where(last | inside, beta, bisection)
    n_passes = state.n_passes + ~state.done
    return _Passes(
        beta=jnp.where(state.done, state.beta, beta),
        lower=lower,
        upper=upper,
        done=state.done | last | (n_passes > MAX_PASSES),
        n_passes=n_passes,
    )
