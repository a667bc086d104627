"""Adaptive softmax, entropy and inverse temperature in JAX.

    p = softmax(beta z),   beta = rule(H),   H = -sum q log q with q = softmax(z)

The paper's equation (Velickovic et al. 2024, section 3) is `adaptive_exponentials`; the rules are
in core/rule.py. Logits are in float32 or wider, and masked items are -inf.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from calibrate.core.masking import NO_WEIGHT, is_tensor, on_cpu
from calibrate.jax.masking import (
    Axis,
    apply_mask,
    is_known,
    log_n_unmasked,
    row_maximum,
    wide,
)
from calibrate.store.fit import Fit
from calibrate.store.inverse_temperature import (
    beta_at,
    check_fit,
    check_given,
    features_of,
    head_numbers,
    require_last_axis,
)

SHORT_ROW = 64  # items


def adaptive_exponentials(
    z: jax.Array,
    log_n: jax.Array | None,
    table: jax.Array | None,
    fit: Fit,
    axis: Axis,
    entropy_gradient: bool,
) -> tuple[jax.Array, jax.Array]:
    """exp(beta (z - max z)) and its sum over each row; their ratio is softmax(beta z).

    Args:
      z: float32 or wider, -inf where masked; (..., heads, queries, items) with a table.
      log_n: logarithm of the number of unmasked items, for a fit by size; axes kept.
      table: from `head_table`, for a fit per head.
      entropy_gradient: whether derivatives include those of beta by H.
    """
    highest = jax.lax.stop_gradient(row_maximum(z, axis))
    shifted = z - highest
    H = None
    if fit.needs_entropy:
        shifted = jnp.maximum(shifted, NO_WEIGHT)  # finite, since 0 * -inf is NaN
        H = _entropy(shifted, axis)
        H = H if entropy_gradient else jax.lax.stop_gradient(H)
    features = features_of(fit, H, log_n, partial(jnp.zeros_like, highest))
    beta = beta_at(features, table, fit, jnp)
    exponentials, total = _exponentials(beta * shifted, axis)
    return exponentials, total


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _entropy(shifted: jax.Array, axis: Axis) -> jax.Array:
    """H = log Z - mean of z - max z, which must be finite; 0 for a row without items; axes kept."""
    _, normaliser, mean = _moments(shifted, axis)
    return jnp.log(normaliser) - mean


@_entropy.defjvp
def _entropy_jvp(
    axis: Axis, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """dH = -sum q (log q + H) dz, where log q + H = shifted - mean."""
    (shifted,), (tangent,) = primals, tangents
    weights, normaliser, mean = _moments(shifted, axis)
    slope = weights * (shifted - mean)
    dH = -jnp.sum(slope * tangent, axis, keepdims=True) / normaliser
    return jnp.log(normaliser) - mean, dH


def _moments(shifted: jax.Array, axis: Axis) -> tuple[jax.Array, jax.Array, jax.Array]:
    """w = exp(z - max z), Z = sum w, and sum w (z - max z) / Z; axes kept."""
    weights = jnp.exp(shifted)
    # The sum is 0 in a row without items, else >= 1. `where` in place of the maximum splits XLA's
    # fusion on a CPU: a softmax of 64 items takes 1.2 times as long.
    normaliser = jnp.maximum(jnp.sum(weights, axis, keepdims=True), 1)
    products = weights * shifted
    if not _is_short(shifted.shape, axis):
        # If XLA fuses the product with its sum, a softmax of 1,024 items takes 1.2 to 1.4 times as
        # long on a CPU; `where` prevents that. In short rows the fusion saves a tenth.
        products = jnp.where(weights == 0, 0, products)
    return weights, normaliser, jnp.sum(products, axis, keepdims=True) / normaliser


def _is_short(shape: tuple[int, ...], axis: Axis) -> bool:
    last = len(shape) > 0 and axis in (-1, len(shape) - 1)
    return last and is_known(shape[-1]) and shape[-1] <= SHORT_ROW


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _exponentials(x: jax.Array, axis: Axis) -> tuple[jax.Array, jax.Array]:
    """exp(x) and its sum over each row, axes kept."""
    exponentials = jnp.exp(x)
    return exponentials, jnp.sum(exponentials, axis, keepdims=True)


@_exponentials.defjvp
def _exponentials_jvp(
    axis: Axis, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """The derivative of the ratio, p (dx - sum p dx).

    Right for the ratio alone: the sum is treated as a constant, and each output by itself has a
    wrong derivative. Differentiating the quotient takes 1.2 times as long for rules of log n.
    """
    (x,), (tangent,) = primals, tangents
    exponentials, total = _exponentials(x, axis)
    mean = jnp.sum(exponentials * tangent, axis, keepdims=True) / jnp.maximum(total, 1)
    return (exponentials, total), (exponentials * (tangent - mean), jnp.zeros_like(total))


def adaptive_softmax(
    logits: ArrayLike,
    coefficients: Fit,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    entropy_gradient: bool = True,
) -> jax.Array:
    """softmax(beta(H) z), with H the entropy of softmax(z): jax.nn.softmax with a fit.

    Fits by size give softmax(beta(n) z) or softmax(beta(H, n) z), with n the number of unmasked
    items: those of `where` that lie within 9,000 of the row's highest logit. Padding of -inf, -1e9
    or the lowest number of a dtype is not counted.

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

    >>> import calibrate, jax, jax.numpy as jnp
    >>> logits = jnp.linspace(0, 3, 50)
    >>> fit = calibrate.load("paper")
    >>> print(f"{jax.nn.softmax(logits)[-1]:.3f} {calibrate.adaptive_softmax(logits, fit)[-1]:.3f}")
    0.062 0.133
    """
    fit = check_fit(coefficients)
    logits = _read_input(logits, "logits", "adaptive_softmax")
    where = _read_input(where, "where", "adaptive_softmax")
    _check_broadcasts("where", where, "logits", logits)
    axis = _hashable(axis)
    require_last_axis(fit, "axis", axis, jnp.ndim(logits))
    probs: jax.Array = _adaptive_softmax(logits, fit, axis, where, entropy_gradient)
    return probs


# A Fit is static: `register_with_jax` makes it a pytree without leaves.
@partial(jax.jit, static_argnames=("axis", "entropy_gradient"))
def _adaptive_softmax(
    logits: ArrayLike,
    fit: Fit,
    axis: Axis,
    where: ArrayLike | None,
    entropy_gradient: bool,
) -> jax.Array:
    logits = jnp.asarray(logits)
    where = None if where is None else jnp.asarray(where)
    like = jax.ShapeDtypeStruct(logits.shape, wide(logits.dtype))
    table = head_table(fit, like, -3)
    # Gradients keep the logits alone, and compute the rest again.
    softmax = jax.checkpoint(_probabilities, static_argnums=(3, 4, 5))
    probs: jax.Array = softmax(logits, where, table, fit, axis, entropy_gradient)
    return probs


def _probabilities(
    logits: jax.Array,
    where: jax.Array | None,
    table: jax.Array | None,
    fit: Fit,
    axis: Axis,
    entropy_gradient: bool,
) -> jax.Array:
    dtype = logits.dtype if jnp.issubdtype(logits.dtype, jnp.floating) else jnp.result_type(float)
    z = apply_mask(logits, where)
    log_n = log_n_unmasked(z, axis, where is not None) if fit.needs_size else None
    exponentials, total = adaptive_exponentials(z, log_n, table, fit, axis, entropy_gradient)
    if where is None:
        return (exponentials / total).astype(dtype)
    empty = ~jnp.any(jnp.broadcast_to(where, z.shape), axis, keepdims=True)
    return jnp.where(where, exponentials / jnp.where(empty, 1, total), 0).astype(dtype)


def entropy(logits: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None) -> jax.Array:
    """Shannon entropy of softmax(logits), H = log Z - S / Z.

    With w = exp(z - max z): Z = sum w and S = sum w (z - max z).

    Args:
      logits: any shape and real dtype; -inf counts as masked.
      axis: the axis or axes of the items; None means all.
      where: bool, broadcastable to logits, True for real items; None means all.
    Returns:
      H in nats without the item axes, float32 or wider; 0 where every item is masked by `where`,
      NaN where all unmasked items are -inf (there is no distribution).
    Raises:
      TypeError: complex logits, or a tensor of PyTorch.
      ValueError: a masked array of NumPy, or `where` of another shape.
    Reference: Velickovic et al. 2024, section 3.

    >>> import calibrate, jax.numpy as jnp
    >>> print(f"{calibrate.entropy(jnp.zeros(8)):.4f} {jnp.log(8):.4f}")
    2.0794 2.0794
    """
    logits = _read_input(logits, "logits", "entropy")
    where = _read_input(where, "where", "entropy")
    _check_broadcasts("where", where, "logits", logits)
    H: jax.Array = _entropy_of_logits(logits, _hashable(axis), where)
    return H


@partial(jax.jit, static_argnames="axis")
def _entropy_of_logits(logits: ArrayLike, axis: Axis, where: ArrayLike | None) -> jax.Array:
    z = apply_mask(logits, where)
    unmasked = jnp.broadcast_to(True if where is None else where, z.shape)
    undefined = jnp.all(z == -jnp.inf, axis) & jnp.any(unmasked, axis)
    shifted = jnp.maximum(z - jax.lax.stop_gradient(row_maximum(z, axis)), NO_WEIGHT)
    return jnp.where(undefined, jnp.nan, jnp.squeeze(_entropy(shifted, axis), axis))


def inverse_temperature(
    H: ArrayLike | None, coefficients: Fit, *, n: ArrayLike | None = None
) -> jax.Array:
    """beta of a fit: a constant, beta(H), beta(n) or beta(H, n), by its kind.

    beta(H) = clip(p(clip(H, lo, hi)), min_beta, max_beta), and 1 up to a min_entropy above 0;
    beta(n) = clip(kappa log n + b, min_beta, max_beta); beta(H, n) adds terms of log n to p(H).
    core/rule.py has the equations.

    Args:
      H: entropy in nats, any shape; computed in float32 or wider. For a fit per head, as `entropy`
        gives it for logits (..., heads, queries, items): (..., heads, queries). If beta does not
        depend on H, only its shape is used, and None is allowed.
      coefficients: a fit, from `calibrate.load`; static under jit.
      n: number of unmasked items, broadcastable to H; 0 counts as 1. For fits by set size.
    Returns:
      beta, of H's shape (n's if H is None, () if both are), dimensionless; 1 for heads without an
      entry.
    Raises:
      CoefficientsError: no fit was given, its heads are not those of H, or H or n is missing.
      ValueError: n does not broadcast to H, or a masked array of NumPy.
    Reference: Velickovic et al. 2024, section 3.

    >>> import calibrate
    >>> print(f"{calibrate.inverse_temperature(2.0, calibrate.load('paper')):.3f}")
    2.099
    """
    fit = check_fit(coefficients)
    H, n = (_read_input(x, name, "inverse_temperature") for name, x in (("H", H), ("n", n)))
    check_given(fit, H, n)
    _check_broadcasts("n", n, "H", H)
    beta: jax.Array = _inverse_temperature(H, n, fit)
    return beta


@jax.jit
def _inverse_temperature(H: ArrayLike | None, n: ArrayLike | None, fit: Fit) -> jax.Array:
    given = n if H is None else H
    entropy, log_n, like = None, None, jnp.asarray(0.0 if given is None else given)
    if fit.rule.by_entropy:
        entropy = like.astype(wide(like.dtype))
    if fit.rule.by_size:
        items = jnp.asarray(n)
        dtype = wide(items.dtype) if entropy is None else entropy.dtype
        log_n = jnp.log(jnp.maximum(items.astype(dtype), 1))
        log_n = jnp.broadcast_to(log_n, like.shape)
    zeros = partial(jnp.zeros, like.shape, wide(like.dtype))
    x = features_of(fit, entropy, log_n, zeros)
    beta: jax.Array = beta_at(x, head_table(fit, x.either, -2), fit, jnp)
    return beta


def head_table(fit: Fit, x: jax.Array | jax.ShapeDtypeStruct, head_axis: int) -> jax.Array | None:
    """The numbers of each head along an axis of x, (numbers, 1, ..., heads, ...).

    None if all heads have the same numbers.
    """
    numbers = head_numbers(fit, x.shape, head_axis)
    if numbers is None:
        return None
    table = jnp.asarray(numbers, x.dtype)
    # e.g. (numbers, 1, heads, 1, 1) for x (batch, heads, queries, items)
    return table.reshape(len(table), *[1] * (x.ndim + head_axis), -1, *[1] * (-head_axis - 1))


def _hashable(axis: Axis) -> Axis:
    return axis if isinstance(axis, int | None) else tuple(axis)


def _read_input(value: Any, name: str, function: str) -> Any:
    """An array of JAX or NumPy, or a number; None stays None.

    Raises:
      TypeError: a tensor of PyTorch, or an array without numbers.
      ValueError: a masked array of NumPy.
    """
    if value is None or isinstance(value, jax.Array | int | float | complex):
        return value
    if is_tensor(value):
        raise TypeError(f"{name} is a tensor of PyTorch; use calibrate.torch.{function}")
    array = np.asarray(on_cpu(value, name))
    if array.dtype.kind in "OUS":
        raise TypeError(f"{name} is a {type(value).__name__} of {array.dtype}; give numbers")
    return array


def _check_broadcasts(name: str, value: Any, to_name: str, to: Any) -> None:
    """Raises ValueError unless two arrays broadcast; None is not checked."""
    if value is None or to is None:
        return
    shape, full = jnp.shape(value), jnp.shape(to)  # of numbers, or symbolic
    try:
        jnp.broadcast_shapes(shape, full)
    except ValueError:
        raise ValueError(
            f"{name} has the shape {shape}, {to_name} {full}; give a shape that broadcasts to it"
        ) from None
