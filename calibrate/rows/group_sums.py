"""Sums of scores by group of rows, for errors that allow for rows of one prompt being alike."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from calibrate.rows.weighting import N_BLOCKS, Estimate, mean_over_sizes


class GroupSums(NamedTuple):
    """Of the rows of one set size, by block of whole groups and head."""

    total: np.ndarray  # (N_BLOCKS, heads, ...) weighted values
    weight: np.ndarray  # (N_BLOCKS, heads)

    @classmethod
    def of_none(cls, n_heads: int, shape: tuple[int, ...]) -> "GroupSums":
        """Of no rows yet; `shape` is that of a row's values."""
        return cls(np.zeros((N_BLOCKS, n_heads, *shape)), np.zeros((N_BLOCKS, n_heads)))

    def add(
        self, values: np.ndarray, block: np.ndarray, head: np.ndarray, weight: np.ndarray
    ) -> None:
        """Adds rows: values (rows, ...), and their block, head and weight, (rows,)."""
        n_heads = self.weight.shape[1]
        cells, cell = np.unique(block * n_heads + head, return_inverse=True)
        place = np.divmod(cells, n_heads)
        columns = values.reshape(len(values), math.prod(values.shape[1:])).T
        sums = np.stack([np.bincount(cell, weight * column) for column in columns], axis=1)
        self.total[place] += sums.reshape(len(cells), *values.shape[1:])
        self.weight[place] += np.bincount(cell, weight)


def blocks_of(groups: np.ndarray) -> np.ndarray:
    """(groups,) block of each group, at random, and no block empty before each has one."""
    return np.random.default_rng(0).permutation(len(groups)) % N_BLOCKS


def estimate(sizes: Sequence[GroupSums], heads: slice, rows: np.ndarray) -> Estimate:
    """Means over set sizes of some heads, and errors by group; (sizes,) numbers of rows."""
    total = np.stack([sums.total[:, heads].sum(axis=1) for sums in sizes])
    weight = np.stack([sums.weight[:, heads].sum(axis=1) for sums in sizes])
    return mean_over_sizes(total, weight, rows)
