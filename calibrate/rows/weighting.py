"""What rows count for, and which of them are dependent: weights, blocks of groups, errors by group.

Every mean over set sizes, in `fit`, `evaluate --logits` and `diagnose`, is the same: within a size
rows have the weights that they came with, and sizes count by `size_shares`. A group is what makes
rows dependent, such as their prompt; groups, not rows, are taken as independent.
"""

from typing import NamedTuple

import numpy as np

from calibrate.errors import QualityError
from calibrate.maths.student import widening
from calibrate.rows.solved_rows import Rows

N_BLOCKS = 100
ENOUGH_ROWS = 100  # of a size: with fewer it has less weight
MIN_GROUPS = 5  # as many as folds
MIN_EFFECTIVE = 1.5  # groups: with fewer, their spread is unknown


class Estimate(NamedTuple):
    """Means over set sizes and their standard errors, of one measure or of several.

    The error is NaN where one group has almost all of the weight. With few groups it is as much
    wider as the 95 % interval of Student's t is, so that two errors mean the same for any number.
    """

    mean: np.ndarray
    error: np.ndarray


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
    given = rows.weight.astype(float)
    _, size, count = np.unique(rows.size, return_inverse=True, return_counts=True)
    total = np.bincount(size, given)
    per_weight = size_shares(count, total) / np.where(total > 0, total, 1)
    weights: np.ndarray = per_weight[size] * given
    return weights


def assign_blocks(rows: Rows) -> np.ndarray:
    """(rows,) block of each row: whole groups at random, of each size as alike as can be.

    Groups that are alike in size and number of rows are dealt out in turn, so that no block is
    empty before each has one. Sizes are fixed by design, so resamples keep them; the number of
    misranked rows is random.
    """
    group = rows.group_index()
    of_row: np.ndarray = turns(rows.size, group, np.random.default_rng(0))[group] % N_BLOCKS
    return of_row


def turns(size: np.ndarray, group: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(groups,) the turn of each: those alike in size and number of rows follow each other.

    Args:
      size: (rows,) set sizes.
      group: (rows,) group of each, from 0.
      rng: in which order groups that are alike come.
    """
    _, of_size = np.unique(size, return_inverse=True)
    counts = _sums(of_size, group, np.ones(len(group)))
    shuffled = rng.permutation(counts.shape[1])
    turn = np.empty(len(shuffled), np.int64)
    turn[shuffled[np.lexsort(-counts[::-1, shuffled])]] = np.arange(len(turn))
    return turn


def group_weights(rows: Rows) -> np.ndarray:
    """(groups,) adding up to 1: what each group of rows counts for, by `row_weights`."""
    weights: np.ndarray = np.bincount(rows.group_index(), row_weights(rows))
    return weights


def require_groups(rows: Rows) -> None:
    """Raises QualityError if the rows come from too few groups to tell what another would give."""
    count = rows.n_groups()
    if count < MIN_GROUPS:
        raise QualityError(
            f"the rows come from {count} group{'s' * (count != 1)} (prompts), fewer than the "
            f"{MIN_GROUPS} that a fit needs; collect rows of more prompts"
        )


class Strata:
    """Rows by set size and group, to estimate means of several of their measures."""

    def __init__(self, rows: Rows, group: np.ndarray) -> None:
        """Of some rows, and the group of each, (rows,) from 0."""
        _, self._size, self._count = np.unique(rows.size, return_inverse=True, return_counts=True)
        self._group, self._row_weight = group, row_weights(rows)
        self._weight = _sums(self._size, group, self._row_weight)

    def mean(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `mean_and_error`, of (rows,) values with `row_weights`."""
        total = _sums(self._size, self._group, self._row_weight * values)
        return mean_and_error(total, self._weight, self._count)


def estimate_mean(rows: Rows, values: np.ndarray) -> Estimate:
    """The mean of (rows,) values with `row_weights`, and its standard error by group."""
    return widened(*Strata(rows, rows.group_index()).mean(values))


def _sums(size: np.ndarray, group: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(sizes, groups) sums of (rows,) values."""
    shape = size.max(initial=0) + 1, group.max(initial=0) + 1
    sums = np.bincount(size * shape[1] + group, values, shape[0] * shape[1])
    return sums.reshape(shape)


def mean_over_sizes(total: np.ndarray, weight: np.ndarray, rows: np.ndarray) -> Estimate:
    """The mean over set sizes, and its standard error; arguments as of `mean_and_error`."""
    return widened(*mean_and_error(total, weight, rows))


def widened(mean: np.ndarray, error: np.ndarray, n_groups: np.ndarray) -> Estimate:
    """The error as wide as Student's t has it of so many groups; NaN where their spread is unknown.

    Rows without groups are each one of their own.
    """
    known = n_groups >= MIN_EFFECTIVE
    return Estimate(mean, error * widening(np.where(known, n_groups - 1, np.nan)))


def mean_and_error(
    total: np.ndarray, weight: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean over set sizes, by `size_shares`.

    Args:
      total: (sizes, groups, ...) sums of weighted values.
      weight: (sizes, groups) sums of the weights.
      rows: (sizes,) numbers of rows.
    Returns:
      The mean, (...); its standard error, as sizes are fixed by design; the effective number of
      groups, as that many of equal weight tell as much.
    Reference: Liang and Zeger 1986, errors that are robust to dependence within groups.
    """
    of_size = weight.sum(axis=1)
    share = size_shares(rows, of_size)
    total, weight, share, of_size = (x[of_size > 0] for x in (total, weight, share, of_size))
    means = (total.sum(axis=1).T / of_size).T
    mean = np.tensordot(share, means, 1)
    part = weight / of_size[:, None]  # of each group, in its size
    effective = _effective(part)
    alone = effective < MIN_EFFECTIVE
    deviation = (total.T / of_size).T - np.einsum("sg,s...->sg...", part, means)
    scale = share * np.sqrt(np.where(alone, 0, effective / np.where(alone, 1, effective - 1)))
    variance = np.sum(np.tensordot(scale, deviation, 1) ** 2, axis=0)
    # The variance of a single group is estimated by its distance to the mean of all sizes.
    variance += np.tensordot(np.where(alone, share**2, 0), (means - mean) ** 2, 1)
    return mean, np.sqrt(variance), _effective(share @ part)


def _effective(share: np.ndarray) -> np.ndarray:
    """How many groups of equal weight are worth as much as these, of shares that add up to 1."""
    number: np.ndarray = 1 / np.sum(share**2, axis=-1)
    return number
