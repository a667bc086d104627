"""Entropy of softmax(z) in JAX, from centred logits in one pass and at least float32."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from calibrate.core.masking import LOWEST, NO_WEIGHT
from calibrate.core.tensors import is_tensor, on_cpu

Axis = int | Sequence[int] | None


class Centred(NamedTuple):
    """The sums of a row that entropy, and its derivative, need; axes kept."""

    shifted: jax.Array  # z - max z; -inf where masked
    weights: jax.Array  # w = exp(shifted); 0 where masked
    normaliser: jax.Array  # Z = sum w; 1 for a row without items
    mean: jax.Array  # sum w (z - max z) / Z

    @property
    def entropy(self) -> jax.Array:
        """H = log Z - mean; 0 for a row without items."""
        return jnp.log(self.normaliser) - self.mean

    def entropy_tangent(self, tangent: jax.Array, axis: Axis) -> jax.Array:
        """dH = -sum q (log q + H) dz, and log q + H = shifted - mean; of finite `shifted`."""
        excess = self.weights * (self.shifted - self.mean)
        return -jnp.sum(excess * tangent, axis, keepdims=True) / self.normaliser


def wide(dtype: DTypeLike) -> DTypeLike:
    """The dtype itself, float32 for narrower ones, JAX's own float for what is none."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.result_type(float)
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32


def known(*sizes: Any) -> bool:
    """True of numbers; jax.export has symbolic sizes, which cannot be compared with numbers."""
    return all(isinstance(size, int) for size in sizes)


def hashable(axis: Axis) -> Axis:
    """The axis, or the tuple of axes, as jit takes it."""
    return axis if isinstance(axis, int | None) else tuple(axis)


def real_logits(logits: ArrayLike, where: ArrayLike | None) -> jax.Array:
    """Logits in float32 or wider, -inf where they are masked."""
    z = jnp.asarray(logits)
    if jnp.issubdtype(z.dtype, jnp.complexfloating):
        raise TypeError(f"logits are {z.dtype}; give real ones")
    z = z.astype(wide(z.dtype))
    return z if where is None else jnp.where(where, z, -jnp.inf)


def centre(z: jax.Array, axis: Axis, finite: bool = False, joined: bool = False) -> Centred:
    """Centres float logits, whose masked items are -inf.

    Args:
      finite: whether `shifted` of masked items is finite, as derivatives multiply it by 0.
      joined: whether XLA may fuse the product w (z - max z) with its sum. On a CPU that saves an
        array, and the sum is slower: it pays in softmax's gradients and in short rows.
    """
    shifted = z - jax.lax.stop_gradient(_highest(z, axis))
    if finite:
        shifted = jnp.maximum(shifted, NO_WEIGHT)
    weights = jnp.exp(shifted)
    normaliser = jnp.sum(weights, axis, keepdims=True)
    # It is 0 or at least 1. XLA's maximum is quicker, but halves derivatives at 1.
    normaliser = jnp.where(normaliser == 0, 1, normaliser) if finite else jnp.maximum(normaliser, 1)
    # Items of weight 0 are excluded, since 0 * -inf is NaN; `where` also keeps XLA from fusing.
    if joined:
        products = weights * jnp.maximum(shifted, NO_WEIGHT)
    else:
        products = jnp.where(weights == 0, 0, weights * shifted)
    moment = jnp.sum(products, axis, keepdims=True)
    return Centred(shifted, weights, normaliser, moment / normaliser)


def _highest(z: jax.Array, axis: Axis) -> jax.Array:
    """The highest logit of each row, axes kept; finite where all are -inf."""
    peak = jnp.max(z, axis, keepdims=True, initial=-jnp.inf)
    return jnp.maximum(peak, jnp.finfo(z.dtype).min)


def log_size(z: jax.Array, axis: Axis, masked: bool = True) -> jax.Array:
    """log n of n unmasked items, a constant to gradients; axes kept, 0 for a row without any.

    An item is masked if it is -inf, or as calibrate.core.masking.is_masked says.

    Args:
      z: float32 or wider, -inf where masked.
      masked: whether some item is likely to be; if not, a CPU looks first whether one is.
    """

    def count(z: jax.Array, highest: jax.Array) -> jax.Array:
        real = z - highest >= LOWEST
        return jnp.sum(jnp.where(real, 1, 0).astype(z.dtype), axis, keepdims=True)

    def count_in_eights(z: jax.Array, highest: jax.Array) -> jax.Array:
        """The first sum reads logits and the second an eighth as many numbers: less memory."""
        if z.size == 0 or axis not in (-1, z.ndim - 1):
            return count(z, highest)
        z = jnp.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, -z.shape[-1] % 8)], constant_values=-jnp.inf)
        real = z.reshape(*z.shape[:-1], 8, -1) - highest[..., None] >= LOWEST
        return jnp.sum(jnp.sum(real, -2, jnp.int32).astype(z.dtype), -1, keepdims=True)

    def look_first(z: jax.Array, highest: jax.Array) -> jax.Array:
        lowest = jnp.min(z, axis, keepdims=True, initial=jnp.inf)
        all_items = jnp.full_like(lowest, z.size // max(1, lowest.size))
        none_is_masked = jnp.all(lowest - highest >= LOWEST)
        return jnp.asarray(
            jax.lax.cond(none_is_masked, lambda *_: all_items, count_in_eights, z, highest)
        )

    z = jax.lax.stop_gradient(z)
    on_cpu = count_in_eights if masked else look_first
    highest = _highest(z, axis)  # which `centre` has too: XLA computes it once
    on_cpu = on_cpu if known(*z.shape) else count
    n: jax.Array = jax.lax.platform_dependent(z, highest, cpu=on_cpu, default=count)
    return jnp.log(jnp.maximum(n, 1))


def readable(value: Any, name: str, function: str) -> Any:
    """What JAX can read: an array of it or of NumPy, or a number; None stays None.

    Raises:
      TypeError: a tensor of PyTorch, which another function is for, or no numbers.
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


def check_broadcasts(name: str, value: Any, to_name: str, to: Any) -> None:
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
    """
    logits, where = readable(logits, "logits", "entropy"), readable(where, "where", "entropy")
    check_broadcasts("where", where, "logits", logits)
    H: jax.Array = _entropy_of_logits(logits, hashable(axis), where)
    return H


@partial(jax.jit, static_argnames="axis")
def _entropy_of_logits(logits: ArrayLike, axis: Axis, where: ArrayLike | None) -> jax.Array:
    z = real_logits(logits, where)
    unmasked = jnp.broadcast_to(True if where is None else where, z.shape)
    undefined = jnp.all(z == -jnp.inf, axis) & jnp.any(unmasked, axis)
    return jnp.where(undefined, jnp.nan, jnp.squeeze(_entropy(z, axis), axis))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _entropy(z: jax.Array, axis: Axis) -> jax.Array:
    return centre(z, axis).entropy


@_entropy.defjvp
def _entropy_jvp(
    axis: Axis, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (z,), (dz,) = primals, tangents
    centred = centre(z, axis, finite=True)
    return _entropy(z, axis), centred.entropy_tangent(dz, axis)
