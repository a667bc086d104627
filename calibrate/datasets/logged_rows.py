"""Rows of logits of one set size, in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

Columns = dict[str, np.ndarray]  # arrays by name


@dataclass(frozen=True)
class LoggedRows:
    """Rows of one set size; optional columns may be None where the source does not name them."""

    logits: np.ndarray  # (rows, size) float32, -inf where masked, real items first
    target: np.ndarray  # (rows,) int32, or (rows, size) bool
    layer: Any = None  # (rows,) int16, -1 if unknown
    head: Any = None
    weight: Any = None  # (rows,) float32
    group: Any = None  # (rows,) int64, -1 if unknown

    def columns(self) -> Columns:
        """What there is of each row, by name."""
        return {name: column for name, column in vars(self).items() if column is not None}

    def take(self, rows: np.ndarray) -> Self:
        """Some of the rows, by (rows,) bool or positions."""
        return replace(self, **{name: column[rows] for name, column in self.columns().items()})


def join_rows(parts: Sequence[LoggedRows]) -> LoggedRows:
    """The rows of all parts, in order; all have the same columns."""
    columns = [part.columns() for part in parts]
    return LoggedRows(**{name: np.concatenate([of[name] for of in columns]) for name in columns[0]})
