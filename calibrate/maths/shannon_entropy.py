"""Entropy of softmax(z) in JAX, from centred logits in one pass and at least float32."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

Axis = int | Sequence[int] | None
_NO_WEIGHT = -1e18  # exp of any beta times it is 0, and its square does not overflow


class Centred(NamedTuple):
    """What entropy, and its derivative, need of a row; axes kept."""

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


def centre(z: jax.Array, axis: Axis, finite: bool = False) -> Centred:
    """Centres float logits, whose masked items are -inf.

    Args:
      finite: whether `shifted` of masked items is a finite number that has no weight either:
        derivatives multiply it by 0.
    """
    peak = jnp.max(z, axis, keepdims=True, initial=-jnp.inf)
    shifted = z - jax.lax.stop_gradient(jnp.where(peak == -jnp.inf, 0, peak))
    if finite:
        shifted = jnp.maximum(shifted, _NO_WEIGHT)
    weights = jnp.exp(shifted)
    normaliser = jnp.sum(weights, axis, keepdims=True)
    normaliser = jnp.where(normaliser == 0, 1, normaliser)
    # 0 * -inf is NaN: what has no weight has no part in the mean.
    first_moment = jnp.sum(jnp.where(weights == 0, 0, weights * shifted), axis, keepdims=True)
    return Centred(shifted, weights, normaliser, first_moment / normaliser)


def log_size(z: jax.Array, axis: Axis, masked: bool = True) -> jax.Array:
    """log n of n unmasked items, whose logit is above -inf; axes kept, 0 for a row without any.

    A constant to gradients.

    Args:
      masked: whether some item is likely to be; if not, a CPU looks first whether one is.
    """

    def count(z: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(z > -jnp.inf, 1, 0).astype(z.dtype), axis, keepdims=True)

    def count_in_eights(z: jax.Array) -> jax.Array:
        """The first sum reads logits and the second an eighth as many numbers: less memory."""
        if z.size == 0 or axis not in (-1, z.ndim - 1):
            return count(z)
        z = jnp.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, -z.shape[-1] % 8)], constant_values=-jnp.inf)
        real = z.reshape(*z.shape[:-1], 8, -1) > -jnp.inf
        return jnp.sum(jnp.sum(real, -2, jnp.int32).astype(z.dtype), -1, keepdims=True)

    def look_first(z: jax.Array) -> jax.Array:
        lowest = jnp.min(z, axis, keepdims=True, initial=jnp.inf)
        all_items = jnp.full_like(lowest, z.size // max(1, lowest.size))
        none_is_masked = jnp.all(lowest > -jnp.inf)
        return jnp.asarray(jax.lax.cond(none_is_masked, lambda _: all_items, count_in_eights, z))

    z = jax.lax.stop_gradient(z)
    on_cpu = count_in_eights if masked else look_first
    n: jax.Array = jax.lax.platform_dependent(z, cpu=on_cpu, default=count)
    return jnp.log(jnp.maximum(n, 1))


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
    Reference: Velickovic et al. 2024, section 3.
    """
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
