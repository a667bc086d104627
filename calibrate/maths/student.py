"""Student's t: how much wider errors are where few numbers tell them."""

import numpy as np
from numpy.typing import ArrayLike

NORMAL, QUANTILE = 1.959964, 0.975  # of a 95 % interval


def widening(freedom: ArrayLike) -> np.ndarray:
    """A 95 % interval by Student's t over that by the normal distribution.

    A standard error that is times as wide means the same for any number of examples: two of them
    are beyond chance.

    Args:
      freedom: degrees of freedom, any shape.
    Returns:
      The factor, 1 or more; NaN where there are 0 or NaN degrees.
    """
    from scipy.special import stdtrit

    known = np.asarray(freedom, float)
    factor: np.ndarray = stdtrit(np.where(known > 0, known, np.nan), QUANTILE) / NORMAL
    return factor
