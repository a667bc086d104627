"""Row blocks: rows in blocks of few shapes, so that a jitted function is compiled a few times."""

from collections.abc import Iterator
from typing import Any

import numpy as np

# A block of rows fits in the second-level cache.
ITEMS_PER_BLOCK = 1 << 16
FEW = 64  # times fewer rows are in the blocks of so few rows
# Up to so many items in the end, it takes less time to compute on several times as many than to
# compile once more: then widths are powers of 8 from 64 on. A command computes once.
FEW_ITEMS = 1 << 22
FEW_ITEMS_OF_A_CALL = 1 << 19  # and a function may be called again and again


def slices(rows: int, n: int) -> Iterator[slice]:
    """The rows of each block, of n items a row."""
    return _ranges(rows, max(1, ITEMS_PER_BLOCK // max(n, 1)))


def _ranges(rows: int, step: int) -> Iterator[slice]:
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def in_blocks(
    logits: np.ndarray, *others: np.ndarray, few_items: int = FEW_ITEMS
) -> Iterator[tuple[slice, list[np.ndarray]]]:
    """(slice of rows, their part of each array), every block of one shape.

    Rows are filled up to a width, a power of two, with masked items; the last block is filled up
    with rows of zeros.

    Args:
      logits: (rows, n).
      others: (rows, ...) each; those of shape (rows, n) are bool, and filled up with False.
      few_items: up to which widths are of few kinds.
    """
    rows, n = logits.shape
    width = _width(rows, n, few_items)
    block = max(1, ITEMS_PER_BLOCK // width)
    few = max(1, block // FEW)
    block = few if rows <= few else block
    shapes = [(block, width) if x.dtype == bool else (block, *x.shape[1:]) for x in others]
    for part in _ranges(rows, block):
        parts = [_filled(logits[part], (block, width), -np.inf)]
        parts += [_filled(x[part], shape, 0) for x, shape in zip(others, shapes, strict=True)]
        yield part, parts


def _width(rows: int, n: int, few_items: int) -> int:
    power = max(4, (n - 1).bit_length())
    of_eight = max(6, -(-power // 3) * 3)
    return 1 << (of_eight if rows << of_eight <= few_items else power)


def _filled(array: np.ndarray, shape: tuple[int, ...], fill: Any) -> np.ndarray:
    """The array in the corner of one of that shape; rows beyond its own are 0."""
    if array.shape == shape:
        return array
    whole = np.zeros(shape, array.dtype)
    if array.ndim > 1:
        whole[: len(array), array.shape[1] :] = fill
    whole[tuple(map(slice, array.shape))] = array
    return whole
