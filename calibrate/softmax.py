"""Softmax in JAX that applies a fit at inference, in place of jax.nn.softmax."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from calibrate.errors import CoefficientsError
from calibrate.files.coefficients import Coefficients, check_fit, goes_by_size
from calibrate.maths.rule import LOG_SIZE, beta_of
from calibrate.maths.shannon_entropy import (
    Axis,
    Centred,
    centre,
    hashable,
    log_size,
    real_logits,
    wide,
)


def inverse_temperature(
    H: ArrayLike | None, coefficients: Coefficients, *, n: ArrayLike | None = None
) -> jax.Array:
    """beta of a fit: beta(H), or for a fit of kind "log-size" beta(n).

    beta(H) = clip(p(clip(H, lo, hi)), min_beta, max_beta), and 1 where the rule is off;
    beta(n) = clip(kappa log n + b, min_beta, max_beta); where kappa < 0, log n is first clipped to
    the sizes that it was fitted on, [lo, hi].

    Args:
      H: entropy in nats, any shape; computed in float32 or wider. For a fit per head, as `entropy`
        gives it for logits (..., heads, queries, items): (..., heads, queries). A log-size fit
        takes its shape alone, or None.
      coefficients: a fit, from `calibrate.load`; static under jit.
      n: number of unmasked items, broadcastable to H; 0 counts as 1. A log-size fit needs it, and
        no other looks at it.
    Returns:
      beta, of H's shape (n's if H is None), dimensionless; 1 for heads that the fit does not name.
    Raises:
      CoefficientsError: no fit was given, it does not fit the heads of H, or H or n is missing.
    Reference: Velickovic et al. 2024, section 3.
    """
    fit = check_fit(coefficients)
    goes_by_size(fit, H, n)
    beta: jax.Array = _inverse_temperature(H, n, fit)
    return beta


@jax.jit
def _inverse_temperature(
    H: ArrayLike | None, n: ArrayLike | None, coefficients: Coefficients
) -> jax.Array:
    x = jnp.asarray(n if coefficients.rule.kind == LOG_SIZE else H)
    x = x.astype(wide(x.dtype))
    if coefficients.rule.kind == LOG_SIZE:
        x = jnp.log(jnp.maximum(x, 1))
        x = x if H is None else jnp.broadcast_to(x, jnp.shape(H))
    return _beta(x, head_table(coefficients, x, -2), coefficients, -2)


def head_table(coefficients: Coefficients, x: jax.Array, head_axis: int) -> jax.Array | None:
    """The numbers of each head along an axis of x, (coefficients + 3, heads); None if all alike."""
    if not coefficients.has_heads:
        return None
    if x.ndim < -head_axis:
        raise CoefficientsError(
            f"{coefficients.reference} has an entry per head, and an array of shape {x.shape} has "
            "no axis of heads; give (..., heads, queries, items)"
        )
    return jnp.asarray(coefficients.by_head(x.shape[head_axis]), x.dtype)


def _beta(
    x: jax.Array, table: jax.Array | None, coefficients: Coefficients, head_axis: int
) -> jax.Array:
    """beta of x, which is H or log n, as the fit's kind has it."""
    if table is None:
        entry = coefficients.only
        beta: jax.Array = beta_of(x, x, entry.coefficients, entry.domain, coefficients.rule, jnp)
        return beta
    rows = table.reshape(len(table), *[1] * (x.ndim + head_axis), -1, *[1] * (-head_axis - 1))
    *powers, lo, hi, calibrated = rows
    beta = beta_of(x, x, powers, (lo, hi), coefficients.rule, jnp)
    return jnp.where(calibrated == 1, beta, 1)


def adaptive_softmax(
    logits: ArrayLike,
    coefficients: Coefficients,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    entropy_gradient: bool = True,
) -> jax.Array:
    """softmax(beta(H) z), with H the entropy of softmax(z): jax.nn.softmax, sharpened by a fit.

    A fit of kind "log-size" gives softmax(beta(n) z), with n the number of unmasked items: those
    of `where` whose logit is above -inf. Masks must be either. A large negative number as a mask
    leaves H as it is, and not n: such items have no weight, and are counted.

    Args:
      logits: any shape and real dtype; entropy and beta are computed in float32 or wider. For a
        fit per head (..., heads, queries, items).
      coefficients: a fit, from `calibrate.load`; static under jit: another fit retraces.
      axis: the axis or axes of the items; None means all. The last one for a fit per head.
      where: bool, broadcastable to logits, True for real items; None means all. Masked items get
        probability 0 and count neither in the entropy, n nor the normaliser.
      entropy_gradient: whether gradients flow through beta(H) too, as they do in the paper's code;
        beta(n) has none.
    Returns:
      Probabilities, of the logits' shape and dtype. A row whose unmasked items are all -inf is
      NaN, as in jax.nn.softmax; a row that `where` masks throughout is 0.
    Raises:
      CoefficientsError: no fit was given, or it does not fit the heads of the logits.
    Reference: Velickovic et al. 2024, section 3.
    """
    fit = check_fit(coefficients)
    axis = hashable(axis)
    if fit.has_heads and axis not in (-1, (-1,), jnp.ndim(logits) - 1):
        raise CoefficientsError(
            f"{fit.reference} has an entry per head, and axis is {axis!r}; "
            "give logits (..., heads, queries, items) and axis=-1"
        )
    probs: jax.Array = _adaptive_softmax(logits, fit, axis, where, entropy_gradient)
    return probs


@partial(jax.jit, static_argnames=("axis", "entropy_gradient"))
def _adaptive_softmax(
    logits: ArrayLike,
    coefficients: Coefficients,
    axis: Axis,
    where: ArrayLike | None,
    entropy_gradient: bool,
) -> jax.Array:
    logits = jnp.asarray(logits)
    dtype = logits.dtype if jnp.issubdtype(logits.dtype, jnp.floating) else jnp.result_type(float)

    @jax.checkpoint  # gradients need the logits alone, as those of jax.nn.softmax need its result
    def probabilities(logits: jax.Array) -> jax.Array:
        z = real_logits(logits, where)
        powers = sharpen(z, head_table(coefficients, z, -3), coefficients, axis, entropy_gradient)
        total = jnp.sum(powers, axis, keepdims=True)
        if where is None:
            return (powers / total).astype(dtype)
        empty = ~jnp.any(jnp.broadcast_to(where, z.shape), axis, keepdims=True)
        return jnp.where(where, powers / jnp.where(empty, 1, total), 0).astype(dtype)

    probs: jax.Array = probabilities(logits)
    return probs


@partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4, 5))
def sharpen(
    z: jax.Array,
    table: jax.Array | None,
    coefficients: Coefficients,
    axis: Axis,
    entropy_gradient: bool,
    in_loop: bool = False,
) -> jax.Array:
    """exp(beta (z - max z)): softmax(beta z) before it is normalised; 0 where z is -inf.

    Its derivative leaves out that of the maximum, which cancels when the row is normalised.

    Args:
      z: float32 or wider, -inf where masked; (..., heads, queries, items) with a table.
      table: of `head_table`, for a fit per head.
      entropy_gradient: whether the derivative includes that of beta(H).
      in_loop: whether it runs inside a loop, of which JAX takes second derivatives by this code
        and not by its rule: then nothing in it may be infinite.
    """
    centred = centre(z, axis, finite=in_loop)
    x = _rule_input(z, centred, coefficients, axis)
    return jnp.exp(_beta(x, table, coefficients, -3) * centred.shifted)


def _rule_input(
    z: jax.Array, centred: Centred, coefficients: Coefficients, axis: Axis
) -> jax.Array:
    """What beta is a function of: entropy H, or log n."""
    return log_size(z, axis) if coefficients.rule.kind == LOG_SIZE else centred.entropy


@sharpen.defjvp
def _sharpen_jvp(
    coefficients: Coefficients,
    axis: Axis,
    entropy_gradient: bool,
    in_loop: bool,
    primals: tuple[jax.Array, jax.Array | None],
    tangents: tuple[jax.Array, Any],
) -> tuple[jax.Array, jax.Array]:
    (z, table), (dz, _) = primals, tangents
    powers = sharpen(z, table, coefficients, axis, entropy_gradient, in_loop)
    centred = centre(z, axis, finite=True)
    beta_of_row = partial(_beta, table=table, coefficients=coefficients, head_axis=-3)
    if not entropy_gradient or coefficients.rule.kind == LOG_SIZE:
        x = _rule_input(z, centred, coefficients, axis)
        return powers, powers * (beta_of_row(jax.lax.stop_gradient(x)) * dz)
    dH = centred.entropy_tangent(dz, axis)
    beta, dbeta = jax.jvp(beta_of_row, (centred.entropy,), (dH,))
    return powers, powers * (beta * dz + dbeta * centred.shifted)
