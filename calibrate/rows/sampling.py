"""Sampling: which rows of arrays are kept where a budget does not hold all of them.

Every (set size, head) gets the same share of the budget, and what it does not need goes to the
others. Within one, rows are drawn at random, and each stands for as many as were given for one
that is kept: sums of weights are unbiased.
"""

from collections.abc import Sequence

import numpy as np

from calibrate.core.row_batches import hashes

MAX_ROWS = 1 << 18  # of arrays that are fitted: solved in about a minute at 1,000 items a row
MAX_WEIGHT = float(np.finfo(np.float32).max)


def fair_share(requested: Sequence[int], total: int) -> int:
    """The most that each may have so that all together have `total` at most.

    Each has what it requests or that share, whichever is less; where all fit, it is the largest
    request.
    """
    share, left = 0, total
    for i, request in enumerate(sorted(requested)):
        share = left // (len(requested) - i)
        if request > share:
            return share
        left -= request
        share = request
    return share


def row_quotas(
    counts: np.ndarray, row_bytes: np.ndarray, max_rows: int, max_bytes: int
) -> np.ndarray:
    """(strata,) how many rows of each stratum are kept.

    Args:
      counts: (strata,) rows of each.
      row_bytes: (strata,) of one row of each.
      max_rows, max_bytes: of all strata together.
    """
    quotas = np.minimum(counts, fair_share(counts.tolist(), max_rows))
    share = fair_share((quotas * row_bytes).tolist(), max_bytes)
    return np.asarray(np.minimum(quotas, share // row_bytes))


def sample_rows(
    stratum: np.ndarray, weight: np.ndarray, index: np.ndarray, quotas: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draws rows of each stratum at random, without replacement, whatever their weight.

    Args:
      stratum: (rows,) int, the number of each row's stratum.
      weight: (rows,) float > 0.
      index: (rows,) int, by whose hash rows are drawn: the order of rows does not matter.
      quotas: (strata,) how many rows to keep of each stratum, at least one.
    Returns:
      (rows,) bool, which are kept; and (rows,) float32, the weight of a row that is kept: its own,
      times the number of rows of its stratum over the number that is kept.
    """
    counts = np.bincount(stratum, minlength=len(quotas))
    by_hash = np.lexsort((hashes(index), stratum))  # one stratum after the other
    first = np.cumsum(counts) - counts
    kept = np.empty(len(stratum), bool)
    kept[by_hash] = np.arange(len(stratum)) < (first + quotas)[stratum[by_hash]]
    scale = np.maximum(counts / np.maximum(quotas, 1), 1)
    return kept, np.minimum(weight * scale[stratum], MAX_WEIGHT).astype(np.float32)
