"""Softmax in JAX that applies a fit at inference, in place of jax.nn.softmax."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from calibrate.evaluate_rule import (
    beta_at,
    check_fit,
    check_given,
    features_of,
    head_numbers,
    require_last_axis,
)
from calibrate.jax.shannon_entropy import (
    Axis,
    centre,
    check_broadcasts,
    hashable,
    known,
    log_size,
    readable,
    real_logits,
    wide,
)
from calibrate.store.fit import Fit

SHORT_ROW = 64  # items


def inverse_temperature(
    H: ArrayLike | None, coefficients: Fit, *, n: ArrayLike | None = None
) -> jax.Array:
    """beta of a fit: a constant, beta(H), beta(n) or beta(H, n), as its kind has it.

    beta(H) = clip(p(clip(H, lo, hi)), min_beta, max_beta), and 1 up to a min_entropy above 0;
    beta(n) = clip(kappa log n + b, min_beta, max_beta); beta(H, n) adds terms of log n to p(H).
    core/rule.py has the equations.

    Args:
      H: entropy in nats, any shape; computed in float32 or wider. For a fit per head, as `entropy`
        gives it for logits (..., heads, queries, items): (..., heads, queries). A fit whose beta
        does not depend on H takes its shape alone, or None.
      coefficients: a fit, from `calibrate.load`; static under jit.
      n: number of unmasked items, broadcastable to H; 0 counts as 1. For fits by set size.
    Returns:
      beta, of H's shape (n's if H is None, () if both are), dimensionless; 1 for heads without an
      entry.
    Raises:
      CoefficientsError: no fit was given, its heads are not those of H, or H or n is missing.
      ValueError: n does not broadcast to H, or a masked array of NumPy.
    Reference: Velickovic et al. 2024, section 3.
    """
    fit = check_fit(coefficients)
    H, n = (readable(x, name, "inverse_temperature") for name, x in (("H", H), ("n", n)))
    check_given(fit, H, n)
    check_broadcasts("n", n, "H", H)
    beta: jax.Array = _inverse_temperature(H, n, fit)
    return beta


@jax.jit
def _inverse_temperature(H: ArrayLike | None, n: ArrayLike | None, coefficients: Fit) -> jax.Array:
    given = n if H is None else H
    entropy, log_n, like = None, None, jnp.asarray(0.0 if given is None else given)
    if coefficients.rule.by_entropy:
        entropy = like.astype(wide(like.dtype))
    if coefficients.rule.by_size:
        items = jnp.asarray(n)
        dtype = wide(items.dtype) if entropy is None else entropy.dtype
        log_n = jnp.log(jnp.maximum(items.astype(dtype), 1))
        log_n = jnp.broadcast_to(log_n, like.shape)
    zeros = partial(jnp.zeros, like.shape, wide(like.dtype))
    x = features_of(coefficients, entropy, log_n, zeros)
    beta: jax.Array = beta_at(x, head_table(coefficients, x.either, -2), coefficients, jnp)
    return beta


def head_table(fit: Fit, x: jax.Array | jax.ShapeDtypeStruct, head_axis: int) -> jax.Array | None:
    """The numbers of each head along an axis of x, (numbers, 1, ..., heads, ...); None if alike."""
    numbers = head_numbers(fit, x.shape, head_axis)
    if numbers is None:
        return None
    table = jnp.asarray(numbers, x.dtype)
    return table.reshape(len(table), *[1] * (x.ndim + head_axis), -1, *[1] * (-head_axis - 1))


def adaptive_softmax(
    logits: ArrayLike,
    coefficients: Fit,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    entropy_gradient: bool = True,
) -> jax.Array:
    """softmax(beta(H) z), with H the entropy of softmax(z): jax.nn.softmax, sharpened by a fit.

    Fits by size give softmax(beta(n) z) or softmax(beta(H, n) z), with n the number of unmasked
    items: those of `where` that lie within 9,000 of the row's highest logit. Padding of -inf, -1e9
    or the least number of a dtype is not counted.

    Args:
      logits: any shape and real dtype; entropy and beta are computed in float32 or wider. For a
        fit per head (..., heads, queries, items).
      coefficients: a fit, from `calibrate.load`; static under jit: another fit retraces.
      axis: the axis or axes of the items; None means all. The last one for a fit per head.
      where: bool, broadcastable to logits, True for real items; None means all. Masked items get
        probability 0 and count neither in the entropy, n nor the normaliser.
      entropy_gradient: whether gradients flow through H too, as in the paper's code; n has none.
    Returns:
      Probabilities, of the logits' shape and dtype. A row whose unmasked items are all -inf is
      NaN, as in jax.nn.softmax; a row that `where` masks throughout is 0.
    Raises:
      CoefficientsError: no fit was given, or it does not fit the heads of the logits.
      TypeError: complex logits, or a tensor of PyTorch.
      ValueError: a masked array of NumPy, or `where` of another shape.
    Reference: Velickovic et al. 2024, section 3.
    """
    fit = check_fit(coefficients)
    logits = readable(logits, "logits", "adaptive_softmax")
    where = readable(where, "where", "adaptive_softmax")
    check_broadcasts("where", where, "logits", logits)
    axis = hashable(axis)
    require_last_axis(fit, "axis", axis, jnp.ndim(logits))
    probs: jax.Array = _adaptive_softmax(logits, fit, axis, where, entropy_gradient)
    return probs


@partial(jax.jit, static_argnames=("axis", "entropy_gradient"))
def _adaptive_softmax(
    logits: ArrayLike,
    coefficients: Fit,
    axis: Axis,
    where: ArrayLike | None,
    entropy_gradient: bool,
) -> jax.Array:
    logits = jnp.asarray(logits)
    where = None if where is None else jnp.asarray(where)
    like = jax.ShapeDtypeStruct(logits.shape, wide(logits.dtype))
    table = head_table(coefficients, like, -3)
    # The gradient keeps the logits alone, and computes the rest again.
    softmax = jax.checkpoint(_probabilities, static_argnums=(3, 4, 5))
    probs: jax.Array = softmax(logits, where, table, coefficients, axis, entropy_gradient)
    return probs


def _probabilities(
    logits: jax.Array,
    where: jax.Array | None,
    table: jax.Array | None,
    coefficients: Fit,
    axis: Axis,
    entropy_gradient: bool,
) -> jax.Array:
    """softmax(beta z) of logits of any shape, with the numbers of each head from `head_table`."""
    dtype = logits.dtype if jnp.issubdtype(logits.dtype, jnp.floating) else jnp.result_type(float)
    z = real_logits(logits, where)
    log_n = log_size(z, axis, where is not None) if coefficients.needs_size else None
    powers, total = sharpen(z, log_n, table, coefficients, axis, entropy_gradient)
    if where is None:
        return (powers / total).astype(dtype)
    empty = ~jnp.any(jnp.broadcast_to(where, z.shape), axis, keepdims=True)
    return jnp.where(where, powers / jnp.where(empty, 1, total), 0).astype(dtype)


@partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5, 6))
def sharpen(
    z: jax.Array,
    log_n: jax.Array | None,
    table: jax.Array | None,
    coefficients: Fit,
    axis: Axis,
    entropy_gradient: bool,
    in_loop: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """exp(beta (z - max z)), 0 where z is -inf, and its sum: softmax(beta z) as a fraction.

    The derivative is that of the fraction: it leaves the sum as it is.

    Args:
      z: float32 or wider, -inf where masked; (..., heads, queries, items) with a table.
      log_n: of the n items that are not masked, a constant to gradients; for a fit by size.
      table: as of `head_table`, for a fit per head.
      entropy_gradient: whether the derivative includes that of beta by H.
      in_loop: whether JAX takes second derivatives by this code: then nothing may be infinite.
    """
    short = z.ndim > 0 and axis in (-1, z.ndim - 1)
    short = short and known(z.shape[-1]) and z.shape[-1] <= SHORT_ROW
    centred = centre(z, axis, in_loop, joined=short and not in_loop)
    H = centred.entropy if coefficients.needs_entropy else None
    x = features_of(coefficients, H, log_n, partial(jnp.zeros_like, centred.normaliser))
    powers = jnp.exp(beta_at(x, table, coefficients, jnp) * centred.shifted)
    return powers, jnp.sum(powers, axis, keepdims=True)


@sharpen.defjvp
def _sharpen_jvp(
    coefficients: Fit,
    axis: Axis,
    entropy_gradient: bool,
    in_loop: bool,
    primals: tuple[jax.Array, jax.Array | None, jax.Array | None],
    tangents: tuple[jax.Array, Any, Any],
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    (z, log_n, table), (dz, *_) = primals, tangents
    centred = centre(z, axis, True, joined=not in_loop)
    H = centred.entropy if coefficients.needs_entropy else None

    def beta_of_entropy(H: jax.Array | None) -> jax.Array:
        zeros = partial(jnp.zeros_like, centred.normaliser)
        x = features_of(coefficients, H, log_n, zeros)
        return jnp.asarray(beta_at(x, table, coefficients, jnp))

    if not entropy_gradient or H is None:
        beta = jax.lax.stop_gradient(beta_of_entropy(H))
        change = beta * dz
    else:
        beta, dbeta = jax.jvp(beta_of_entropy, (H,), (centred.entropy_tangent(dz, axis),))
        change = beta * dz + dbeta * centred.shifted
    powers = jnp.exp(beta * centred.shifted)
    total = jnp.sum(powers, axis, keepdims=True)
    mean = jnp.sum(powers * change, axis, keepdims=True) / jnp.where(total == 0, 1, total)
    return (powers, total), (powers * (change - mean), jnp.zeros_like(total))
