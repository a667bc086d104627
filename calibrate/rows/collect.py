"""Collecting: keeps a sample of the rows of a head or of arrays, in a folder or in memory.

1. A plan: the configuration that determines every byte, and the units with their sources.
2. For each unit `make_shard`: read or compute rows, examine them, choose, write.
3. The manifest lists the shards (`resume.run_units`); in memory there is only the manifest.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress
from calibrate.rows.collection import RowCollection, rows_in_memory, shard_name
from calibrate.rows.heads import Head, head_to_send
from calibrate.rows.logits_files import Arrays
from calibrate.rows.make_shard import (
    COLLECT_STREAM,
    ArraySource,
    HeadSource,
    make_rows,
    make_shard,
    read_shard_entry,
)
from calibrate.rows.resume import Plan, Shard, run_units
from calibrate.rows.rows import check_bad_rows, row_bytes
from calibrate.rows.sampling import MAX_KEPT_OF_ALL, MAX_ROWS, sample_arrays, unit_quotas
from calibrate.rows.units import UNIT_SIZES, Unit, UnitSizes, plan_units, unit_seed

MAX_COLLECTION_BYTES = 10**9  # by default


# The configuration of a collection, and its units of work with their sources.
CollectionPlan = tuple[dict[str, Any], list[tuple[HeadSource | ArraySource, Unit]]]


def collect_from_head(
    head: Head,
    sizes: Sequence[int],
    sets: int,
    seed: int,
    folder: Path,
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
      head: workers load it by the reference that `load_head` was given; other heads are sent to
        them.
      sizes: numbers of items n.
      sets: number of inputs of each size.
      seed: of the inputs.
      folder: of the collection, new or existing.
      max_bytes: of the folder; each unit of work keeps the rows with the lowest hashes.
      progress: advances after each unit, by its number of items.
      keep: "all", at most MAX_KEPT_OF_ALL good rows of each size; or "misranked".
      jobs: processes or cluster that run the units; each unit writes its own shard.
      unit_sizes: amount of work of a unit; another value makes another collection.
    Raises:
      CalibrateError: another configuration is in `folder`, or it cannot be written, or a worker
        died or stalled.
      QualityError: more than 1 % of the rows are bad (NaN, +inf, or a masked target).
    """
    plan = plan_head(head, sizes, sets, seed, max_bytes, keep, unit_sizes)
    return _write_collection(plan, Path(folder), progress, jobs)


def collect_arrays(
    arrays: Arrays,
    folder: Path,
    max_bytes: int = MAX_COLLECTION_BYTES,
    progress: Progress = SILENT,
    keep: str = "all",
    jobs: Jobs = ONE_PROCESS,
    *,
    max_rows: int = MAX_ROWS,
) -> RowCollection:
    """Keeps the rows of arrays in a folder; see `collect_from_head`.

    If there are more rows than `max_rows`, or than fit in max_bytes, a random sample of each size
    and head is kept.
    """
    plan = plan_arrays(arrays, max_bytes, keep, max_rows)
    return _write_collection(plan, Path(folder), progress, jobs)


def collect_in_memory(arrays: Arrays, max_rows: int = MAX_ROWS) -> RowCollection:
    """The collection that `collect_arrays` would write, with the same digest."""
    return _build_collection(plan_arrays(arrays, MAX_COLLECTION_BYTES, "all", max_rows))


def collect_head_in_memory(
    head: Head, sizes: Sequence[int], sets: int, seed: int, keep: str = "all"
) -> RowCollection:
    """The collection that `collect_from_head` would write, with the same digest."""
    collection = _build_collection(plan_head(head, sizes, sets, seed, MAX_COLLECTION_BYTES, keep))
    check_bad_rows(collection.manifest)
    return collection


def plan_head(
    head: Head,
    sizes: Sequence[int],
    sets: int,
    seed: int,
    max_bytes: int,
    keep: str,
    unit_sizes: UnitSizes = UNIT_SIZES,
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
    sent, per_piece, misranked_only = head_to_send(head), unit_sizes.items_per_piece, keep != "all"
    sources = [HeadSource(sent, seed, per_piece, misranked_only, quotas[unit]) for unit in units]
    configuration = _with_limits(configuration, max_bytes, keep)
    return configuration, list(zip(sources, units, strict=True))


def plan_arrays(arrays: Arrays, max_bytes: int, keep: str, max_rows: int) -> CollectionPlan:
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


def _build_collection(plan: CollectionPlan) -> RowCollection:
    """Makes all shards in memory."""
    configuration, units = plan
    shards = [(unit.size, unit.number, make_rows(source, unit)) for source, unit in units]
    return rows_in_memory(configuration["head"], configuration, shards)


def _write_collection(
    plan: CollectionPlan, folder: Path, progress: Progress, jobs: Jobs
) -> RowCollection:
    """Makes all shards in a folder, resumably."""
    configuration, units = plan
    shards = [
        Shard(
            shard_name(unit.size, unit.number),
            partial(make_shard, source, unit),
            partial(read_shard_entry, unit),
            unit.size * unit.sets,
        )
        for source, unit in units
    ]
    collection = run_units(
        folder, Plan("collecting", RowCollection, configuration, shards), jobs, progress
    )
    check_bad_rows(collection.manifest)
    return collection
