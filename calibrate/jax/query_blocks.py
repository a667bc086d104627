"""Attention of one key head in JAX, in blocks of queries.

A block of queries meets its keys at a time, few enough that their logits stay in cache: memory
grows with queries + keys, not with their product. Gradients compute each block again. Blocks skip
the keys that a window excludes for all their queries; causal queries are split into parts, each of
which skips the keys after its last query. All blocks of a part have one shape, so that one loop
runs them, since XLA takes 25 ms and more to compile each kernel.

Letters for shapes: T queries, S keys, G query heads of the key head, H width.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from calibrate.jax.masking import is_known, log_n_unmasked
from calibrate.jax.softmax import adaptive_exponentials
from calibrate.store.fit import Fit


class QueryBlockSizes(NamedTuple):
    """How queries are cut into blocks.

    2,048 causal queries in one part take 1.2 times as long as in four, and with gradients 1.4 to
    1.5 times (an EPYC, one core and two).
    """

    logits: int = 1 << 20  # 4 MB, about what the caches of two cores hold next to the keys
    min_rows: int = 16
    max_rows: int = 256
    few_queries: int = 512  # up to so many, causal parts save nothing
    causal_parts: int = 4  # each has kernels of its own to compile


QUERY_BLOCKS = QueryBlockSizes()

# Without `prevent_cse`: XLA shares nothing between a loop and the loop of its gradient anyway.
_recomputed = partial(jax.checkpoint, prevent_cse=False)


class Band(NamedTuple):
    """The keys that a query at position t may see: t - left to t + right; None is no bound."""

    left: int | None
    right: int | None


class KeyHead(NamedTuple):
    """The fit and the masks of the queries of one key head."""

    fit: Fit
    table: jax.Array | None  # (numbers of a head, G)
    band: Band
    soft_cap: jax.Array | None
    n_queries: jax.Array | None
    n_keys: jax.Array | None
    entropy_gradient: bool
    n_parallel: int  # key heads that are computed at the same time

    def weigh(
        self,
        z: jax.Array,
        bias: jax.Array | None,
        mask: jax.Array | None,
        t: jax.Array,
        s: jax.Array,
        all_keys: int,
    ) -> tuple[jax.Array, jax.Array]:
        """Weights (..., G, rows, keys) before normalisation, and their sum (1 instead of 0).

        Args:
          z: scaled logits.
          t, s: positions of queries and keys, broadcastable to z.
          all_keys: the number of keys outside of the block too.
        """
        if self.soft_cap is not None:
            z = self.soft_cap * jnp.tanh(z / self.soft_cap)
        if bias is not None:
            z = z + bias
        left, right = self.band
        for real in (
            mask,
            None if left is None else s >= t - left,
            None if right is None else s <= t + right,
            None if self.n_queries is None else t < self.n_queries,
            None if self.n_keys is None else s < self.n_keys,
        ):
            z = z if real is None else jnp.where(real, z, -jnp.inf)
        log_n = None
        if self.fit.needs_size:
            by_position = bias is None and mask is None
            log_n = self._log_n(t, all_keys, z.dtype) if by_position else log_n_unmasked(z, -1)
        table = self.table
        if table is not None:
            table = table.reshape(len(table), *[1] * (z.ndim - 3), -1, 1, 1)
        exponentials, total = adaptive_exponentials(
            z, log_n, table, self.fit, -1, self.entropy_gradient
        )
        return exponentials, jnp.where(total == 0, 1, total)

    def _log_n(self, t: jax.Array, all_keys: int, dtype: DTypeLike) -> jax.Array:
        """log n of the n keys that queries at t see without a mask; 0 for one that sees none."""
        left, right = self.band
        first = 0 if left is None else jnp.maximum(t - left, 0)
        last = all_keys if self.n_keys is None else jnp.minimum(self.n_keys, all_keys)
        last = last if right is None else jnp.minimum(last, t + right + 1)
        n = jnp.maximum(last - first, 1) + 0 * t
        if self.n_queries is not None:
            n = jnp.where(t < self.n_queries, n, 1)
        return jnp.log(n.astype(dtype))


def attend_key_head(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    head: KeyHead,
) -> jax.Array:
    """One key head: q (G, T, H), k and v (S, H), bias and mask (G, T, S) -> (G, T, H).

    Many causal queries are split into parts, each of which meets the keys up to its last query.
    """
    T = q.shape[1]
    if not is_known(T) or QUERY_BLOCKS.few_queries >= T or head.band != Band(None, 0):
        return _attend_queries(q, k, v, bias, mask, 0, head)
    length = -(-T // QUERY_BLOCKS.causal_parts)
    parts = []
    for start in range(0, T, length):
        end = start + length
        bias_of_part, mask_of_part = _part(bias, start, end), _part(mask, start, end)
        part = q[:, start:end], k[:end], v[:end], bias_of_part, mask_of_part
        parts.append(_attend_queries(*part, start, head))
    return jnp.concatenate(parts, axis=1)


def _part(x: jax.Array | None, start: int, end: int) -> jax.Array | None:
    """The queries from start to end of (G, T, S), and the keys before end; axes of 1 stay."""
    if x is None:
        return None
    x = x if x.shape[1] == 1 else x[:, start:end]
    return x if x.shape[2] == 1 else x[:, :, :end]


def _attend_queries(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    start: int,
    head: KeyHead,
) -> jax.Array:
    """The queries (G, T, H) from position `start` on, in blocks; in one if sizes are symbolic."""
    T, S = q.shape[1], k.shape[0]
    if not is_known(T, S):
        whole = _recomputed(partial(_attend_block, k=k, v=v, n_keys=S, head=head))
        out: jax.Array = whole(start, q, bias, mask)
        return out
    left, right = head.band
    seen = S if right is None else min(S, start + T + right)
    reach = seen if left is None else left + (right or 0)
    rows = _rows_per_block(T, reach, len(q) * head.n_parallel)
    n_keys = seen if left is None else min(S, rows + reach)
    block = _recomputed(partial(_attend_block, k=k, v=v, n_keys=n_keys, head=head))
    blocks = (_split_queries(x, rows) for x in (q, bias, mask))
    out = map_first_axis(block, jnp.arange(start, start + T, rows), *blocks, at_once=False)
    return jnp.moveaxis(out, 0, 1).reshape(len(q), -1, out.shape[-1])[:, :T]


def _attend_block(
    start: jax.Array,
    q: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    n_keys: int,
    head: KeyHead,
) -> jax.Array:
    """The queries (G, rows, H) from position `start` on, and the `n_keys` keys that they see."""
    G, rows, H = q.shape
    # The position appears to depend on q. Otherwise JAX computes the masks of all blocks ahead of
    # the loop of the gradient, and keeps them.
    start = start + 0 * q.ravel()[0].astype(start.dtype)
    left = head.band.left
    first_key = 0 if left is None else jnp.clip(start - left, 0, k.shape[0] - n_keys)

    def seen_keys(x: jax.Array, axis: int) -> jax.Array:
        return jnp.asarray(jax.lax.dynamic_slice_in_dim(x, first_key, n_keys, axis))

    k_seen, v_seen = seen_keys(k, 0), seen_keys(v, 0)
    bias, mask = (x if x is None or x.shape[2] == 1 else seen_keys(x, 2) for x in (bias, mask))
    z = (q.reshape(G * rows, H) @ k_seen.T).reshape(G, rows, n_keys)
    t = start + jnp.arange(rows)[None, :, None]
    s = first_key + jnp.arange(n_keys)[None, None, :]
    exponentials, total = head.weigh(z, bias, mask, t, s, k.shape[0])
    return (exponentials.reshape(G * rows, n_keys) @ v_seen).reshape(G, rows, -1) / total


def _rows_per_block(n_queries: int, n_keys: int, n_heads: int) -> int:
    rows = QUERY_BLOCKS.logits // (n_heads * max(1, n_keys))
    return min(n_queries, QUERY_BLOCKS.max_rows, max(QUERY_BLOCKS.min_rows, rows))


def _split_queries(x: jax.Array | None, rows: int) -> jax.Array | None:
    """(G, T, ...) -> (blocks, G, rows, ...), padded with zeros."""
    if x is None or x.shape[1] == 1:
        return x if x is None else x[None]
    missing = -x.shape[1] % rows
    x = jnp.pad(x, ((0, 0), (0, missing), (0, 0))) if missing else x
    return jnp.moveaxis(x.reshape(len(x), -1, rows, x.shape[2]), 1, 0)


def map_first_axis(
    function: Callable[..., jax.Array], *arrays: jax.Array | None, at_once: bool
) -> jax.Array:
    """The function at each position of the arrays' first axis.

    Args:
      arrays: None, and arrays whose first axis is 1, are the same at all positions.
      at_once: by vmap; otherwise one position after the other.
    """
    n = next((x.shape[0] for x in arrays if x is not None and x.shape[0] != 1), 1)
    mapped = [None if x is None or x.shape[0] != n else x for x in arrays]
    constant = [None if x is None else x[0] for x in arrays]

    def at_position(parts: list[jax.Array | None]) -> jax.Array:
        return function(*(y if x is None else x for x, y in zip(parts, constant, strict=True)))

    if n == 1:
        return at_position(constant)[None]
    out: jax.Array = jax.vmap(at_position)(mapped) if at_once else jax.lax.map(at_position, mapped)
    return out
