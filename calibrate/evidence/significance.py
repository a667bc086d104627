"""Statistical significance (5 %): its level, and its correction for many tests."""

from collections.abc import Sequence

import numpy as np

ALPHA = 0.05  # significance level, two-sided; also the false discovery rate


def significant_fdr(p: Sequence[float]) -> list[bool]:
    """The significant ones of many two-sided p-values, by Benjamini and Hochberg (1995)."""
    from scipy.stats import false_discovery_control

    known = np.nan_to_num(np.asarray(p, float), nan=1.0)
    return (false_discovery_control(known) <= ALPHA).tolist() if len(known) else []
