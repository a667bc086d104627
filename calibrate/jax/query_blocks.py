"""Attention of one key head in JAX, computed in blocks of queries.

One block of queries meets its keys at a time, few enough that their logits stay in cache: memory
grows with queries + keys, not with their product. Keys that causality or a window rules out for a
whole block are skipped. Gradients compute each block again. All blocks of a call have one shape, so
that one loop runs them: XLA takes 25 ms and more to compile each kernel.

Letters for shapes: T queries, S keys, G query heads of the key head, H width.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from calibrate.jax.shannon_entropy import log_size, of_two
from calibrate.jax.softmax import sharpen
from calibrate.store.coefficients import Coefficients


class QueryBlockSizes(NamedTuple):
    """How queries are cut into blocks."""

    logits: int = 1 << 20  # 4 MB, about what the caches of two cores hold next to the keys
    min_rows: int = 16
    max_rows: int = 256
    # Causal attention of more queries is in pairs of blocks: with fewer that saves nothing.
    few_queries: int = 512
    # Even: of queries, each with the keys up to its last; 1/16 of the square is waste.
    causal_runs: int = 8


SIZES = QueryBlockSizes()

# Gradients compute it again. XLA finds nothing in common between a loop and its gradient's.
_again = partial(jax.checkpoint, prevent_cse=False)


class Band(NamedTuple):
    """Keys that a query at position t may see: t - left to t + right; None is without bound."""

    left: int | None
    right: int | None


class KeyHead(NamedTuple):
    """All that determines the weights of one key head's queries, except for its logits."""

    fit: Coefficients
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
        first: jax.Array | None = None,
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
            log_n = self._log_size(t, all_keys, z.dtype) if known else log_size(z, -1, first=first)
        table = self.table
        if table is not None:
            table = table.reshape(len(table), *[1] * (z.ndim - 3), -1, 1, 1)
        powers, total = sharpen(z, log_n, table, first, self.fit, -1, self.entropy_gradient, True)
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
    """One key head: q (G, T, H), k and v (S, H), bias and mask (G, T, S) -> (G, T, H)."""
    T, S = q.shape[1], len(k)
    left, right = head.band
    if head.band == Band(None, 0) and SIZES.few_queries < T <= S:
        return _attend_in_pairs(q, k, v, bias, mask, head)
    seen = S if right is None else min(S, T + right)
    reach = seen if left is None else left + (right or 0)
    rows = _rows(T, reach, len(q) * head.together)
    n_keys = seen if left is None else min(S, rows + reach)
    block = _again(partial(_attend_block, k=k, v=v, n_keys=n_keys, head=head))
    parts = (_blocks(x, rows) for x in (q, bias, mask))
    out = apply_to_each(block, jnp.arange(0, T, rows), *parts, at_once=False)
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
    at = 0 if left is None else jnp.clip(start - left, 0, len(k) - n_keys)

    def seen(x: jax.Array, axis: int = 0) -> jax.Array:
        return jnp.asarray(jax.lax.dynamic_slice_in_dim(x, at, n_keys, axis))

    keys, values = seen(k), seen(v)
    bias, mask = (x if x is None or x.shape[2] == 1 else seen(x, 2) for x in (bias, mask))
    z = (q.reshape(G * rows, H) @ keys.T).reshape(G, rows, n_keys)
    t, s = start + jnp.arange(rows)[None, :, None], at + jnp.arange(n_keys)[None, None, :]
    powers, total = head.weigh(z, bias, mask, t, s, len(k))
    return (powers.reshape(G * rows, n_keys) @ values).reshape(G, rows, -1) / total


def _attend_in_pairs(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    head: KeyHead,
) -> jax.Array:
    """Causal attention: a block of the late queries shares its logits with one of the early ones.

    Together they always see `causal_runs` + 1 tiles of keys, so that one program serves all blocks.
    Of 768 to 4,096 queries that takes 0.82 to 0.72 of the time of all keys, and with gradients 0.64
    to 0.57 (one core of a CPU).
    """
    (G, T, _), runs = q.shape, SIZES.causal_runs
    length = -(-T // (runs * SIZES.min_rows)) * SIZES.min_rows
    n, most = 1, _rows(length, (runs + 1) * length, G * head.together)
    while length > n * most:
        n *= 2
    rows = -(-length // n)
    length = n * rows
    k, v = (_filled(x[:T], 0, runs * length) for x in (k, v))
    k, v = (x.reshape(runs, length, -1) for x in (k, v))
    k, v = (_mirrored(x, x, 0) for x in (k, v))
    bias, mask = (
        x if x is None or x.shape[2] == 1 else _filled(x[..., :T], 2, runs * length)
        for x in (bias, mask)
    )
    pairs = (_pairs(x, runs * length, n) for x in (q, bias, mask))
    block = partial(_attend_pair, k=k, v=v, per_run=n, all_keys=T, head=head)
    blocks = jnp.arange(runs // 2 * n)
    out = apply_to_each(_again(block), blocks, *pairs, at_once=False)
    out = jnp.moveaxis(out.reshape(runs // 2, n, 2, G, rows, -1), (2, 3), (0, 1))
    late, early = out.reshape(2, G, runs // 2, length, -1)
    return jnp.concatenate([early, late[:, ::-1]], 1).reshape(G, runs * length, -1)[:, :T]


def _attend_pair(
    block: jax.Array,
    q: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    per_run: int,
    all_keys: int,
    head: KeyHead,
) -> jax.Array:
    """Late and early queries (2, G, rows, H), with mirrored tiles of keys."""
    _, G, rows, H = q.shape
    runs, length = len(k) // 2, k.shape[1]
    pair, part = jnp.divmod(_tied(block, q), per_run)

    def seen(x: jax.Array, axis: int = 0) -> jax.Array:
        return jnp.asarray(jax.lax.dynamic_slice_in_dim(x, pair, runs + 1, axis))

    def tiles(x: jax.Array | None) -> jax.Array | None:
        if x is None or x.shape[-1] == 1:
            return x if x is None or x.ndim == 3 else jnp.where(late, x[0], x[1])
        x = jnp.broadcast_to(x, (2, x.shape[-3], rows, runs * length))
        x = x.reshape(2, -1, rows, runs, length)
        x = _mirrored(x[0], x[1], -2)
        return jnp.moveaxis(seen(x, -2), -2, 0)

    tile = pair + jnp.arange(runs + 1)[:, None, None, None]
    late = tile < runs
    run = jnp.where(late, runs - 1 - pair, pair)
    t = run * length + part * rows + jnp.arange(rows)[:, None]
    s = jnp.where(late, runs - 1 - tile, tile - runs) * length + jnp.arange(length)
    z = jnp.where(late, q[0], q[1]).reshape(-1, G * rows, H) @ jnp.matrix_transpose(seen(k))
    z = z.reshape(-1, G, rows, length)
    powers, total = head.weigh(z, tiles(bias), tiles(mask), t, s, all_keys, late)
    out = (powers.reshape(-1, G * rows, length) @ seen(v)).reshape(-1, G, rows, v.shape[-1])
    return of_two(jnp.sum, out, late) / jnp.stack([total[0], total[-1]])  # the first tile is late


def _tied(position: jax.Array, q: jax.Array) -> jax.Array:
    """The position, as if it depended on q: else gradients would keep the masks of all blocks."""
    return position + 0 * q.ravel()[0].astype(position.dtype)


def _mirrored(late: jax.Array, early: jax.Array, axis: int) -> jax.Array:
    """The tiles of one in reverse order, then those of the other."""
    return jnp.concatenate([jnp.flip(late, axis), early], axis)


def _pairs(x: jax.Array | None, length: int, n: int) -> jax.Array | None:
    """(G, T, ...) -> (blocks, 2, G, rows, ...): the last run of queries with the first one, ..."""
    if x is None or x.shape[1] == 1:
        return x if x is None else x[None]
    x = _filled(x, 1, length).reshape(len(x), SIZES.causal_runs, n, -1, x.shape[2])
    half = SIZES.causal_runs // 2
    x = jnp.stack([x[:, : half - 1 : -1], x[:, :half]])
    return jnp.moveaxis(x, (2, 3), (0, 1)).reshape(half * n, *x.shape[:2], *x.shape[4:])


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
    n = max(len(x) for x in arrays if x is not None)
    split = [None if x is None or len(x) < n else x for x in arrays]
    whole = [None if x is None else x[0] for x in arrays]

    def at(parts: list[jax.Array | None]) -> jax.Array:
        return function(*(y if x is None else x for x, y in zip(parts, whole, strict=True)))

    if n == 1:
        return at(whole)[None]
    out: jax.Array = jax.vmap(at)(split) if at_once else jax.lax.map(at, split)
    return out
