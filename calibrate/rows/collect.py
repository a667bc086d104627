"""Collecting: keeps a sample of a head's rows on disk, or of its misranked rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from calibrate.datasets.logits_files import Arrays
from calibrate.datasets.resume import Plan, run_units
from calibrate.datasets.row_collection import HEAD, RowCollection, rows_in_memory
from calibrate.datasets.row_quality import check_bad_rows
from calibrate.errors import command
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress
from calibrate.rows.heads import Head, reference_of
from calibrate.rows.kept_rows import MAX_KEPT_OF_ALL
from calibrate.rows.row_sources import RowSource, source_of_arrays, source_of_head
from calibrate.rows.sampling import MAX_ROWS
from calibrate.rows.work_units import UNIT_SIZES, UnitSizes
from calibrate.storage.atomic_io import SPACE

MAX_BYTES = 10**9  # of a collection, unless asked otherwise


def collect(
    head: Head,
    sizes: Sequence[int],
    sets: int,
    seed: int,
    folder: Path,
    max_bytes: int = MAX_BYTES,
    progress: Progress = SILENT,
    keep: str = "all",
    jobs: Jobs = ONE_PROCESS,
    *,
    unit_sizes: UnitSizes = UNIT_SIZES,
    max_kept: int = MAX_KEPT_OF_ALL,
) -> RowCollection:
    """Runs `head` over sets of every size and keeps a sample of the rows, or the misranked ones.

    The same call resumes an interrupted collection, and returns a finished one unchanged. The same
    configuration gives the same bytes on one machine, whatever the jobs.

    Args:
      head: workers load it by the reference that `load_head` was given; any other is sent to them.
      sizes: set sizes n.
      sets: number of sets of each size.
      seed: of the data.
      folder: of the collection, new or existing.
      max_bytes: of the whole folder; each unit of work keeps the rows with the lowest hashes.
      progress: advances after each unit, by the items of its rows.
      keep: "all", at most `max_kept` good rows of each size, whatever their rank; or "misranked".
      jobs: processes or cluster that the units run on; each unit writes its own shard.
      unit_sizes: how much work a unit is; with others it is another collection.
      max_kept: the good rows of each size that are kept of all.
    Raises:
      CalibrateError: another configuration is in `folder`, or it cannot be written, or a worker
        died or stalled.
      QualityError: more than 1 % of the rows are bad (NaN, +inf, or a masked target).
    """
    source = source_of_head(head, sizes, sets, seed, max_bytes, keep, unit_sizes, max_kept)
    reference = reference_of(head)
    beside = {HEAD: f"{reference}\n".encode()} if reference else {}
    return _collect_from(source, folder, progress, jobs, beside)


def collect_arrays(
    arrays: Arrays,
    folder: Path,
    max_bytes: int = MAX_BYTES,
    progress: Progress = SILENT,
    keep: str = "all",
    jobs: Jobs = ONE_PROCESS,
    *,
    max_rows: int = MAX_ROWS,
) -> RowCollection:
    """Keeps the rows of arrays on disk, of each head of theirs; see `collect`.

    Of more than `max_rows`, or than max_bytes hold, a random sample of each size and head is kept.
    """
    source = source_of_arrays(arrays, max_bytes, keep, max_rows)
    return _collect_from(source, folder, progress, jobs)


def collect_in_memory(arrays: Arrays, max_rows: int = MAX_ROWS) -> RowCollection:
    """The collection that `collect_arrays` would write, with the same digest."""
    return _collect_in_memory(source_of_arrays(arrays, MAX_BYTES, "all", max_rows))


def collect_head_in_memory(
    head: Head, sizes: Sequence[int], sets: int, seed: int, keep: str = "all"
) -> RowCollection:
    """The collection that `collect` would write, with the same digest."""
    collection = _collect_in_memory(source_of_head(head, sizes, sets, seed, MAX_BYTES, keep))
    check_bad_rows(collection.manifest)
    return collection


def _collect_in_memory(source: RowSource) -> RowCollection:
    shards = [(of.unit.size, of.unit.number, of.make_rows()) for of in source.units]
    return rows_in_memory(source.configuration["head"], source.configuration, shards)


def _collect_from(
    source: RowSource,
    folder: Path,
    progress: Progress,
    jobs: Jobs,
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> RowCollection:
    most = source.configuration["max_bytes"]
    less = command("collect", max_bytes=True)
    full = f"{SPACE}, or collect less: `{less}`, which is {most:,}"
    shards, difference = source.shards(), source.difference
    plan = Plan("collecting", RowCollection, source.configuration, shards, difference, beside, full)
    collection = run_units(Path(folder), plan, jobs, progress)
    check_bad_rows(collection.manifest, source.has_mask)
    return collection
