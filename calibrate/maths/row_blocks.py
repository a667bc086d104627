"""Row blocks: rows in blocks of one shape, so that a jitted function is traced once."""

from collections.abc import Iterator

import numpy as np

# A block of rows fits in the second-level cache.
ITEMS_PER_BLOCK = 1 << 16


def in_blocks(logits: np.ndarray, *others: np.ndarray) -> Iterator[tuple[slice, list[np.ndarray]]]:
    """(slice of rows, their part of each array); the last block is padded with zeros.

    Args:
      logits: (rows, n).
      others: (rows, ...) each.
    """
    rows, n = logits.shape
    block = min(max(1, ITEMS_PER_BLOCK // max(n, 1)), 1 << max(rows - 1, 0).bit_length())
    for start in range(0, rows, block):
        part = slice(start, min(start + block, rows))
        missing = block - (part.stop - part.start)
        yield part, [_fill(array[part], missing) for array in (logits, *others)]


def _fill(array: np.ndarray, missing: int) -> np.ndarray:
    return np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) if missing else array
