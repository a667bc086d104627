"""Statistical significance (5 %): of one mean, of means over few groups, and among many tests.

Student's t widens errors where few groups tell them; Benjamini and Hochberg correct for many.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

ALPHA = 0.05  # how often "beyond chance" is said where nothing differs, up or down
NORMAL = 1.959964  # standard errors: half of the interval that chance leaves, the normal's


def t_quantile_ratio(freedom: ArrayLike) -> np.ndarray:
    """A 95 % interval by Student's t over that by the normal distribution, 1 or more.

    For degrees of freedom of any shape; NaN where there are 0 or NaN. Two standard errors that are
    as wide are beyond chance for any number of examples.
    """
    from scipy.special import stdtrit

    known = np.asarray(freedom, float)
    factor: np.ndarray = stdtrit(np.where(known > 0, known, np.nan), 1 - ALPHA / 2) / NORMAL
    return factor


def significant_fdr(p: Sequence[float]) -> list[bool]:
    """The significant ones of many two-sided p-values, by Benjamini and Hochberg (1995)."""
    from scipy.stats import false_discovery_control

    known = np.nan_to_num(np.asarray(p, float), nan=1.0)
    return (false_discovery_control(known) <= ALPHA).tolist() if len(known) else []
