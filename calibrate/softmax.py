"""Floor 2, the runtime in JAX: a softmax that applies a fit at inference."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from calibrate.errors import CoefficientsError
from calibrate.files.coefficients import Coefficients
from calibrate.maths.rule import beta_of_entropy
from calibrate.maths.shannon import Axis, centre, hashable, real_logits, wide


def inverse_temperature(H: ArrayLike, coefficients: Coefficients) -> jax.Array:
    """beta(H) of a fit: clip(p(clip(H, lo, hi)), min_beta, max_beta), and 1 where the rule is off.

    Args:
      H: entropy in nats, any shape; computed in float32 or wider. For a fit per head, as `entropy`
        gives it for logits (..., heads, queries, items): (..., heads, queries).
      coefficients: a fit, from `calibrate.load`; static under jit.
    Returns:
      beta, of H's shape, dimensionless; 1 for heads that the fit does not name.
    Raises:
      CoefficientsError: no fit was given, or it does not fit the heads of H.
    Reference: Velickovic et al. 2024, section 3.
    """
    return _inverse_temperature(H, check_fit(coefficients))


@jax.jit
def _inverse_temperature(H: ArrayLike, coefficients: Coefficients) -> jax.Array:
    H = jnp.asarray(H)
    H = H.astype(wide(H.dtype))
    return _beta(H, head_table(coefficients, H, -2), coefficients, -2)


def head_table(coefficients: Coefficients, x: jax.Array, head_axis: int) -> jax.Array | None:
    """The numbers of each head along an axis of x, (8, heads); None if all heads are alike."""
    if not coefficients.has_heads:
        return None
    if x.ndim < -head_axis:
        raise CoefficientsError(
            f"{coefficients.reference} has an entry per head, and an array of shape {x.shape} has "
            "no axis of heads; give (..., heads, queries, items)"
        )
    return jnp.asarray(coefficients.by_head(x.shape[head_axis]), x.dtype)


def _beta(
    H: jax.Array, table: jax.Array | None, coefficients: Coefficients, head_axis: int
) -> jax.Array:
    if table is None:
        entry = coefficients.only
        return beta_of_entropy(H, entry.coefficients, entry.domain, coefficients.rule, jnp)
    rows = table.reshape(len(table), *[1] * (H.ndim + head_axis), -1, *[1] * (-head_axis - 1))
    *powers, lo, hi, calibrated = rows
    beta = beta_of_entropy(H, powers, (lo, hi), coefficients.rule, jnp)
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

    Args:
      logits: any shape and real dtype; entropy and beta are computed in float32 or wider. For a
        fit per head (..., heads, queries, items).
      coefficients: a fit, from `calibrate.load`; static under jit: another fit retraces.
      axis: the axis or axes of the items; None means all. The last one for a fit per head.
      where: bool, broadcastable to logits, True for real items; None means all. Masked items get
        probability 0 and count neither in the entropy nor in the normaliser.
      entropy_gradient: whether gradients flow through beta(H) too, as they do in the paper's code.
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
    return _adaptive_softmax(logits, fit, axis, where, entropy_gradient)


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

    return probabilities(logits)


@partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4, 5))
def sharpen(
    z: jax.Array,
    table: jax.Array | None,
    coefficients: Coefficients,
    axis: Axis,
    entropy_gradient: bool,
    in_loop: bool = False,
) -> jax.Array:
    """exp(beta(H) (z - max z)): softmax(beta z) before it is normalised; 0 where z is -inf.

    Its derivative leaves out that of the maximum, which cancels when the row is normalised.

    Args:
      z: float32 or wider, -inf where masked; (..., heads, queries, items) with a table.
      table: of `head_table`, for a fit per head.
      entropy_gradient: whether the derivative includes that of beta(H).
      in_loop: whether it runs inside a loop, of which JAX takes second derivatives by this code
        and not by its rule: then nothing in it may be infinite.
    """
    centred = centre(z, axis, finite=in_loop)
    return jnp.exp(_beta(centred.entropy, table, coefficients, -3) * centred.shifted)


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
    beta_of = partial(_beta, table=table, coefficients=coefficients, head_axis=-3)
    if not entropy_gradient:
        return powers, powers * (beta_of(jax.lax.stop_gradient(centred.entropy)) * dz)
    dH = centred.entropy_tangent(dz, axis)
    beta, dbeta = jax.jvp(beta_of, (centred.entropy,), (dH,))
    return powers, powers * (beta * dz + dbeta * centred.shifted)


def check_fit(coefficients: Coefficients) -> Coefficients:
    """A name or None in place of a fit must not come out as a tracing error."""
    if not isinstance(coefficients, Coefficients):
        raise CoefficientsError(
            f"coefficients is {coefficients!r}; give a fit, such as calibrate.load('max-retrieval')"
        )
    return coefficients
