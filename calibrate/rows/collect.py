"""Collecting: keeps a sample of the rows of a head or of arrays, in a folder or in memory.

1. A plan: the configuration that determines every byte, and the units with their sources.
2. For each unit `make_rows`: read or compute rows, examine them, choose.
3. The shards are written and listed (`resume.run_units`); in memory there is only the manifest.

The shard of a unit does not depend on other units or on the process that makes it. A `HeadSource`
draws the inputs of a unit from a seed of its own and runs a head on them; an `ArraySource` reads
rows of arrays or of files.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.core.masking import warn_of_masks
from calibrate.errors import DamagedError
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress
from calibrate.rows.collection import RowCollection, entry_of_rows, rows_in_memory, shard_name
from calibrate.rows.heads import Head
from calibrate.rows.logits_checks import check_no_probabilities
from calibrate.rows.logits_files import Arrays, RowsOfFiles
from calibrate.rows.manifest import ShardEntry
from calibrate.rows.resume import Plan, Shard, run_units
from calibrate.rows.rows import (
    Examined,
    Rows,
    check_bad_rows,
    examine_rows,
    hashes,
    parse_rows,
    row_bytes,
)
from calibrate.rows.sampling import (
    MAX_KEPT_OF_ALL,
    MAX_ROWS,
    sample_arrays,
    unit_quotas,
)
from calibrate.rows.units import UNIT_SIZES, Unit, UnitSizes, attended_pieces, plan_units, unit_seed

MAX_COLLECTION_BYTES = 10**9  # by default
COLLECT_STREAM = "collect"  # of inputs; `evaluate` draws from another one


@dataclass(frozen=True, eq=False)
class HeadSource:
    """Inputs that are drawn for a head; processes can be sent it."""

    head: Head
    seed: int
    items_per_piece: int
    misranked_only: bool
    quota: int  # rows that the unit keeps at most

    def read(self, unit: Unit) -> Rows:
        """Draws the inputs of a unit and runs the head on them."""
        head = self.head
        logits = np.empty((unit.sets, unit.size), np.float32)
        targets, n_masked = [], 0
        stream, per_piece = COLLECT_STREAM, self.items_per_piece
        for piece in attended_pieces(head, stream, self.seed, unit, per_piece):
            logits[piece.part] = piece.logits
            targets.append(piece.target)
            n_masked += piece.n_masked
        if unit.number == 0:
            warn_of_masks(f"head {head.name!r}: attend gave", n_masked)
        check_no_probabilities(logits, f"head {head.name!r}: attend gave")
        target = np.concatenate(targets)
        return Rows(logits, target.astype(np.int32) if target.ndim == 1 else target)

    def choose(self, unit: Unit, examined: Examined) -> np.ndarray:
        """Positions of the rows that are kept: those with the lowest hashes of their index."""
        rows = np.flatnonzero(examined.misranked if self.misranked_only else examined.good)
        lowest = np.argsort(hashes(rows + unit.first), kind="stable")[: self.quota]
        return rows[np.sort(lowest)]


@dataclass(frozen=True, eq=False)
class ArraySource:
    """The rows of one unit in arrays or files; processes can be sent it."""

    files: RowsOfFiles
    sampled: np.ndarray  # (rows,) bool, the rows of a sample of all

    def read(self, unit: Unit) -> Rows:
        """Reads the rows of the unit."""
        return self.files.read()

    def choose(self, unit: Unit, examined: Examined) -> np.ndarray:
        """Positions of the rows that are kept: the good ones of the sample."""
        return np.flatnonzero(self.sampled & examined.good)


def make_rows(source: HeadSource | ArraySource, unit: Unit) -> Rows:
    """The rows that a collection keeps of a unit."""
    rows = source.read(unit)
    examined = examine_rows(rows)
    kept = source.choose(unit, examined)
    return replace(
        rows.take(kept),
        entropy=examined.entropy[kept],
        index=kept + unit.first,
        counts=examined.counts,
    )


def _pack_shard(source: HeadSource | ArraySource, unit: Unit) -> tuple[bytes, ShardEntry]:
    """The bytes of a unit's shard, and its entry in the manifest."""
    rows = make_rows(source, unit)
    data = rows.pack()
    return data, entry_of_rows(unit.size, unit.number, rows, data)


def _read_entry(unit: Unit, data: bytes, path: Path) -> ShardEntry:
    """The entry of a unit's shard that no manifest lists yet; DamagedError if it is another's."""
    rows = parse_rows(data, path)
    if rows.logits.shape[1] != unit.size:
        raise DamagedError(f"{path} holds rows of {rows.logits.shape[1]} items, not {unit.size}")
    return entry_of_rows(unit.size, unit.number, rows, data)


# The configuration of a collection, and its units of work with their sources.
CollectionPlan = tuple[dict[str, Any], list[tuple[HeadSource | ArraySource, Unit]]]


def collect_from_head(
    head: Head,
    sizes: Sequence[int],
    sets: int,
    seed: int,
    folder: Path | None = None,
    max_bytes: int = MAX_COLLECTION_BYTES,
    progress: Progress = SILENT,
    keep: str = "all",
    jobs: Jobs = ONE_PROCESS,
    *,
    unit_sizes: UnitSizes = UNIT_SIZES,
) -> RowCollection:
    """Runs a head on inputs of every size and keeps a sample of the rows, or the misranked ones.

    The same call resumes an interrupted collection, and returns a finished one unchanged. The same
    configuration gives the same bytes on one machine, whatever the jobs.

    Args:
      head: one of `load_head` is loaded by workers; other heads are sent to them.
      sizes: numbers of items n.
      sets: number of inputs of each size.
      seed: of the inputs.
      folder: of the collection, new or existing; None keeps it in memory, with the same digest.
      max_bytes: of the folder; each unit of work keeps the rows with the lowest hashes.
      progress: advances after each unit of a folder, by its number of items.
      keep: "all", at most MAX_KEPT_OF_ALL good rows of each size; or "misranked".
      jobs: processes or cluster that make the shards of a folder.
      unit_sizes: amount of work of a unit; another value makes another collection.
    Raises:
      CalibrateError: another configuration is in `folder`, or it cannot be written, or a worker
        died.
      QualityError: more than 1 % of the rows are bad (NaN, +inf, or a masked target).
    """
    plan = _plan_head(head, sizes, sets, seed, max_bytes, keep, unit_sizes)
    return _collect(plan, folder, progress, jobs)


def collect_arrays(
    arrays: Arrays,
    folder: Path | None = None,
    max_bytes: int = MAX_COLLECTION_BYTES,
    progress: Progress = SILENT,
    keep: str = "all",
    jobs: Jobs = ONE_PROCESS,
    *,
    max_rows: int = MAX_ROWS,
) -> RowCollection:
    """Keeps the rows of arrays in a folder, or in memory; see `collect_from_head`.

    If there are more rows than `max_rows`, or than fit in max_bytes, a random sample of each size
    and head is kept.
    """
    return _collect(_plan_arrays(arrays, max_bytes, keep, max_rows), folder, progress, jobs)


def _collect(
    plan: CollectionPlan, folder: Path | None, progress: Progress, jobs: Jobs
) -> RowCollection:
    """Makes all shards, in a folder resumably, or in memory."""
    configuration, units = plan
    if folder is None:
        made = [(unit.size, unit.number, make_rows(source, unit)) for source, unit in units]
        collection = rows_in_memory(configuration["head"], configuration, made)
    else:
        shards = [
            Shard(
                shard_name(unit.size, unit.number),
                partial(_pack_shard, source, unit),
                partial(_read_entry, unit),
                unit.size * unit.sets,
            )
            for source, unit in units
        ]
        contents = Plan("collecting", RowCollection, configuration, shards)
        collection = run_units(Path(folder), contents, jobs, progress)
    check_bad_rows(collection.manifest)
    return collection


def _plan_head(
    head: Head,
    sizes: Sequence[int],
    sets: int,
    seed: int,
    max_bytes: int,
    keep: str,
    unit_sizes: UnitSizes,
) -> CollectionPlan:
    """Plans the collection of a head; see `collect_from_head`."""
    sizes = sorted(set(sizes))
    configuration = {
        "head": head.name,
        "fingerprint": head.fingerprint,
        "sizes": sizes,
        "sets": sets,
        "seed": seed,
    }
    if hasattr(head, "trained_up_to"):
        configuration["trained_up_to"] = int(head.trained_up_to)
    units = [unit for size in sizes for unit in plan_units(size, sets, unit_sizes)]
    first = units[0]  # its targets are positions or masks, as those of every unit
    batch = head.sample(unit_seed(COLLECT_STREAM, seed, first), first.size, first.sets)
    sets_of_targets = np.ndim(batch.target) > 1
    bytes_of_row = {size: row_bytes(size, sets_of_targets) for size in sizes}
    quotas = unit_quotas(units, keep, max_bytes, bytes_of_row)
    per_piece, misranked_only = unit_sizes.items_per_piece, keep != "all"
    sources = [HeadSource(head, seed, per_piece, misranked_only, quotas[unit]) for unit in units]
    configuration = _with_limits(configuration, max_bytes, keep)
    return configuration, list(zip(sources, units, strict=True))


def _plan_arrays(arrays: Arrays, max_bytes: int, keep: str, max_rows: int) -> CollectionPlan:
    """Plans the collection of arrays; see `collect_arrays`."""
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
    most_without_sampling = MAX_KEPT_OF_ALL * len(arrays.heads)
    if keep == "all" and max(map(arrays.count, arrays.sizes)) > most_without_sampling:
        configuration["max_rows"] = max_rows
    sampled, sample = sample_arrays(arrays, len(units), max_bytes, keep, max_rows)
    sources = [
        ArraySource(
            sample.locate_rows(unit.size, unit.first, unit.sets),
            sampled[arrays.places(unit.size, unit.first, unit.sets)],
        )
        for unit in units
    ]
    configuration = _with_limits(configuration, max_bytes, keep)
    return configuration, list(zip(sources, units, strict=True))


def _with_limits(configuration: dict[str, Any], max_bytes: int, keep: str) -> dict[str, Any]:
    """The configuration with the limits of the collection; "misranked" is not recorded."""
    kept = {} if keep == "misranked" else {"keep": keep}
    return {**configuration, "max_bytes": max_bytes, **kept}
