"""Means over strata and their errors: the one estimator.

Strata (set sizes; templates and lengths) are fixed by design: they have equal weight, or less with
few items, and resampling would keep them. Items of one group, such as a prompt, may be alike;
groups are independent. Student's t widens the errors of few groups.
"""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from calibrate.evidence.significance import ALPHA

NORMAL = 1.959964  # standard errors: half of the 95 % interval of the normal distribution
MIN_EFFECTIVE = 1.5  # groups: with fewer, their spread is unknown
MIN_ALIKE = 6  # groups that all differ alike: of fewer, chance gives one sign too often
ROUNDING = 1e-12
NOTHING = "·"  # shown for what is not defined


def t_quantile(dof: ArrayLike) -> np.ndarray:
    """Half of the 95 % interval of Student's t, in standard errors.

    For degrees of freedom of any shape; NaN where there are 0 or NaN.
    """
    from scipy.special import stdtrit

    known = np.asarray(dof, float)
    return np.asarray(stdtrit(np.where(known > 0, known, np.nan), 1 - ALPHA / 2))


def t_quantile_ratio(dof: ArrayLike) -> np.ndarray:
    """A 95 % interval by Student's t over that by the normal distribution, 1 or more.

    Two standard errors, made as wide, are significant for any number of examples.
    """
    return np.asarray(t_quantile(dof) / NORMAL)


class Estimate(NamedTuple):
    """A mean over strata, or several, with its standard error.

    The error is as wide as the 95 % interval of Student's t, so that about two of them are
    significant for any number of groups. It is NaN where groups are too few.
    """

    mean: Any  # float, or an array
    error: Any
    freedom: Any = np.inf  # degrees of freedom in the error

    @property
    def significant(self) -> Any:
        """True where the mean differs from 0 at the level ALPHA; False if the error is NaN."""
        return np.abs(self.mean) > NORMAL * self.error

    @property
    def sign(self) -> Any:
        """1 or -1 where the mean is significant, else 0."""
        return np.sign(self.mean) * self.significant

    @property
    def interval(self) -> tuple[Any, Any]:
        """The ends of the 95 % interval."""
        margin = NORMAL * self.error
        return self.mean - margin, self.mean + margin

    @property
    def p(self) -> Any:
        """Two-sided p-value of a mean of 0: of a t-test, or of signs where all differ alike.

        NaN where the error is unknown, or nothing differs.
        """
        from scipy.special import stdtr

        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.abs(self.mean) / self.error * t_quantile_ratio(self.freedom)
            by_t = 2 * stdtr(self.freedom, -t)
        return np.where(np.isinf(t), 2.0**-self.freedom, by_t)[()]

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


def shares(count: np.ndarray, weight: np.ndarray, enough: int) -> np.ndarray:
    """(strata,) adding up to 1: equal, less for those with fewer than `enough` items.

    Args:
      count: (strata,) their numbers of items.
      weight: (strata,) the total weight of these; a stratum without any has no share.
      enough: items.
    """
    share = np.where(weight > 0, np.minimum(count, enough), 0)
    return np.asarray(share / share.sum())


def effective(share: np.ndarray) -> Any:
    """The effective number of parts with these shares, which sum to 1."""
    return 1 / np.sum(share**2, axis=-1)


class Strata:
    """Items by stratum and group, to estimate means of their values."""

    def __init__(
        self, stratum: np.ndarray, group: np.ndarray, weight: np.ndarray, enough: int = 1
    ) -> None:
        """Takes three arrays (items,).

        Args:
          stratum: int, in any order.
          group: int from 0.
          weight: of an item among those of its stratum.
          enough: see `shares`.
        """
        _, of_item, count = np.unique(stratum, return_inverse=True, return_counts=True)
        n_groups = int(group.max(initial=-1)) + 1
        cells, self._cell = np.unique(of_item * n_groups + group, return_inverse=True)
        self._stratum, cell_group = np.divmod(cells, max(n_groups, 1))
        self._group = np.unique(cell_group, return_inverse=True)[1]
        self._weight = np.asarray(weight, float)
        cell_weight = np.bincount(self._cell, self._weight, len(cells))
        self._total = np.bincount(self._stratum, cell_weight, len(count))
        self._per_weight = 1 / np.where(self._total > 0, self._total, 1)
        self.share = shares(count, self._total, enough)
        self._part = cell_weight * self._per_weight[self._stratum]

    @cached_property
    def item_weight(self) -> np.ndarray:
        """(items,) adding up to 1: what each item counts for in the mean."""
        in_cell = (self.share * self._per_weight)[self._stratum]
        return np.asarray(in_cell[self._cell] * self._weight)

    @cached_property
    def _effective(self) -> np.ndarray:
        """(strata,) effective number of groups; 1 of a stratum without weight."""
        squares = np.bincount(self._stratum, self._part**2, len(self.share))
        return np.asarray(1 / np.where(squares > 0, squares, 1))

    @cached_property
    def groups(self) -> float:
        """The effective number of groups in the whole mean."""
        share = np.bincount(self._group, self.share[self._stratum] * self._part)
        return float(effective(share))

    @cached_property
    def dof(self) -> float:
        """Degrees of freedom of the error: groups, less what the means of strata take.

        Fewer where small strata have most of the variance.

        Reference: Welch 1947.
        """
        by_group = self.groups - float(self.share @ (self.groups / self._effective))
        part, alone = self.share**2 / self._effective, self._effective < MIN_EFFECTIVE
        lost = np.sum(part[~alone] ** 2 / (self._effective[~alone] - 1))
        lost += part[alone].sum() ** 2 / max(1, len(part) - 1)
        return min(by_group, float(part.sum() ** 2 / lost))

    def mean_and_error(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean over strata, and its standard error as it is, of (..., items) values.

        The variance of a stratum with one group is estimated by its distance to the mean.

        Reference: Liang and Zeger 1986, errors that are robust to dependence within groups.
        """
        flat = np.asarray(values, float).reshape(-1, len(self._cell)) * self._weight
        n_cells, n_strata = len(self._part), len(self.share)
        sums = np.stack([np.bincount(self._cell, row, n_cells) for row in flat])
        total = sums * self._per_weight[self._stratum]
        means = np.stack([np.bincount(self._stratum, row, n_strata) for row in total])
        mean = means @ self.share
        alone = self._effective < MIN_EFFECTIVE
        wider = self._effective / np.where(alone, 1, self._effective - 1)
        scale = self.share * np.sqrt(np.where(alone, 0, wider))
        off = scale[self._stratum] * (total - self._part * means[:, self._stratum])
        variance = np.array([np.sum(np.bincount(self._group, row) ** 2) for row in off])
        variance += (means - mean[:, None]) ** 2 @ np.where(alone, self.share**2, 0)
        shape = np.shape(values)[:-1]
        return mean.reshape(shape), np.sqrt(variance).reshape(shape)

    def estimate(self, values: np.ndarray) -> Estimate:
        """The mean over strata of (..., items) values, with its error by group."""
        mean, error = self.mean_and_error(values)
        known = self.groups >= MIN_EFFECTIVE and self.dof > 0
        dof = self.dof if known else np.nan
        error = error * t_quantile_ratio(dof)
        alike = (error <= ROUNDING * np.abs(mean)) & (mean != 0)
        error = np.where(alike, 0.0 if self.groups > MIN_ALIKE - ROUNDING else np.nan, error)
        return Estimate(mean[()], error[()], dof)
