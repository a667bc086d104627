"""Roots of functions of beta, one per row: safeguarded steps, and the moments they are made of."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MAX_PASSES = 60


class Passes(NamedTuple):
    """State of the iteration, (rows,) each, in units of 1 / range."""

    beta: jax.Array
    lower: jax.Array  # g < 0 here
    upper: jax.Array  # g >= 0 here
    done: jax.Array
    n_passes: jax.Array


def moments(weights: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum of the weights (rows, n), and mean and variance of v under them, row by row."""
    total = jnp.sum(weights, axis=1)
    mean = jnp.sum(weights * v, axis=1) / total
    return total, mean, jnp.sum(weights * v * v, axis=1) / total - mean**2


def advance(state: Passes, g: jax.Array, step: jax.Array, order: int) -> Passes:
    """One safeguarded step; a row is done when the step that it takes is the last needed.

    A method of order k converges with the k-th power: a step of relative size e leaves an error
    of about e^k, so one below half the k-th root of eps is the last. So is one within a bracket
    that has no inside.
    """
    eps = float(jnp.finfo(g.dtype).eps)
    lower = jnp.where(g < 0, state.beta, state.lower)
    upper = jnp.where(g >= 0, state.beta, state.upper)
    beta = state.beta - step
    last = jnp.abs(step) <= 0.5 * eps ** (1 / order) * beta
    inside = (beta > lower) & (beta < upper)
    bisection = jnp.where(upper < jnp.inf, (lower + upper) / 2, 2 * lower + 1)
    beta = jnp.where(last | inside, beta, bisection)
    n_passes = state.n_passes + ~state.done
    return Passes(
        beta=jnp.where(state.done, state.beta, beta),
        lower=lower,
        upper=upper,
        done=state.done | last | (upper - lower < eps * upper) | (n_passes > MAX_PASSES),
        n_passes=n_passes,
    )
