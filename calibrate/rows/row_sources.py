"""Sources of rows: the sets that are drawn for a head, or arrays, unit of work by unit of work."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from calibrate.core.masking import warn_of_masks
from calibrate.datasets.logit_rows import LogitRows
from calibrate.datasets.logits_checks import check_no_probabilities, in_float32
from calibrate.datasets.logits_files import Arrays
from calibrate.datasets.manifest import Entry
from calibrate.datasets.read_logits_file import RowsOfFiles
from calibrate.datasets.resume import Shard
from calibrate.datasets.row_collection import (
    check_unit,
    entry_of_rows,
    most_bytes,
    row_bytes,
    shard_name,
)
from calibrate.rows.heads import Head, HeadReference, call, received, to_send
from calibrate.rows.kept_rows import (
    MAX_KEPT_OF_ALL,
    examine,
    lowest_hashes,
    rows_of_units,
    sample_arrays,
    take_kept,
)
from calibrate.rows.work_units import (
    UNIT_SIZES,
    Unit,
    UnitSizes,
    attended_pieces,
    one_ahead,
    plan_units,
    unit_seed,
)

STREAM = "collect"  # of sets that are drawn


@dataclass(frozen=True, eq=False)
class HeadUnit:
    """A unit of the sets that are drawn for a head, whose rows another process can make."""

    unit: Unit
    head: Head | HeadReference
    seed: int
    items_per_piece: int
    keep: str
    most: int  # rows that are kept

    def make_rows(self) -> LogitRows:
        """Runs the head over the sets; the rows with the lowest hashes are kept."""
        rows = _rows_of_head(received(self.head), self.seed, self.unit, self.items_per_piece)
        examined = examine(rows.logits, rows.target)
        candidates = np.flatnonzero(examined.good if self.keep == "all" else examined.misranked)
        kept = lowest_hashes(candidates, self.unit.first, self.most)
        return take_kept(rows, examined, kept, self.unit.first)


@dataclass(frozen=True, eq=False)
class ArrayUnit:
    """A unit of the rows of arrays, which another process can read."""

    unit: Unit
    of_files: RowsOfFiles
    kept: np.ndarray  # (rows,) bool

    def make_rows(self) -> LogitRows:
        """Reads the rows, and keeps those that were chosen."""
        rows = self.of_files.read()
        examined = examine(rows.logits, rows.target)
        kept = np.flatnonzero(self.kept & examined.good)
        return take_kept(rows, examined, kept, self.unit.first)


@dataclass(frozen=True)
class RowSource:
    """The source of rows, unit by unit, and the configuration that determines them."""

    shown: str  # what it is called in messages
    configuration: dict[str, Any]
    units: Sequence[HeadUnit | ArrayUnit]
    has_mask: bool = False  # whether arrays say which items are masked

    def shards(self) -> list[Shard]:
        """The shards of a collection, one a unit."""
        return [_shard_of(unit_rows) for unit_rows in self.units]

    def difference(
        self, recorded: dict[str, Any]
    ) -> tuple[list[str], dict[str, Any], dict[str, Any]] | None:
        """The differences of another configuration; see `Plan`."""
        older = {"keep": "misranked"}  # of collections from before these keys
        older |= {key: x for key, x in self.configuration.items() if key == "of"}
        recorded, given = (older | c for c in (recorded, self.configuration))
        if recorded == given:
            return None
        same_name = recorded["head"] == given["head"]
        digests = recorded.pop("fingerprint"), given.pop("fingerprint")
        changed = [self.shown] if same_name and len({*digests}) > 1 else []
        return changed, recorded, given


def _shard_of(unit_rows: HeadUnit | ArrayUnit) -> Shard:
    unit = unit_rows.unit
    sets = range(unit.first, unit.first + unit.sets)
    return Shard(
        shard_name(unit.size, unit.number),
        most_bytes(unit.size, unit.sets),
        partial(check_unit, unit.size, unit.number, sets),
        partial(_pack_unit, unit_rows),
        [unit.size * unit.sets],
    )


def _pack_unit(unit_rows: HeadUnit | ArrayUnit) -> tuple[bytes, Entry]:
    rows, unit = unit_rows.make_rows(), unit_rows.unit
    data = rows.pack()
    return data, entry_of_rows(unit.size, unit.number, rows, data)


def source_of_head(
    head: Head,
    sizes: Sequence[int],
    sets: int,
    seed: int,
    max_bytes: int,
    keep: str,
    unit_sizes: UnitSizes = UNIT_SIZES,
    max_kept: int = MAX_KEPT_OF_ALL,
) -> RowSource:
    """The source of the sets that are drawn for a head."""
    n = sorted(set(sizes))
    configuration = {
        "head": head.name,
        "fingerprint": head.fingerprint,
        "sizes": n,
        "sets": sets,
        "seed": seed,
    }
    if hasattr(head, "trained_up_to"):
        configuration["trained_up_to"] = int(head.trained_up_to)
    units = [unit for size in n for unit in plan_units(size, sets, unit_sizes)]
    first = units[0]  # shows whether the targets of this head are masks
    batch = call(head, "sample", unit_seed(STREAM, seed, first), first.size, first.sets)
    masks = np.asarray(getattr(batch, "target", None)).ndim > 1
    bytes_of_row = {size: row_bytes(size, masks) for size in n}
    most = rows_of_units(units, keep, max_bytes, bytes_of_row, max_kept)

    sent, per_piece = to_send(head), unit_sizes.items_per_piece
    of_units = [HeadUnit(unit, sent, seed, per_piece, keep, most[unit]) for unit in units]
    configuration = _with_limits(configuration, max_bytes, keep)
    return RowSource(f"head {head.name}", configuration, of_units)


def _rows_of_head(head: Head, seed: int, unit: Unit, items_per_piece: int) -> LogitRows:
    """The logits that a head computes for a unit of sets."""
    logits = np.empty((unit.sets, unit.size), np.float32)
    targets, n_masks = [], 0
    pieces = attended_pieces(head, STREAM, seed, unit, items_per_piece)
    for part, batch, attended in one_ahead(pieces):
        logits[part], of_part = in_float32(np.asarray(attended.logits))
        targets.append(np.asarray(batch.target))
        n_masks += of_part
    if unit.number == 0:
        warn_of_masks(f"head {head.name!r}: attend gave", n_masks)
    check_no_probabilities(logits, f"head {head.name!r}: attend gave")
    target = np.concatenate(targets)
    return LogitRows(logits, target.astype(np.int32) if target.ndim == 1 else target)


def source_of_arrays(arrays: Arrays, max_bytes: int, keep: str, max_rows: int) -> RowSource:
    """The source of rows on disk."""
    units = [unit for size in arrays.sizes for unit in plan_units(size, arrays.count(size))]
    configuration: dict[str, Any] = {
        "head": arrays.name,
        "fingerprint": arrays.fingerprint,
        "sizes": arrays.sizes,
        "sets": sum(map(arrays.count, arrays.sizes)),
        "seed": 0,
        "of": "logits",
    }
    if "layer" in arrays.columns:
        configuration["heads"] = [list(head) for head in arrays.heads]
    most_before = MAX_KEPT_OF_ALL * len(arrays.heads)
    if keep == "all" and max(map(arrays.count, arrays.sizes)) > most_before:
        configuration["max_rows"] = max_rows  # collections of before, of fewer rows, are the same
    kept, sample = sample_arrays(arrays, len(units), max_bytes, keep, max_rows)

    of_units = [
        ArrayUnit(
            unit,
            sample.of_files(unit.size, unit.first, unit.sets),
            kept[arrays.places(unit.size, unit.first, unit.sets)],
        )
        for unit in units
    ]
    configuration = _with_limits(configuration, max_bytes, keep)
    return RowSource(arrays.shown, configuration, of_units, arrays.has_mask)


def _with_limits(configuration: dict[str, Any], max_bytes: int, keep: str) -> dict[str, Any]:
    given = {} if keep == "misranked" else {"keep": keep}  # absent from before the option
    return {**configuration, "max_bytes": max_bytes, **given}
