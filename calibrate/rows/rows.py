"""Rows of logits: the record, the counts of bad rows, and the shard, its file format.

A shard is an npz file with the rows that a collection keeps of one unit of work, all of one set
size n: `logits` (rows, n) float32; `target` (rows,) int32, or (rows, n) bool if several items of a
row may win; `entropy` (rows,) float32; `index` (rows,) int64, the number of the row among those of
its size; and `counts`, int64, of all rows of the unit in the order of COUNTS. The columns of
OPTIONAL_COLUMNS are present if the source has them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from calibrate.core.row_batches import row_entropy
from calibrate.defaults import MAX_BETA
from calibrate.errors import DamagedError, QualityError
from calibrate.evidence.estimate import per_cent
from calibrate.storage.npz import pack_arrays, parse_arrays

MAX_HEAD_INDEX = (1 << 15) - 1  # of a layer, and of a head in its layer
HeadIndices = list[tuple[int, int]]  # (layer, head) of each head, -1 where unknown

BAD = ("nan", "inf", "masked_target")  # reasons why a row cannot be used
COUNTS = ("rows", "misranked", "ties", *BAD)
MAX_BAD_SHARE = 0.01


class OptionalColumn(NamedTuple):
    """The type and range of a column that a source may leave out."""

    dtype: str
    most: float
    absent: int = -1  # stands for an unknown value


OPTIONAL_COLUMNS = {
    "layer": OptionalColumn("<i2", MAX_HEAD_INDEX),
    "head": OptionalColumn("<i2", MAX_HEAD_INDEX),
    "weight": OptionalColumn("<f4", float(np.finfo(np.float32).max), 1),
    "group": OptionalColumn("<i8", (1 << 63) - 1),
}


@dataclass(frozen=True, eq=False, repr=False)
class Rows:
    """Rows of n logits each, with their targets; None stands for an unknown column.

    Arrays that a user gives may have a mask. The rows of a unit of work have none: they are of one
    set size, with the unmasked items first. Rows that a collection keeps have entropy, index and
    counts as well. The order of the fields is the order of the arrays in a shard.
    """

    logits: np.ndarray  # (rows, n) float32, -inf where masked
    target: np.ndarray  # (rows,) int32, or (rows, n) bool
    mask: Any = None  # (rows, n) bool, True for real items; None: all that are not -inf
    entropy: Any = None  # (rows,) float32, nats
    index: Any = None  # (rows,) int64, increasing
    counts: Any = None  # (len(COUNTS),) int64, of all rows of the unit
    layer: Any = None  # (rows,) int16, -1 if unknown
    head: Any = None
    weight: Any = None  # (rows,) float32; None: all are 1
    group: Any = None  # (rows,) int64; None: each row is its own group

    def __repr__(self) -> str:
        """Numbers of rows and items, and the names of the columns."""
        n_rows, n = self.logits.shape
        return f"Rows: {n_rows:,} of {n:,} items, with {', '.join(self._arrays())}"

    def columns(self) -> dict[str, np.ndarray]:
        """The arrays with an entry for each row, by name."""
        return {name: array for name, array in self._arrays().items() if name != "counts"}

    def take(self, rows: np.ndarray) -> Self:
        """Some of the rows, by (rows,) bool or positions; the counts stay those of the unit."""
        return replace(self, **{name: column[rows] for name, column in self.columns().items()})

    def select_heads(self, heads: HeadIndices) -> Self:
        """The rows of some heads; the rows must name their heads."""
        chosen = np.zeros(len(self.target), bool)
        for layer, head in heads:
            chosen |= (self.layer == layer) & (self.head == head)
        return self.take(chosen)

    def real_items(self) -> np.ndarray:
        """(rows, n) bool, True for items that are not masked."""
        return np.asarray((self.logits != -np.inf) & (True if self.mask is None else self.mask))

    def pack(self) -> bytes:
        """The bytes of the shard."""
        return pack_arrays(self._arrays())

    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: array for name, array in vars(self).items() if array is not None}


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Concatenates rows, which must have the same columns."""
    if len(parts) == 1:
        return parts[0]
    columns = [part.columns() for part in parts]
    joined = {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}
    return Rows(**joined)


def compact_rows(rows: Rows, chosen: np.ndarray, size: int, sets_of_targets: bool) -> Rows:
    """Moves the unmasked items of the chosen rows to the front, in `size` columns.

    Args:
      rows: as given by a user.
      chosen: (rows,) bool or positions.
      size: number of columns of the result.
      sets_of_targets: targets of the result are (rows, size) bool; otherwise positions.
    """
    some = Rows(rows.logits, rows.target, rows.mask).take(chosen)
    logits, target, real = some.logits, some.target, some.real_items()
    n = logits.shape[1]
    if target.dtype != bool:
        target = np.arange(n) == target[:, None]
    if n != size or not real.all():
        order = np.argsort(~real, axis=1, kind="stable")[:, :size]
        kept = np.take_along_axis(real, order, axis=1)
        padding = [(0, 0), (0, size - order.shape[1])]
        values = np.where(kept, np.take_along_axis(logits, order, axis=1), -np.inf)
        logits = np.pad(values, padding, constant_values=-np.inf)
        target = np.pad(np.take_along_axis(target, order, axis=1) & kept, padding)
    if not sets_of_targets:
        logits[~target.any(axis=1), 0] = -np.inf  # counts as a row with a masked target
        target = target.argmax(axis=1).astype(np.int32)
    return Rows(logits, target)


def target_logit(logits: np.ndarray, target: np.ndarray) -> np.ndarray:
    """(rows,) logit of the target, the highest of several; target (rows,) int or (rows, n) bool."""
    if target.ndim == 1:
        return np.take_along_axis(logits, target[:, None], axis=1)[:, 0]
    return np.asarray(logits.max(axis=1, where=target, initial=-np.inf))


class Examined(NamedTuple):
    """Quality and entropy of the rows of a unit; (rows,) each, but the counts."""

    good: np.ndarray  # bool; bad rows have NaN, +inf, or a masked target
    misranked: np.ndarray  # bool
    entropy: np.ndarray  # float32, nats
    counts: np.ndarray  # (len(COUNTS),) int64


def examine_rows(rows: Rows) -> Examined:
    """Finds bad and misranked rows, counts them, and computes entropies."""
    logits, target = rows.logits, rows.target
    of_target = target_logit(logits, target)
    n_targets: Any = 1
    if target.ndim > 1:
        n_targets = np.sum(target & (logits == of_target[:, None]), axis=1)
    highest = np.max(logits, axis=1)  # NaN if an item is
    bad = find_bad(highest, of_target)
    good = ~np.any(bad, axis=0)
    misranked = good & (highest > of_target)
    ties = good & ~misranked & (np.sum(logits == of_target[:, None], axis=1) > n_targets)
    counts = [mask.sum() for mask in (np.ones_like(good), misranked, ties, *bad)]
    return Examined(good, misranked, row_entropy(logits), np.array(counts, np.int64))


class UnusableRowsError(QualityError):
    """Too many rows have NaN, +inf or a masked target, or no row has a weight."""


def find_bad(highest: np.ndarray, of_target: np.ndarray) -> list[np.ndarray]:
    """(rows,) bool for each reason of BAD, from the highest logit and the logit of the target."""
    nan, inf = np.isnan(highest), highest == np.inf
    # A target counts as masked, too, if the largest beta overflows on its distance.
    with np.errstate(invalid="ignore", over="ignore"):
        unreachable = ~np.isfinite((highest - of_target) * np.float32(MAX_BETA))
    return [nan, inf, unreachable & ~nan & ~inf]


def count_bad(counts: Mapping[str, int]) -> int:
    """The number of bad rows, from counts by the names of COUNTS."""
    return sum(counts[reason] for reason in BAD)


def share_misranked(counts: Mapping[str, int]) -> float:
    """The share of misranked rows among the good ones; 0 if all rows are bad."""
    return counts["misranked"] / max(1, counts["rows"] - count_bad(counts))


def check_bad_rows(manifest: Mapping[str, Any]) -> None:
    """Raises UnusableRowsError if more than 1 % of a collection's rows are bad.

    Args:
      manifest: with the counts of COUNTS for each size, as `sizes`.
    """
    totals = {name: sum(size[name] for size in manifest["sizes"]) for name in ("rows", *BAD)}
    bad = {name: totals[name] for name in BAD if totals[name]}
    if sum(bad.values()) > MAX_BAD_SHARE * totals["rows"]:
        reasons = ", ".join(f"{count} {name}" for name, count in bad.items())
        raise UnusableRowsError(
            f"{sum(bad.values()):,} of {totals['rows']:,} rows are bad ({reasons}), more than "
            f"{per_cent(MAX_BAD_SHARE, 0)}; a target must be a real item with a finite logit (is a "
            "mask, True for real items, inverted?), and padding must be masked, or -inf"
        )


def row_bytes(size: int, sets_of_targets: bool = False, columns: Collection[str] = ()) -> int:
    """Bytes of one kept row of `size` items with these optional columns."""
    optional = sum(np.dtype(OPTIONAL_COLUMNS[name].dtype).itemsize for name in columns)
    return 4 * size + (size if sets_of_targets else 4) + 4 + 8 + optional


def parse_rows(data: bytes, path: Path) -> Rows:
    """Reads the rows from the bytes of a shard; DamagedError if they are not such a file."""
    try:
        return Rows(**parse_arrays(data, path))
    except TypeError as failure:  # another array, or one too few
        raise DamagedError(f"{path} does not hold the arrays of a shard; delete it") from failure


def hashes(index: np.ndarray) -> np.ndarray:
    """uint64 hashes of integers >= 0 by SplitMix64's finaliser: every bit depends on every bit.

    A sample of the rows with the lowest hashes does not depend on the order of the work.
    """
    x = np.asarray(index).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def known_index(index: int) -> int | None:
    """The number of a layer or a head; None if it is unknown (-1)."""
    return None if index < 0 else int(index)


def head_label(layer: int | None, head: int | None) -> str:
    """A text such as "layer 2, head 5", with the numbers that are known; "" if none is."""
    numbers = (("layer", layer), ("head", head))
    return ", ".join(f"{word} {number}" for word, number in numbers if number is not None)
