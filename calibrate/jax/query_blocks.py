"""Attention of one key head in JAX, computed in blocks of queries.

One block of queries meets its keys at a time, few enough that their logits stay in cache: memory
grows with queries + keys, not with their product. Keys that a window rules out for a whole block
are skipped, and those that causality rules out for a part of the queries. Gradients compute each
block again. All blocks of a part have one shape, so that one loop runs them: XLA takes 25 ms and
more to compile each kernel.

Letters for shapes: T queries, S keys, G query heads of the key head, H width.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from calibrate.jax.shannon_entropy import known, log_size
from calibrate.jax.softmax import sharpen
from calibrate.store.fit import Fit


class QueryBlockSizes(NamedTuple):
    """How queries are cut into blocks.

    Of 2,048 causal queries one part takes 1.2 times as long as four, and with gradients 1.4 to 1.5
    times (an EPYC, one core and two).
    """

    logits: int = 1 << 20  # 4 MB, about what the caches of two cores hold next to the keys
    min_rows: int = 16
    max_rows: int = 256
    few_queries: int = 512  # with no more, causal parts save nothing
    causal_parts: int = 4  # each has kernels of its own to compile


SIZES = QueryBlockSizes()

# Gradients compute it again. XLA finds nothing in common between a loop and its gradient's.
_again = partial(jax.checkpoint, prevent_cse=False)


class Band(NamedTuple):
    """Keys that a query at position t may see: t - left to t + right; None is without bound."""

    left: int | None
    right: int | None


class KeyHead(NamedTuple):
    """All that determines the weights of one key head's queries, except for its logits."""

    fit: Fit
    table: jax.Array | None  # (numbers of a head, G)
    band: Band
    soft_cap: jax.Array | None
    n_queries: jax.Array | None
    n_keys: jax.Array | None
    entropy_gradient: bool
    together: int  # heads whose blocks are computed at the same time

    def weigh(
        self,
        z: jax.Array,
        bias: jax.Array | None,
        mask: jax.Array | None,
        t: jax.Array,
        s: jax.Array,
        all_keys: int,
    ) -> tuple[jax.Array, jax.Array]:
        """Weights (..., G, rows, keys) of logits of queries t and keys s, and what divides them."""
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
        log_n, known = None, bias is None and mask is None
        if self.fit.needs_size:
            log_n = self._log_size(t, all_keys, z.dtype) if known else log_size(z, -1)
        table = self.table
        if table is not None:
            table = table.reshape(len(table), *[1] * (z.ndim - 3), -1, 1, 1)
        powers, total = sharpen(z, log_n, table, self.fit, -1, self.entropy_gradient, True)
        return powers, jnp.where(total == 0, 1, total)

    def _log_size(self, t: jax.Array, all_keys: int, dtype: DTypeLike) -> jax.Array:
        """log n of the n keys that queries at t see without masks; 0 for one that sees none."""
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
    if not known(T) or SIZES.few_queries >= T or head.band != Band(None, 0):
        return _attend_queries(q, k, v, bias, mask, 0, head)
    length = -(-T // SIZES.causal_parts)
    parts = []
    for start in range(0, T, length):
        end = start + length
        bias_of_part, mask_of_part = _part(bias, start, end), _part(mask, start, end)
        part = q[:, start:end], k[:end], v[:end], bias_of_part, mask_of_part
        parts.append(_attend_queries(*part, start, head))
    return jnp.concatenate(parts, axis=1)


def _part(x: jax.Array | None, start: int, end: int) -> jax.Array | None:
    """The queries from start to end of (G, T, S), and the keys up to the end; 1 and None stay."""
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
    """The queries (G, T, H) from position `start` on, in blocks; in one, if sizes are symbolic."""
    T, S = q.shape[1], k.shape[0]
    if not known(T, S):
        whole = _again(partial(_attend_block, k=k, v=v, n_keys=S, head=head))
        out: jax.Array = whole(start, q, bias, mask)
        return out
    left, right = head.band
    seen = S if right is None else min(S, start + T + right)
    reach = seen if left is None else left + (right or 0)
    rows = _rows(T, reach, len(q) * head.together)
    n_keys = seen if left is None else min(S, rows + reach)
    block = _again(partial(_attend_block, k=k, v=v, n_keys=n_keys, head=head))
    blocks = (_blocks(x, rows) for x in (q, bias, mask))
    out = apply_to_each(block, jnp.arange(start, start + T, rows), *blocks, at_once=False)
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
    """The queries (G, rows, H) from position `start` on."""
    G, rows, H = q.shape
    left, start = head.band.left, _tied(start, q)
    at = 0 if left is None else jnp.clip(start - left, 0, k.shape[0] - n_keys)

    def seen(x: jax.Array, axis: int = 0) -> jax.Array:
        return jnp.asarray(jax.lax.dynamic_slice_in_dim(x, at, n_keys, axis))

    keys, values = seen(k), seen(v)
    bias, mask = (x if x is None or x.shape[2] == 1 else seen(x, 2) for x in (bias, mask))
    z = (q.reshape(G * rows, H) @ keys.T).reshape(G, rows, n_keys)
    t, s = start + jnp.arange(rows)[None, :, None], at + jnp.arange(n_keys)[None, None, :]
    powers, total = head.weigh(z, bias, mask, t, s, k.shape[0])
    return (powers.reshape(G * rows, n_keys) @ values).reshape(G, rows, -1) / total


def _tied(position: jax.Array, q: jax.Array) -> jax.Array:
    """The position, as if it depended on q: else gradients would keep the masks of all blocks."""
    return position + 0 * q.ravel()[0].astype(position.dtype)


def _rows(n_queries: int, n_keys: int, n_heads: int) -> int:
    """The number of queries of each head in a block."""
    rows = SIZES.logits // (n_heads * max(1, n_keys))
    return min(n_queries, SIZES.max_rows, max(SIZES.min_rows, rows))


def _filled(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Filled up with zeros."""
    missing = length - x.shape[axis]
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x


def _blocks(x: jax.Array | None, rows: int) -> jax.Array | None:
    """(G, T, ...) -> (blocks, G, rows, ...), filled up with zeros."""
    if x is None or x.shape[1] == 1:
        return x if x is None else x[None]
    x = _filled(x, 1, -(-x.shape[1] // rows) * rows)
    return jnp.moveaxis(x.reshape(len(x), -1, rows, x.shape[2]), 1, 0)


def apply_to_each(
    function: Callable[..., jax.Array], *arrays: jax.Array | None, at_once: bool
) -> jax.Array:
    """The function at each position of the arrays' first axis; 1 or None is the same for all."""
    n = next((x.shape[0] for x in arrays if x is not None and x.shape[0] != 1), 1)
    split = [None if x is None or x.shape[0] != n else x for x in arrays]
    whole = [None if x is None else x[0] for x in arrays]

    def at(parts: list[jax.Array | None]) -> jax.Array:
        return function(*(y if x is None else x for x, y in zip(parts, whole, strict=True)))

    if n == 1:
        return at(whole)[None]
    out: jax.Array = jax.vmap(at)(split) if at_once else jax.lax.map(at, split)
    return out
