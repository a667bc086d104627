"""Attention in JAX over an explicit mesh: each device computes its own sequences and heads.

Letters for shapes: B batch, T queries, S keys, N query heads, K key heads, H width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike


class AttentionArrays(NamedTuple):
    """The arrays of a call of attention."""

    q: jax.Array  # (B, T, N, H)
    k: jax.Array  # (B, S, K, H)
    v: jax.Array  # (B, S, K, any)
    bias: jax.Array | None  # (B, N, T, S), each axis possibly 1
    mask: jax.Array | None  # as bias
    n_queries: ArrayLike | None  # (B,)
    n_keys: ArrayLike | None  # (B,)
    table: jax.Array | None = None  # (numbers of a head, N), of a fit per head


def attend_on_mesh(
    attend: Callable[..., jax.Array],
    arrays: AttentionArrays,
    scale: ArrayLike,
    soft_cap: jax.Array | None,
) -> jax.Array:
    """attend(arrays, scale, soft_cap), sharded as jax.nn.dot_product_attention's result would be.

    Without an explicit mesh it is called as it is. Where the original refuses a sharding, so does
    this, by the same error; queries sharded along their length are computed everywhere.
    """
    sharding = _sharding_of_result(arrays)
    if sharding is None:
        return attend(arrays, scale, soft_cap)
    batch, length, heads, width = sharding.spec
    mesh, specs = sharding.mesh, _specs(arrays, batch, heads, width)
    split = _names(batch) | _names(heads) | _names(width)
    call = (arrays, jnp.asarray(scale), soft_cap)
    specs_of_call = (specs, P(), None if soft_cap is None else P())
    call = jax.tree.map(
        lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)), call, specs_of_call
    )
    if split:
        attend = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=specs_of_call,
            out_specs=P(batch, None, heads, width),
            axis_names=split,
        )
    out = attend(*call)
    return out if length is None else jax.sharding.reshard(out, sharding)


def _names(axes: str | tuple[str, ...] | None) -> set[str]:
    """Axes of the mesh that split one of an array."""
    return set() if axes is None else {axes} if isinstance(axes, str) else set(axes)


def _specs(arrays: AttentionArrays, batch: Any, heads: Any, width: Any) -> AttentionArrays:
    """Gives the split of each array; axes of size 1, such as one shared key head, are not split."""

    def split(x: Any, axes: tuple[Any, ...]) -> Any:
        if x is None:
            return None
        return P(*(axis if n > 1 else None for axis, n in zip(axes, jnp.shape(x), strict=True)))

    of_matrix = (batch, heads, None, None)
    axes = (
        (batch, None, heads, None),
        (batch, None, heads, None),
        (batch, None, heads, width),
        of_matrix,
        of_matrix,
        (batch,),
        (batch,),
        (None, heads),
    )
    return AttentionArrays(*map(split, arrays, axes))


def _sharding_of_result(arrays: AttentionArrays) -> NamedSharding | None:
    """Sharding of the original's result (B, T, N, width of v); None without an explicit mesh."""
    q, k, v, bias, mask = arrays[:5]
    given = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves((q, k, v, bias, mask))]
    if not any(AxisType.Explicit in mesh.axis_types for mesh in given):
        return None
    # The original wants values as wide as keys.
    of_key_width = jax.ShapeDtypeStruct(
        (*v.shape[:3], k.shape[3]), v.dtype, sharding=jax.typeof(v).sharding
    )
    program = jax.make_jaxpr(jax.nn.dot_product_attention)(q, k, of_key_width, bias, mask)
    sharding: NamedSharding = program.out_avals[0].sharding
    return sharding
