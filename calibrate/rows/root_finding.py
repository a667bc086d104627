"""Kernels of the optimal beta: safeguarded root finding for one target or a set of targets.

One target: let v = (z - z_t) / range, with beta in units of 1 / range, P(beta) = sum over v > 0 of
v exp(beta v), and N(beta) = sum over v < 0 of |v| exp(beta v). The root is where g = log P - log N
is 0. g increases and is nearly linear in beta. Its first two derivatives use the same exponentials,
so that Halley's method from beta = 0 needs only a few passes over the row.

A set of targets T: its probability increases with the log odds against the other items O,

    L(beta) = log sum over T of exp(beta z) - log sum over O of exp(beta z),

whose slope is E_T[z] - E_O[z], with means under softmax restricted to T and O. L may have several
maxima: a grid finds them, Newton's method refines the highest, and the limits at 0 and infinity are
compared with these.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

MAX_PASSES = 60  # a count of MAX_PASSES + 1 marks a row that did not converge
N_BETAS = 128
# Least beta of the grid above 0, in units of 1 / range. Below it, L differs from a parabola by less
# than 1e-6, since third cumulants are below range^3 / 10.
MIN_GRID_BETA = 1 / 32
N_PEAKS = 3  # refined: on the grid, peaks of almost equal height may be in the wrong order


@contextlib.contextmanager
def jax_defaults() -> Iterator[None]:
    """Sets JAX's default promotion of dtypes and ranks, whatever the user has configured."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Iteration(NamedTuple):
    """State of the root finder; (rows,) each, beta in units of 1 / range."""

    beta: jax.Array
    lower: jax.Array  # g < 0 here
    upper: jax.Array  # g >= 0 here
    done: jax.Array
    n_passes: jax.Array


def moments(weights: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(rows,) sum of the weights (rows, n), and mean and variance of v under them."""
    total = jnp.sum(weights, axis=1)
    mean = jnp.sum(weights * v, axis=1) / total
    return total, mean, jnp.sum(weights * v * v, axis=1) / total - mean**2


def advance(state: Iteration, g: jax.Array, step: jax.Array, order: int) -> Iteration:
    """Takes one safeguarded step; a row is done when no further step is needed.

    `step` is subtracted. A step of relative size e of a method of order k leaves an error of about
    e^k. Therefore a step smaller than half the k-th root of eps is the last one, as is one in a
    bracket with no float between its ends.
    """
    eps = float(jnp.finfo(g.dtype).eps)
    lower = jnp.where(g < 0, state.beta, state.lower)
    upper = jnp.where(g >= 0, state.beta, state.upper)
    beta = state.beta - step
    last = jnp.abs(step) <= 0.5 * eps ** (1 / order) * beta
    inside = (beta > lower) & (beta < upper)
    # no upper end yet: double
    bisection = jnp.where(upper < jnp.inf, (lower + upper) / 2, 2 * lower + 1)
    beta = jnp.where(last | inside, beta, bisection)
    n_passes = state.n_passes + ~state.done
    return Iteration(
        beta=jnp.where(state.done, state.beta, beta),
        lower=lower,
        upper=upper,
        done=state.done | last | (upper - lower < eps * upper) | (n_passes > MAX_PASSES),
        n_passes=n_passes,
    )


@jax.jit
def solve_one(logits: jax.Array, target: jax.Array) -> jax.Array:
    """(rows,) optimal beta of logits (rows, n), finite or -inf, and one target each (rows,)."""
    at_target = jnp.take_along_axis(logits, target[:, None], axis=1)
    u = jnp.where(logits == -jnp.inf, 0, logits - at_target)
    spread = jnp.max(u, axis=1) - jnp.min(u, axis=1)
    spread = jnp.where(spread > 0, spread, 1)
    v = u / spread[:, None]
    up = v > 0
    # At large beta the highest item dominates P, and the nearest one below the target dominates N.
    highest = jnp.max(v, axis=1)
    nearest = jnp.max(jnp.where(v < 0, v, -1), axis=1)
    exponent = v - jnp.where(up, highest[:, None], nearest[:, None])

    def one_pass(state: Iteration) -> Iteration:
        """A step of Halley's method for g; P and N are divided by their dominant exponentials."""
        weighted = v * jnp.exp(state.beta[:, None] * exponent)
        P, mean_up, variance_up = moments(jnp.maximum(weighted, 0), v)
        N, mean_down, variance_down = moments(-jnp.minimum(weighted, 0), v)
        g = state.beta * (highest - nearest) + jnp.log(P) - jnp.log(N)
        slope, curvature = mean_up - mean_down, variance_up - variance_down
        newton = g / slope
        # Between 2/3 and twice Newton's step: far from the root the curvature misleads.
        step = newton / (1 - jnp.clip(newton * curvature / slope / 2, -0.5, 0.5))
        return advance(state, g, step, order=3)

    excess, deficit = jnp.sum(jnp.maximum(v, 0), axis=1), -jnp.sum(jnp.minimum(v, 0), axis=1)
    sharp = (excess == 0) & (deficit > 0)
    flat = (excess >= deficit) & ~sharp
    zero = jnp.zeros_like(spread)
    state = Iteration(zero, zero, zero + jnp.inf, sharp | flat, zero.astype(jnp.int8))
    state = jax.lax.while_loop(lambda state: ~jnp.all(state.done), one_pass, state)
    beta = jnp.where(state.n_passes <= MAX_PASSES, state.beta, jnp.nan) / spread
    return jnp.where(sharp, jnp.inf, jnp.where(flat, 0, beta))


class _Sides(NamedTuple):
    """Logits minus the highest of their side, targets or others, in units of the row's range."""

    v: jax.Array  # (rows, n), <= 0, and 0 where masked
    targets: jax.Array  # (rows, n) bool
    others: jax.Array
    margin: jax.Array  # (rows,), the highest target minus the highest of the others


@jax.jit
def solve_sets(logits: jax.Array, target: jax.Array) -> jax.Array:
    """(rows,) optimal beta of logits (rows, n), finite or -inf, and targets (rows, n) bool."""
    sides, spread = _sides(logits, target)
    betas = _grid(sides)

    def value_and_slope(beta: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, slope, _ = _log_odds(sides, beta)
        return value, slope

    def peak(bracket: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        lower, upper, guess = bracket
        return _peak(sides, lower, upper, guess)

    values, slopes = jax.lax.map(value_and_slope, betas)
    peaks = jax.lax.map(peak, _brackets(betas, values, slopes))
    highest = jnp.argmax(peaks[0], axis=0)[None]
    value, beta = (jnp.take_along_axis(part, highest, axis=0)[0] for part in peaks)
    at_zero, at_infinity = _ends(sides)
    # A peak must exceed the limits by more than rounding: if the sides are equal, L is constant.
    rounding = 4 * jnp.finfo(value.dtype).eps
    sharp = (at_infinity > at_zero) & (value <= at_infinity + rounding)
    # If L increases at beta = 0, there is an optimum, however small its gain.
    flat = ~sharp & ~(slopes[0] > rounding) & (value <= at_zero + rounding)
    return jnp.where(sharp, jnp.inf, jnp.where(flat, 0, beta / spread))


def _sides(logits: jax.Array, target: jax.Array) -> tuple[_Sides, jax.Array]:
    """The sides of each row, and its range, or 1 if the range is 0."""
    real = logits > -jnp.inf
    sides = real & target, real & ~target
    best, second = (jnp.max(logits, axis=1, where=side, initial=-jnp.inf) for side in sides)
    spread = jnp.max(logits, axis=1) - jnp.min(logits, axis=1, where=real, initial=jnp.inf)
    spread = jnp.where(spread > 0, spread, 1)
    u = logits - jnp.where(target, best[:, None], second[:, None])
    return _Sides(jnp.where(real, u, 0) / spread[:, None], *sides, (best - second) / spread), spread


def _log_odds(sides: _Sides, beta: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(rows,) L, its slope and its curvature at one beta for each row."""
    weights = jnp.exp(beta[:, None] * sides.v)
    mass, mean, variance = moments(jnp.where(sides.targets, weights, 0), sides.v)
    rest, mean_rest, variance_rest = moments(jnp.where(sides.others, weights, 0), sides.v)
    value = beta * sides.margin + jnp.log(mass) - jnp.log(rest)
    return value, sides.margin + mean - mean_rest, variance - variance_rest


def _ends(sides: _Sides) -> tuple[jax.Array, jax.Array]:
    """(rows,) limits of L at beta = 0 and at infinity."""

    def log_ratio(items: jax.Array | bool) -> jax.Array:
        counts = (jnp.sum(side & items, axis=1) for side in (sides.targets, sides.others))
        return jnp.log(jnp.divide(*(count.astype(sides.v.dtype) for count in counts)))

    at_infinity = jnp.where(sides.margin == 0, log_ratio(sides.v == 0), sides.margin * jnp.inf)
    return log_ratio(True), at_infinity


def _grid(sides: _Sides) -> jax.Array:
    """(1 + N_BETAS, rows) grid of beta: 0, then even steps of log beta up to a greatest one.

    If another item leads, L decreases from beta = log(n) / |margin| on, since E_O[z] >= max z -
    log(n) / beta. If the margin is 0, items below the highest have no weight at the greatest beta.
    """
    n, dtype = sides.v.shape[1], sides.v.dtype
    below = -jnp.max(sides.v, axis=1, where=sides.v < 0, initial=-1)
    gap = jnp.where(sides.margin == 0, below, jnp.abs(sides.margin))
    greatest = math.log(n / float(jnp.finfo(dtype).eps)) / gap
    steps = jnp.linspace(0, 1, N_BETAS, dtype=dtype)[:, None]
    betas = jnp.exp(math.log(MIN_GRID_BETA) + steps * jnp.log(greatest / MIN_GRID_BETA))
    return jnp.concatenate([jnp.zeros_like(betas[:1]), betas])


def _brackets(
    betas: jax.Array, values: jax.Array, slopes: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(N_PEAKS, rows) brackets of the highest peaks of L: two betas, and a guess by the secant.

    If there are fewer peaks, the guesses of the others are NaN.
    """
    rises = slopes > 0
    score = jnp.where(rises[:-1] & ~rises[1:], jnp.maximum(values[:-1], values[1:]), -jnp.inf)
    score, place = (part.T for part in jax.lax.top_k(score.T, N_PEAKS))

    def at(points: jax.Array, offset: int) -> jax.Array:
        return jnp.take_along_axis(points, place + offset, axis=0)

    lower, upper, rise, fall = at(betas, 0), at(betas, 1), at(slopes, 0), at(slopes, 1)
    guess = lower + (upper - lower) * rise / (rise - fall)
    return lower, upper, jnp.where(score > -jnp.inf, guess, jnp.nan)


def _peak(
    sides: _Sides, lower: jax.Array, upper: jax.Array, guess: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(rows,) L at a peak between two betas, -inf if the guess is NaN; and its beta, or NaN."""

    def one_pass(state: Iteration) -> Iteration:
        _, slope, curvature = _log_odds(sides, state.beta)
        # Newton's step leads to a maximum only where L is concave; elsewhere bisect.
        step = jnp.where(curvature < 0, slope / curvature, jnp.inf)
        return advance(state, -slope, step, order=2)

    none = jnp.isnan(guess)
    state = Iteration(guess, lower, upper, none, jnp.zeros(guess.shape, jnp.int8))
    state = jax.lax.while_loop(lambda state: ~jnp.all(state.done), one_pass, state)
    value, _, _ = _log_odds(sides, state.beta)
    beta = jnp.where(state.n_passes <= MAX_PASSES, state.beta, jnp.nan)
    return jnp.where(none, -jnp.inf, value), beta
