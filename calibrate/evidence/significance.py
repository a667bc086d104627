"""Statistical significance (5 %): of one mean, of means over few groups, and among many tests.

Student's t widens errors of few groups; Benjamini and Hochberg correct for many tests.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

ALPHA = 0.05  # significance level, two-sided; also the false discovery rate
NORMAL = 1.959964  # standard errors: half of the 95 % interval of the normal distribution


def t_quantile_ratio(dof: ArrayLike) -> np.ndarray:
    """A 95 % interval by Student's t over that by the normal distribution, 1 or more.

    For degrees of freedom of any shape; NaN where there are 0 or NaN. Two standard errors, made
    as wide, are significant for any number of examples.
    """
    from scipy.special import stdtrit

    known = np.asarray(dof, float)
    factor: np.ndarray = stdtrit(np.where(known > 0, known, np.nan), 1 - ALPHA / 2) / NORMAL
    return factor


def significant_fdr(p: Sequence[float]) -> list[bool]:
    """The significant ones of many two-sided p-values, by Benjamini and Hochberg (1995)."""
    from scipy.stats import false_discovery_control

    known = np.nan_to_num(np.asarray(p, float), nan=1.0)
    return (false_discovery_control(known) <= ALPHA).tolist() if len(known) else []
