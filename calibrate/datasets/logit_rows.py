"""Rows of logits: the one record of them, from the arrays that are given to the shards of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from calibrate.storage.npz import pack_arrays

MAX_HEADS = 1 << 15  # layers, and heads of a layer


class OptionalColumn(NamedTuple):
    """A number of each row, which a source may leave out."""

    dtype: str
    most: float
    absent: int = -1  # the number of a row whose source does not name it


OPTIONAL_COLUMNS = {
    "layer": OptionalColumn("<i2", MAX_HEADS - 1),
    "head": OptionalColumn("<i2", MAX_HEADS - 1),
    "weight": OptionalColumn("<f4", float(np.finfo(np.float32).max), 1),
    "group": OptionalColumn("<i8", (1 << 63) - 1),
}


@dataclass(frozen=True, eq=False)
class LogitRows:
    """Rows of n logits each, and what is known of them; None where it is not.

    Arrays that are given may have a mask. Rows of a unit of work have none: they are of one set
    size, real items first. Those that are kept of it have entropy, index and counts; in this order
    the fields are the arrays of a shard.
    """

    logits: np.ndarray  # (rows, n) float32, -inf where masked
    target: np.ndarray  # (rows,) int32, or (rows, n) bool
    mask: Any = None  # (rows, n) bool, True for real items; None: those that are not -inf
    entropy: Any = None  # (rows,) float32, nats
    index: Any = None  # (rows,) int64, rising: of those of the size
    counts: Any = None  # (len(COUNTS),) int64, of all rows of the unit
    layer: Any = None  # (rows,) int16, -1 if unknown
    head: Any = None
    weight: Any = None  # (rows,) float32; None: all weigh 1
    group: Any = None  # (rows,) int64; None: each row is its own

    def columns(self) -> dict[str, np.ndarray]:
        """What there is of each row, by name."""
        return {name: x for name, x in self._arrays().items() if name != "counts"}

    def take(self, rows: np.ndarray) -> Self:
        """Some of the rows, by (rows,) bool or positions; the counts stay those of the unit."""
        return replace(self, **{name: column[rows] for name, column in self.columns().items()})

    def of_heads(self, heads: Sequence[tuple[int, int]]) -> Self:
        """The rows of some heads, if the source names heads."""
        chosen = np.zeros(len(self.target), bool)
        for layer, head in heads:
            chosen |= (self.layer == layer) & (self.head == head)
        return self.take(chosen)

    def real_items(self) -> np.ndarray:
        """(rows, n) bool: the items that are not masked."""
        return np.asarray((self.logits != -np.inf) & (True if self.mask is None else self.mask))

    def pack(self) -> bytes:
        """The bytes of the shard."""
        return pack_arrays(self._arrays())

    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: x for name, x in vars(self).items() if x is not None}


def join_rows(parts: Sequence[LogitRows]) -> LogitRows:
    """The rows of all parts, in order; all have the same columns."""
    if len(parts) == 1:
        return parts[0]
    columns = [part.columns() for part in parts]
    return LogitRows(**{name: np.concatenate([of[name] for of in columns]) for name in columns[0]})


def compact_rows(
    rows: LogitRows, chosen: np.ndarray, size: int, sets_of_targets: bool
) -> LogitRows:
    """Logits and targets of some rows, their real items moved to the front, in `size` columns.

    Targets are masks if there may be several of a row, else positions.
    """
    some = LogitRows(rows.logits, rows.target, rows.mask).take(chosen)
    logits, target, real = some.logits, some.target, some.real_items()
    n = logits.shape[1]
    if target.dtype != bool:
        target = np.arange(n) == target[:, None]
    if n != size or not real.all():
        order = np.argsort(~real, axis=1, kind="stable")[:, :size]
        kept = np.take_along_axis(real, order, axis=1)
        empty = [(0, 0), (0, size - order.shape[1])]
        values = np.where(kept, np.take_along_axis(logits, order, axis=1), -np.inf)
        logits = np.pad(values, empty, constant_values=-np.inf)
        target = np.pad(np.take_along_axis(target, order, axis=1) & kept, empty)
    if not sets_of_targets:
        logits[~target.any(axis=1), 0] = -np.inf  # counts as a row with a masked target
        target = target.argmax(axis=1).astype(np.int32)
    return LogitRows(logits, target)


def at_target(logits: np.ndarray, target: np.ndarray) -> np.ndarray:
    """(rows,) the highest logit of a target; target (rows,) int or (rows, n) bool."""
    if target.ndim == 1:
        return np.take_along_axis(logits, target[:, None], axis=1)[:, 0]
    return np.asarray(logits.max(axis=1, where=target, initial=-np.inf))
