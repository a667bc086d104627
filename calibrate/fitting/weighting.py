"""What rows count for: their weights, and the blocks that they are drawn by.

Every mean over set sizes, in `fit`, `evaluate --logits` and `diagnose`, is the same: within a size
rows have the weights that they came with, and sizes count by `size_shares`.
"""

import numpy as np

from calibrate.fitting.solved_rows import Rows

N_BLOCKS = 100
ENOUGH_ROWS = 100  # of a size: with fewer it has less weight


def size_shares(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """(sizes,) adding up to 1: equal, less for those with few rows, 0 for those of no weight.

    Args:
      rows: (sizes,) their numbers of rows.
      weight: (sizes,) the total weight of these.
    """
    share = np.where(weight > 0, np.minimum(rows, ENOUGH_ROWS), 0)
    shares: np.ndarray = share / share.sum()
    return shares


def row_weights(rows: Rows) -> np.ndarray:
    """(rows,) adding up to 1: sizes count by `size_shares`, and within one rows by their weight."""
    given = rows.weight.astype(float) if rows.weight.any() else np.ones(len(rows.size))
    _, size, count = np.unique(rows.size, return_inverse=True, return_counts=True)
    total = np.bincount(size, given)
    per_weight = size_shares(count, total) / np.where(total > 0, total, 1)
    weights: np.ndarray = per_weight[size] * given
    return weights


def assign_blocks(rows: Rows) -> np.ndarray:
    """(rows,) block of each row: at random, and as many of each size in every block.

    Sizes are fixed by design, so resamples keep them; the number of misranked rows is random.
    """
    shuffled = np.random.default_rng(0).permutation(len(rows.size))
    by_size = shuffled[np.argsort(rows.size[shuffled], kind="stable")]
    block = np.empty(len(rows.size), np.int64)
    block[by_size] = np.arange(len(by_size)) % N_BLOCKS
    return block
