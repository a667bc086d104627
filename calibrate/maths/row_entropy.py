"""Entropies of rows in NumPy: any number of items, without compilation."""

import numpy as np

from calibrate.maths.masking import NO_WEIGHT
from calibrate.maths.row_blocks import slices


def row_entropy(logits: np.ndarray) -> np.ndarray:
    """Shannon entropy of softmax(logits), row by row.

    Args:
      logits: (rows, n) float32, -inf where masked.
    Returns:
      (rows,) float32, nats; meaningless for rows with NaN or +inf, or without an unmasked item.
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
