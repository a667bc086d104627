"""Attention of one key head in JAX, computed in blocks of queries.

One block of queries meets its keys at a time, few enough that their logits stay in cache: the
matrix of all logits never exists, and memory grows with queries + keys, not with their product.
Keys that causality or a window rules out for a whole block are skipped. Gradients compute each
block again.

Letters for shapes: T queries, S keys, G query heads of the key head, H width.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from calibrate.files.coefficients import Coefficients
from calibrate.maths.shannon_entropy import log_size
from calibrate.softmax import sharpen

# Logits in one block: 4 MB, about what the caches of two cores hold next to the keys.
BLOCK_LOGITS = 1 << 20
MIN_ROWS, MAX_ROWS = 16, 256
# Causal attention works on this many runs of queries, each with the keys up to its last one. More
# of them waste fewer logits (1/16 of the square at 8), and take longer to compile.
CAUSAL_RUNS = 8


class Band(NamedTuple):
    """Keys that a query at position t may see: t - left to t + right; None is without bound."""

    left: int | None
    right: int | None


class KeyHead(NamedTuple):
    """What determines the weights of one key head's queries, but for its logits."""

    fit: Coefficients
    table: jax.Array | None  # (numbers of a head, G)
    band: Band
    soft_cap: jax.Array | None
    n_queries: jax.Array | None
    n_keys: jax.Array | None
    entropy_gradient: bool
    together: int  # heads whose blocks are computed at the same time

    def weigh(
        self, z: jax.Array, bias: jax.Array | None, mask: jax.Array | None, query: jax.Array,
        key: ArrayLike, all_keys: int,
    ) -> jax.Array:  # fmt: skip
        """Unnormalised weights (G, rows, keys) of logits whose first query and key these are."""
        if self.soft_cap is not None:
            z = self.soft_cap * jnp.tanh(z / self.soft_cap)
        if bias is not None:
            z = z + bias
        t = query + jnp.arange(z.shape[1])[None, :, None]
        s = key + jnp.arange(z.shape[2])[None, None, :]
        conditions = [
            mask,
            None if self.band.left is None else s >= t - self.band.left,
            None if self.band.right is None else s <= t + self.band.right,
            None if self.n_queries is None else t < self.n_queries,
            None if self.n_keys is None else s < self.n_keys,
        ]
        for condition in conditions:
            if condition is not None:
                z = jnp.where(condition, z, -jnp.inf)
        log_n = None
        if self.fit.rule.by_size:
            known = bias is None and mask is None
            log_n = self._log_size(t, all_keys, z.dtype) if known else log_size(z, -1)
        return sharpen(z, log_n, self.table, self.fit, -1, self.entropy_gradient, True)

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
    q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, mask: jax.Array | None,
    head: KeyHead,
) -> jax.Array:  # fmt: skip
    """One key head: q (G, T, H), k and v (S, H), bias and mask (G, T, S) -> (G, T, H)."""
    T, S = q.shape[1], k.shape[0]
    left, right = head.band
    outs = []
    for first, last in _runs(T, head.band):
        seen = S if right is None else min(S, last + right)
        reach = seen if left is None else left + (right or 0)
        rows = _rows(last - first, reach, len(q) * head.together)
        n_keys = seen if left is None else min(S, rows + reach)
        block = jax.checkpoint(partial(_attend_block, k=k, v=v, n_keys=n_keys, head=head))
        parts = (_blocks(x, first, last, rows) for x in (q, bias, mask))
        out = apply_to_each(block, jnp.arange(first, last, rows), *parts, at_once=False)
        outs.append(jnp.moveaxis(out, 0, 1).reshape(len(q), -1, out.shape[-1])[:, : last - first])
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs, 1)


def _attend_block(
    start: jax.Array, q: jax.Array, bias: jax.Array | None, mask: jax.Array | None,
    k: jax.Array, v: jax.Array, n_keys: int, head: KeyHead,
) -> jax.Array:  # fmt: skip
    """The queries (G, rows, H) from position `start` on."""
    G, rows, H = q.shape
    left = head.band.left
    at = 0 if left is None else jnp.clip(start - left, 0, len(k) - n_keys)

    def seen(x: jax.Array, axis: int = 0) -> jax.Array:
        return jnp.asarray(jax.lax.dynamic_slice_in_dim(x, at, n_keys, axis))

    keys, values = seen(k), seen(v)
    bias, mask = (x if x is None or x.shape[2] == 1 else seen(x, 2) for x in (bias, mask))
    z = (q.reshape(G * rows, H) @ keys.T).reshape(G, rows, n_keys)
    powers = head.weigh(z, bias, mask, start, at, len(k))
    total = jnp.sum(powers, -1, keepdims=True)
    out = (powers.reshape(G * rows, n_keys) @ values).reshape(G, rows, -1)
    return out / jnp.where(total == 0, 1, total)


def _runs(T: int, band: Band) -> list[tuple[int, int]]:
    """(first, last) of runs of queries; the keys that a whole run cannot see are left out."""
    if band.right is None or band.left is not None or T <= MAX_ROWS:
        return [(0, T)]
    length = -(-T // (CAUSAL_RUNS * MIN_ROWS)) * MIN_ROWS
    return [(first, min(T, first + length)) for first in range(0, T, length)]


def _rows(n_queries: int, n_keys: int, n_heads: int) -> int:
    """How many queries of each head make a block."""
    rows = BLOCK_LOGITS // (n_heads * max(1, n_keys))
    return min(n_queries, MAX_ROWS, max(MIN_ROWS, rows))


def _blocks(x: jax.Array | None, first: int, last: int, rows: int) -> jax.Array | None:
    """(G, T, ...) -> (blocks, G, rows, ...) of queries first to last, filled up with zeros."""
    if x is None:
        return None
    if x.shape[1] == 1:
        return x[None]
    x = x[:, first:last]
    missing = -x.shape[1] % rows
    if missing:
        x = jnp.pad(x, ((0, 0), (0, missing), (0, 0)))
    return jnp.moveaxis(x.reshape(len(x), -1, rows, x.shape[2]), 1, 0)


def apply_to_each(
    function: Callable[..., jax.Array], *arrays: jax.Array | None, at_once: bool
) -> jax.Array:
    """The function at each position of the arrays' first axis; 1 or None is the same for all."""
    n = max(x.shape[0] for x in arrays if x is not None)
    if n == 1:
        return function(*(None if x is None else x[0] for x in arrays))[None]
    split = [x is not None and x.shape[0] == n for x in arrays]
    whole = [x if x is None or one else x[0] for x, one in zip(arrays, split, strict=True)]
    if at_once:
        return jax.vmap(function, [0 if one else None for one in split])(*whole)

    def at(parts: list[jax.Array]) -> jax.Array:
        rest = iter(parts)
        return function(*(next(rest) if one else x for x, one in zip(whole, split, strict=True)))

    out: jax.Array = jax.lax.map(at, [x for x, one in zip(arrays, split, strict=True) if one])
    return out
