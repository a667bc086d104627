"""Sources of rows: the sets that are drawn for a head, or arrays, unit of work by unit of work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from calibrate.core.masking import warn_of_masks
from calibrate.datasets.logit_rows import LogitRows
from calibrate.datasets.logits_checks import check_no_probabilities, in_float32
from calibrate.datasets.logits_files import Arrays
from calibrate.datasets.manifest import Entry
from calibrate.datasets.resume import Shard
from calibrate.datasets.row_collection import (
    check_unit,
    entry_of_rows,
    most_bytes,
    row_bytes,
    shard_name,
)
from calibrate.rows.heads import Head, call, head_loader
from calibrate.rows.kept_rows import (
    MAX_KEPT_OF_ALL,
    Choose,
    keep_rows,
    lowest_hashes,
    rows_of_units,
    sample_arrays,
    sampled_rows,
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


@dataclass(frozen=True)
class RowSource:
    """The source of rows, unit by unit, and the configuration that determines them."""

    shown: str  # what it is called in messages
    configuration: dict[str, Any]
    units: list[Unit]
    reader_of: Callable[[Unit], Callable[[], LogitRows]]  # other processes can run the reader
    choose: Callable[[Unit], Choose]  # likewise
    has_mask: bool = False  # whether arrays say which items are masked

    def keep(self, unit: Unit) -> Callable[[], LogitRows]:
        """Reads and samples a unit; another process can call it."""
        return partial(keep_rows, self.reader_of(unit), unit, self.choose(unit))

    def shard(self, unit: Unit) -> Shard:
        """The shard of a unit."""
        sets = range(unit.first, unit.first + unit.sets)
        return Shard(
            shard_name(unit.size, unit.number),
            most_bytes(unit.size, unit.sets),
            partial(check_unit, unit.size, unit.number, sets),
            partial(_pack_unit, unit, self.keep(unit)),
            [unit.size * unit.sets],
        )

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


def _pack_unit(unit: Unit, keep: Callable[[], LogitRows]) -> tuple[bytes, Entry]:
    rows = keep()
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
    load_head = head_loader(head)
    bytes_of_row = {size: row_bytes(size, masks) for size in n}
    most = rows_of_units(units, keep, max_bytes, bytes_of_row, max_kept)

    def reader_of(unit: Unit) -> Callable[[], LogitRows]:
        return partial(_rows_of_head, load_head, seed, unit, unit_sizes.items_per_piece)

    def choose(unit: Unit) -> Choose:
        return partial(lowest_hashes, unit.first, most[unit], keep)

    configuration = _with_limits(configuration, max_bytes, keep)
    return RowSource(f"head {head.name}", configuration, units, reader_of, choose)


def _rows_of_head(
    load_head: Callable[[], Head], seed: int, unit: Unit, items_per_piece: int
) -> LogitRows:
    """The logits that a head computes for a unit of sets."""
    head = load_head()
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
        **arrays.split,
    }
    if "layer" in arrays.columns:
        configuration["heads"] = [list(head) for head in arrays.heads]
    most_before = MAX_KEPT_OF_ALL * len(arrays.heads)
    if keep == "all" and max(map(arrays.count, arrays.sizes)) > most_before:
        configuration["max_rows"] = max_rows  # collections of before, of fewer rows, are the same
    kept, sample = sample_arrays(arrays, len(units), max_bytes, keep, max_rows)

    def reader_of(unit: Unit) -> Callable[[], LogitRows]:
        return sample.reader(unit.size, unit.first, unit.sets)

    def choose(unit: Unit) -> Choose:
        return partial(sampled_rows, kept[arrays.places(unit.size, unit.first, unit.sets)])

    configuration = _with_limits(configuration, max_bytes, keep)
    return RowSource(arrays.shown, configuration, units, reader_of, choose, arrays.has_mask)


def _with_limits(configuration: dict[str, Any], max_bytes: int, keep: str) -> dict[str, Any]:
    given = {} if keep == "misranked" else {"keep": keep}  # absent from before the option
    return {**configuration, "max_bytes": max_bytes, **given}
