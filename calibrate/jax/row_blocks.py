"""Rows of a softmax in JAX, computed in blocks whose temporaries stay in a CPU's cache.

The gradient of softmax(beta(H) z) needs three arrays of the logits' size. XLA asks for their memory
in each call; where the allocator gives it back to the system, a call pays for fresh pages as well.
A loop over blocks of rows needs them for one block alone.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Probabilities of logits (rows, items), given where they are real and the numbers of each row.
OfRows = Callable[[jax.Array, jax.Array | None, jax.Array | None], jax.Array]


def _processors() -> int:
    """The number of processors that XLA computes with."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class RowBlockSizes(NamedTuple):
    """From how many items on rows are computed in blocks, and of how many.

    One core of a Xeon takes for gradients 0.93 (4096 rows of 64 items), 0.85 (512, 512), 0.70
    (512, 1024), 0.58 (64, 16384) and 0.45 (8192, 1024) of the time of whole arrays; for results
    0.92 at 2^20 items and 0.48 at 2^23, and more of it at fewer items.
    """

    items: int = (1 << 15) * _processors()  # XLA shares a block among processors
    in_gradients: int = 1 << 17
    in_results: int = 1 << 20


SIZES = RowBlockSizes()


def softmax_of_rows(
    of_rows: OfRows, logits: jax.Array, where: jax.Array | None, table: jax.Array | None
) -> jax.Array:
    """of_rows(logits, where, table), in blocks of rows where that is quicker.

    Args:
      of_rows: a softmax along the last axis; hashable, without tracers.
      logits: (..., items), of a float dtype.
      where: bool, broadcastable to logits; None means all.
      table: numbers of each head, (numbers, 1, ..., heads, 1, 1); a constant to gradients.
    """
    again: OfRows = jax.checkpoint(of_rows)  # gradients need the logits alone
    of_all = where is not None and where.ndim > logits.ndim  # more probabilities than logits
    if of_all or not _has_blocks(logits):
        return again(logits, where, table)
    probs: jax.Array = _in_blocks(again, logits, where, table)
    return probs


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _in_blocks(
    of_rows: OfRows, logits: jax.Array, where: jax.Array | None, table: jax.Array | None
) -> jax.Array:
    if logits.size < SIZES.in_results:
        return of_rows(logits, where, table)
    blocks = _blocks(logits, where, table)
    probs: jax.Array = jax.lax.map(lambda x: of_rows(*x), blocks)
    return probs.reshape(logits.shape)


@_in_blocks.defjvp
def _in_blocks_jvp(
    of_rows: OfRows, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    (logits, where, table), (change, *_) = primals, tangents

    @jax.checkpoint
    def of_block(x: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        (logits, where, table), change = x
        return jax.jvp(lambda z: of_rows(z, where, table), (logits,), (change,))

    blocks = _blocks(logits, where, table), change.reshape(_shape_of_blocks(change))
    probs, changes = jax.lax.map(of_block, blocks)
    return probs.reshape(logits.shape), changes.reshape(logits.shape)


def _has_blocks(logits: jax.Array) -> bool:
    """Whether rows can be cut into equal blocks, which are of use on one CPU.

    Of rows that several devices share each device computes its own, and a GPU computes all at once.
    """
    if not all(isinstance(n, int) for n in logits.shape):
        return False  # sizes of exported programs may be symbols
    if logits.size < SIZES.in_gradients or logits.ndim < 2:
        return False
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        return False
    if jax.default_backend() != "cpu" or jax.device_count() > 1:
        return False
    blocks, rows, items = _shape_of_blocks(logits)
    # The number of rows may have no divisor near the wanted one.
    return blocks > 1 and (rows * items >= SIZES.items // 4)


def _shape_of_blocks(logits: jax.Array) -> tuple[int, int, int]:
    """(blocks, rows, items)."""
    items = logits.shape[-1]
    all_rows = logits.size // items
    rows = max(1, SIZES.items // items)
    while all_rows % rows:
        rows -= 1
    return all_rows // rows, rows, items


def _blocks(
    logits: jax.Array, where: jax.Array | None, table: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Each with an axis of blocks in front; the numbers of each row where each head has its own."""
    shape = _shape_of_blocks(logits)
    if where is not None:
        where = jnp.broadcast_to(where, logits.shape).reshape(shape)
    if table is not None:
        rows = (*table.shape[:1], *logits.shape[:-1], 1)
        table = jnp.broadcast_to(table, rows).reshape(len(table), *shape[:2], 1)
        table = jnp.moveaxis(table, 1, 0)
    return logits.reshape(shape), where, table
