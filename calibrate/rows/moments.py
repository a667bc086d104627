"""Moments: weighted means of rows in cells and their errors, from sums that can be merged."""

import math
from typing import NamedTuple

import numpy as np


class Moments(NamedTuple):
    """Sums over the rows of each cell, for its weighted mean and the error of that mean."""

    rows: np.ndarray  # (cells,)
    weight: np.ndarray  # (cells,): sum of the weights
    squared: np.ndarray  # (cells,): sum of the squared weights
    mean: np.ndarray  # (cells, ...)
    centre: np.ndarray  # (cells, ...): mean weighted by the squared weights
    squares: np.ndarray  # (cells, ...): squared deviations from `centre`, so weighted

    @classmethod
    def of(
        cls, values: np.ndarray, cell: np.ndarray, n_cells: int, weight: np.ndarray | None = None
    ) -> "Moments":
        """Moments of values (rows, ...) in their cells; rows have equal weight if it is None."""
        weight = np.ones(len(cell)) if weight is None else weight.astype(float)
        square = weight**2
        flat = values.reshape(len(values), math.prod(values.shape[1:]))

        def total(factor: np.ndarray, flat: np.ndarray) -> np.ndarray:
            columns = [np.bincount(cell, factor * column, n_cells) for column in flat.T]
            return np.stack(columns, axis=1)

        in_cell, squared = (np.bincount(cell, factor, n_cells) for factor in (weight, square))
        mean = total(weight, flat) / _nonzero(in_cell)[:, None]
        centre = total(square, flat) / _nonzero(squared)[:, None]
        squares = total(square, (flat - centre[cell]) ** 2)
        shaped = (x.reshape(n_cells, *values.shape[1:]) for x in (mean, centre, squares))
        return cls(np.bincount(cell, minlength=n_cells), in_cell, squared, *shaped)

    def merge(self, other: "Moments") -> "Moments":
        """Moments of the rows of both, cell by cell."""
        return Moments(*map(np.stack, zip(self, other, strict=True))).pool()

    def pool(self) -> "Moments":
        """Moments of the rows of all cells, without cancellation (Chan, Golub and LeVeque)."""
        if len(self.rows) == 1:
            return Moments(*(x[0] for x in self))
        mean, _ = _join_means(self.weight, self.mean)
        centre, between = _join_means(self.squared, self.centre)
        rows, weight, squared, squares = (
            x.sum(axis=0) for x in (self.rows, self.weight, self.squared, self.squares)
        )
        return Moments(rows, weight, squared, mean, centre, squares + between)


def _join_means(weight: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The joint mean along the first axis, and the squared deviations of the means from it."""
    weight = expand_axes(weight, mean.ndim)
    joint = np.sum(weight / _nonzero(weight.sum(axis=0)) * mean, axis=0)
    return joint, np.sum(weight * (mean - joint) ** 2, axis=0)


def expand_axes(array: np.ndarray, ndim: int) -> np.ndarray:
    """An array with trailing axes of length 1, `ndim` axes in all."""
    return array.reshape(array.shape + (1,) * (ndim - array.ndim))


def _nonzero(weight: np.ndarray) -> np.ndarray:
    """The weight as a divisor: 1 where it is 0."""
    return np.where(weight > 0, weight, 1.0)
