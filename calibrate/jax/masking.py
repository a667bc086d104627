"""Masked items in JAX: logits with -inf in their place, and the number of items that remain."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from calibrate.core.masking import LOWEST

Axis = int | Sequence[int] | None


def apply_mask(logits: ArrayLike, where: ArrayLike | None) -> jax.Array:
    """Logits in float32 or wider, -inf where they are masked."""
    z = jnp.asarray(logits)
    if jnp.issubdtype(z.dtype, jnp.complexfloating):
        raise TypeError(f"logits are {z.dtype}; give real ones")
    z = z.astype(wide(z.dtype))
    return z if where is None else jnp.where(where, z, -jnp.inf)


def row_maximum(z: jax.Array, axis: Axis) -> jax.Array:
    """The highest logit of each row, axes kept; finite where all are -inf."""
    highest = jnp.max(z, axis, keepdims=True, initial=-jnp.inf)
    return jnp.maximum(highest, jnp.finfo(z.dtype).min)


def log_n_unmasked(z: jax.Array, axis: Axis, masked: bool = True) -> jax.Array:
    """log n of the n unmasked items of each row; axes kept, 0 for a row without any.

    An item is masked if it is -inf, or by `calibrate.core.masking.is_masked`. Gradients treat log n
    as a constant.

    Args:
      z: float32 or wider, -inf where masked.
      masked: whether some item is likely to be masked. Otherwise a CPU first looks whether one is:
        without that a softmax by log n of 1,024 items takes 1.2 times as long.
    """
    z = jax.lax.stop_gradient(z)
    highest = row_maximum(z, axis)
    count: Callable[..., jax.Array] = partial(_count, axis=axis)
    count_on_cpu = count
    if is_known(*z.shape) and z.size:
        # Counts in two sums, of which the second reads an eighth as many numbers; one sum takes a
        # softmax of masked logits 1.1 to 1.3 times as long.
        in_eights = _count_in_eights if axis in (-1, z.ndim - 1) else count
        count_on_cpu = (
            in_eights if masked else partial(_count_if_masked, count=in_eights, axis=axis)
        )
    n: jax.Array = jax.lax.platform_dependent(z, highest, cpu=count_on_cpu, default=count)
    return jnp.log(jnp.maximum(n, 1))


def _count(z: jax.Array, highest: jax.Array, axis: Axis) -> jax.Array:
    real = z - highest >= LOWEST
    return jnp.sum(jnp.where(real, 1, 0).astype(z.dtype), axis, keepdims=True)


def _count_in_eights(z: jax.Array, highest: jax.Array) -> jax.Array:
    """`_count` along the last axis."""
    z = jnp.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, -z.shape[-1] % 8)], constant_values=-jnp.inf)
    real = z.reshape(*z.shape[:-1], 8, -1) - highest[..., None] >= LOWEST
    return jnp.sum(jnp.sum(real, -2, jnp.int32).astype(z.dtype), -1, keepdims=True)


def _count_if_masked(
    z: jax.Array, highest: jax.Array, count: Callable[..., jax.Array], axis: Axis
) -> jax.Array:
    """The number of all items if none is masked, else a count of those that are not."""
    lowest = jnp.min(z, axis, keepdims=True, initial=jnp.inf)
    all_items = jnp.full_like(lowest, z.size // max(1, lowest.size))
    none_is_masked = jnp.all(lowest - highest >= LOWEST)
    return jnp.asarray(jax.lax.cond(none_is_masked, lambda *_: all_items, count, z, highest))


def wide(dtype: DTypeLike) -> DTypeLike:
    """float32 for narrower floats, the dtype itself for others; JAX's default for integers."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.result_type(float)
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32


def is_known(*sizes: Any) -> bool:
    """True for numbers, False for the symbolic sizes of jax.export, which cannot be compared."""
    return all(isinstance(size, int) for size in sizes)
