"""Weighted means and their standard errors, by group: the one estimator.

Items of one group, such as the rows of a prompt, may be alike; groups are independent.
"""

from typing import Any, NamedTuple

import numpy as np

from calibrate.evidence.significance import ALPHA

NOTHING = "·"  # shown for what is not defined


class Estimate(NamedTuple):
    """A mean, or several, with its standard error; the error is NaN where it is not known."""

    mean: Any  # float, or an array
    error: Any
    groups: int = 0  # independent groups of items

    @property
    def p_value(self) -> Any:
        """Two-sided p-value of a mean of 0, by a t-test on the groups; NaN: not known.

        Where all groups differ by the same number, by a sign test on them.
        """
        from scipy.special import stdtr

        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.abs(self.mean) / self.error
            by_t = 2 * stdtr(max(self.groups - 1, 1), -t)
        return np.where(np.isinf(t), 2.0 ** (1 - self.groups), by_t)[()]

    @property
    def significant(self) -> Any:
        """True where the mean differs from 0 at the level ALPHA; False if the error is NaN."""
        return self.p_value < ALPHA

    @property
    def sign(self) -> Any:
        """1 or -1 where the mean is significant, else 0."""
        return np.sign(self.mean) * self.significant

    @property
    def interval(self) -> tuple[Any, Any]:
        """The ends of the 95 % confidence interval."""
        margin = t_quantile(self.groups - 1) * self.error
        return self.mean - margin, self.mean + margin

    def __neg__(self) -> "Estimate":
        """The estimate of the negative mean, as of a loss in place of a gain."""
        return self._replace(mean=0.0 - self.mean)

    def shown(self, shape: str, factor: float = 1) -> str:
        """A mean and its error as text, "+0.51 ± 0.06" in the shape "+.2f"; a dot if it is NaN."""
        if not np.isfinite(self.mean):
            return NOTHING
        mean = decimal(factor * self.mean, shape)
        if not np.isfinite(self.error):
            return mean
        return f"{mean} ± {abs(factor) * self.error:{shape.removeprefix('+')}}"


def t_quantile(degrees: float) -> float:
    """Half of the 95 % interval of Student's t, in standard errors; NaN without a degree."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 1 - ALPHA / 2)) if degrees > 0 else np.nan


def estimate(values: np.ndarray, weight: np.ndarray, group: np.ndarray) -> Estimate:
    """The weighted mean of (..., items) values, with its standard error by group.

    mean = sum w v / sum w; its variance is G / (G - 1) sum over groups of (sum over the group of
    w (v - mean) / sum w)^2. The error of one group is NaN.

    Args:
      values: finite.
      weight: (items,) >= 0.
      group: (items,) int, -1 for an item that is its own group.
    Reference: Liang and Zeger 1986, errors that are robust to dependence within groups.
    """
    share = weight / weight.sum()
    index = index_groups(group)
    used = np.unique(index[share > 0])
    mean = np.asarray(values, float) @ share
    off = ((np.asarray(values, float) - np.asarray(mean)[..., None]) * share).reshape(
        -1, len(share)
    )
    sums = np.stack([np.bincount(index, row) for row in off])
    n_groups = len(used)
    wider = n_groups / (n_groups - 1) if n_groups > 1 else np.nan
    error = np.sqrt(wider * (sums**2).sum(axis=1)).reshape(np.shape(mean))
    rounding = 1e-12 * np.abs(mean)  # where all groups differ by the same number
    return Estimate(mean[()], np.where(error <= rounding, 0.0, error)[()], n_groups)


def decimal(value: float, shape: str) -> str:
    """A number in a shape such as "+.2f", where what rounds to 0 has no minus sign."""
    text = f"{value:{shape}}"
    return f"{0.0:{shape}}" if float(text) == 0 else text


def index_groups(group: np.ndarray) -> np.ndarray:
    """(items,) number of each item's group, from 0; an unknown one, -1, has no other items."""
    known = group >= 0
    index: np.ndarray = np.cumsum(~known) - 1
    groups, index[known] = np.unique(group[known], return_inverse=True)
    index[~known] += len(groups)
    return index
