"""Rows of logits in NumPy: batches that fit in the cache, of few shapes for kernels; entropy."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from calibrate.core.masking import NO_WEIGHT

ITEMS_PER_BATCH = 1 << 16  # fit in the second-level cache
SMALL_BATCH_FACTOR = 64  # with few rows, a batch has 1/64 as many
# Up to so many items, rows are filled up to a power of 8, not of 2: that is cheaper than compiling
# a kernel for another width. FEW_ITEMS is for a command, which calls a kernel once, and
# FEW_ITEMS_OF_A_CALL for a function, which is called again and again.
FEW_ITEMS = 1 << 22
FEW_ITEMS_OF_A_CALL = 1 << 19


def slice_rows(rows: int, n: int, step: int | None = None) -> Iterator[slice]:
    """The slices of batches of `step` rows; None: as many rows of n items as fit in the cache."""
    step = step or max(1, ITEMS_PER_BATCH // max(n, 1))
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def in_batches(
    logits: np.ndarray, *others: np.ndarray, few_items: int = FEW_ITEMS
) -> Iterator[tuple[slice, list[np.ndarray]]]:
    """Pairs of a slice of rows and a list of their part of each array; all batches have one shape.

    Rows are filled up with masked items to a width, a power of two; the last batch is filled up
    with rows of zeros.

    Args:
      logits: (rows, n).
      others: (rows, ...) each; those of shape (rows, n) are bool, and filled up with False.
      few_items: number of items up to which the width is a power of 8.
    """
    rows, n = logits.shape
    exponent = max(4, (n - 1).bit_length())
    exponent_for_8 = 3 * math.ceil(exponent / 3)  # of two, for the next power of 8
    width = 1 << (exponent_for_8 if rows << exponent_for_8 <= few_items else exponent)
    batch = max(1, ITEMS_PER_BATCH // width)
    small_batch = max(1, batch // SMALL_BATCH_FACTOR)
    batch = small_batch if rows <= small_batch else batch
    shapes = [(batch, width) if x.dtype == bool else (batch, *x.shape[1:]) for x in others]
    for part in slice_rows(rows, n, batch):
        parts = [_fill(logits[part], (batch, width), -np.inf)]
        parts += [_fill(x[part], shape, 0) for x, shape in zip(others, shapes, strict=True)]
        yield part, parts


def _fill(array: np.ndarray, shape: tuple[int, ...], value: Any) -> np.ndarray:
    """The array filled up to a shape: columns with a value, and then rows with zeros."""
    if array.shape == shape:
        return array
    filled = np.zeros(shape, array.dtype)
    if array.ndim > 1:
        filled[: len(array), array.shape[1] :] = value
    filled[tuple(map(slice, array.shape))] = array
    return filled


def row_entropy(logits: np.ndarray) -> np.ndarray:
    """(rows,) float32 Shannon entropy, nats, of softmax of (rows, n) logits, -inf where masked.

    Undefined for rows with NaN or +inf, and for rows without an unmasked item.
    """
    H = np.empty(len(logits), np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):  # of such rows
        for part in slice_rows(*logits.shape):
            shifted = logits[part] - logits[part].max(axis=1, keepdims=True)
            np.maximum(shifted, NO_WEIGHT, out=shifted)
            weights = np.exp(shifted)
            total = weights.sum(axis=1)
            H[part] = np.log(total) - np.vecdot(weights, shifted) / total
    return H
