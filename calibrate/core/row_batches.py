"""Rows of logits in NumPy: in batches of few shapes, their entropies, and hashes of row numbers."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from calibrate.core.masking import NO_WEIGHT

# A batch of rows fits in the second-level cache.
ITEMS_PER_BATCH = 1 << 16
FEW = 64  # times fewer rows are in the batches of so few rows
# Up to so many items it takes less time to compute on several times as many than to compile once
# more: then widths are powers of 8. A command computes once, a function again and again.
FEW_ITEMS = 1 << 22
FEW_ITEMS_OF_A_CALL = 1 << 19


def slices(rows: int, n: int, step: int | None = None) -> Iterator[slice]:
    """The rows of each batch of `step`, None: as many as are quick with n items a row."""
    step = step or max(1, ITEMS_PER_BATCH // max(n, 1))
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def in_batches(
    logits: np.ndarray, *others: np.ndarray, few_items: int = FEW_ITEMS
) -> Iterator[tuple[slice, list[np.ndarray]]]:
    """(slice of rows, their part of each array), every batch of one shape.

    Rows are filled up to a width, a power of two, with masked items; the last batch is filled up
    with rows of zeros.

    Args:
      others: (rows, ...) each; those of shape (rows, n) are bool, and filled up with False.
      few_items: up to which widths are of few kinds.
    """
    rows, n = logits.shape
    power = max(4, (n - 1).bit_length())
    of_eight = max(6, -(-power // 3) * 3)
    width = 1 << (of_eight if rows << of_eight <= few_items else power)
    batch = max(1, ITEMS_PER_BATCH // width)
    few = max(1, batch // FEW)
    batch = few if rows <= few else batch
    shapes = [(batch, width) if x.dtype == bool else (batch, *x.shape[1:]) for x in others]
    for part in slices(rows, n, batch):
        parts = [_filled(logits[part], (batch, width), -np.inf)]
        parts += [_filled(x[part], shape, 0) for x, shape in zip(others, shapes, strict=True)]
        yield part, parts


def _filled(array: np.ndarray, shape: tuple[int, ...], fill: Any) -> np.ndarray:
    """The array in the corner of one of that shape; rows beyond its own are 0."""
    if array.shape == shape:
        return array
    whole = np.zeros(shape, array.dtype)
    if array.ndim > 1:
        whole[: len(array), array.shape[1] :] = fill
    whole[tuple(map(slice, array.shape))] = array
    return whole


def row_entropy(logits: np.ndarray) -> np.ndarray:
    """(rows,) float32 Shannon entropy, nats, of softmax of (rows, n) logits, -inf where masked.

    It is meaningless for rows with NaN or +inf, or without an unmasked item.
    """
    H = np.empty(len(logits), np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):  # in such rows
        for part in slices(*logits.shape):
            shifted = logits[part] - logits[part].max(axis=1, keepdims=True)
            np.maximum(shifted, NO_WEIGHT, out=shifted)
            weights = np.exp(shifted)
            total = weights.sum(axis=1)
            H[part] = np.log(total) - np.vecdot(weights, shifted) / total
    return H


def hashes(index: np.ndarray) -> np.ndarray:
    """uint64 of non-negative integers by SplitMix64's finaliser: every bit moves every bit.

    A sample of the lowest hashes does not depend on the order of work.
    """
    x = np.asarray(index).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))
