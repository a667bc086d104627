"""Weighted means with standard errors by group, and their significance: the one estimator.

Items of one group, such as the rows of a prompt, may be dependent; groups are independent.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

MIN_GAIN = 0.01  # nats of log-likelihood: a user would not notice less
ALPHA = 0.05  # significance level, two-sided; also the false discovery rate
NOTHING = "·"  # shown for an undefined number


class Estimate(NamedTuple):
    """A mean, or an array of means, with its standard error; NaN where the error is unknown."""

    mean: Any  # float, or an array
    error: Any
    groups: int = 0  # independent groups of items

    @property
    def p_value(self) -> Any:
        """Two-sided p-value of a mean of 0, by a t-test over groups; NaN if the error is unknown.

        If all groups have the same mean, so that the error is 0, it is that of a sign test.
        """
        from scipy.special import stdtr

        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.abs(self.mean) / self.error
            by_t = 2 * stdtr(max(self.groups - 1, 1), -t)
        return np.where(np.isinf(t), 2.0 ** (1 - self.groups), by_t)[()]

    @property
    def significant(self) -> Any:
        """True where the mean differs from 0 at the level ALPHA; False if the error is unknown."""
        return self.p_value < ALPHA

    @property
    def sign(self) -> Any:
        """The sign of the mean where it is significant, else 0."""
        return np.sign(self.mean) * self.significant

    @property
    def interval(self) -> tuple[Any, Any]:
        """The ends of the 95 % confidence interval."""
        margin = t_quantile(self.groups - 1) * self.error
        return self.mean - margin, self.mean + margin

    def __neg__(self) -> "Estimate":
        """The estimate of the negative mean: of a loss in place of a gain."""
        return self._replace(mean=0.0 - self.mean)

    def shown(self, shape: str, factor: float = 1) -> str:
        """The mean and its error as text, "+0.51 ± 0.06" in the format "+.2f"; a dot for NaN."""
        if not np.isfinite(self.mean):
            return NOTHING
        mean = decimal(factor * self.mean, shape)
        if not np.isfinite(self.error):
            return mean
        return f"{mean} ± {abs(factor) * self.error:{shape.removeprefix('+')}}"


def significant_fdr(p_values: Sequence[float]) -> list[bool]:
    """True for the significant ones of many two-sided p-values, at a false discovery rate of ALPHA.

    The result of `scipy.stats.false_discovery_control`, whose module takes half a second to import.

    Reference: Benjamini and Hochberg 1995.
    """
    known = np.nan_to_num(np.asarray(p_values, float), nan=1.0)
    order = np.argsort(known)
    adjusted = known[order] * (len(known) / np.arange(1, len(known) + 1))
    significant = np.empty(len(known), bool)
    significant[order] = np.minimum.accumulate(adjusted[::-1])[::-1] <= ALPHA
    return significant.tolist()


def t_quantile(degrees: float) -> float:
    """Half the width of the 95 % interval of Student's t, in standard errors; NaN for 0 degrees."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 1 - ALPHA / 2)) if degrees > 0 else np.nan


def estimate(values: np.ndarray, weight: np.ndarray, group: np.ndarray) -> Estimate:
    """The weighted mean of (..., items) values, with its standard error by group.

    mean = sum w v / sum w. The variance of the mean is G / (G - 1) times the sum over the G groups
    of (sum over the group of w (v - mean) / sum w)^2. With one group the error is NaN.

    Args:
      values: finite.
      weight: (items,) >= 0.
      group: (items,) int; -1 for an item that is a group by itself.
    Reference: Liang and Zeger 1986, errors that are robust to dependence within groups.
    """
    share, values = weight / weight.sum(), np.asarray(values, float)
    index = index_groups(group)
    n_groups = len(np.unique(index[share > 0]))
    mean = values @ share
    deviations = ((values - np.asarray(mean)[..., None]) * share).reshape(-1, len(share))
    sums = np.stack([np.bincount(index, row) for row in deviations])
    correction = n_groups / (n_groups - 1) if n_groups > 1 else np.nan
    error = np.sqrt(correction * (sums**2).sum(axis=1)).reshape(np.shape(mean))
    rounding = 1e-12 * np.abs(mean)  # what is left of an error of 0
    return Estimate(mean[()], np.where(error <= rounding, 0.0, error)[()], n_groups)


def decimal(value: float, shape: str) -> str:
    """A number in a format such as "+.2f", without a minus sign if it rounds to 0."""
    text = f"{value:{shape}}"
    return f"{0.0:{shape}}" if float(text) == 0 else text


def per_cent(share: float, decimals: int = 1) -> str:
    """A share of 1 as text: "12.5 %"."""
    return f"{100 * share:.{decimals}f} %"


def index_groups(group: np.ndarray) -> np.ndarray:
    """(items,) index of each item's group, from 0; each item of group -1 is a group by itself."""
    known = group >= 0
    index: np.ndarray = np.cumsum(~known) - 1
    groups, index[known] = np.unique(group[known], return_inverse=True)
    index[~known] += len(groups)
    return index
