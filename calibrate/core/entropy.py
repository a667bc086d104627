"""Shannon entropy of rows of logits, in NumPy.

Softmax and attention compute the entropy in their own kernels.
"""

import numpy as np

from calibrate.core.masking import NO_WEIGHT
from calibrate.core.row_batches import slice_rows


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
