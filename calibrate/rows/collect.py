"""Collecting: keeps a sample of a head's rows on disk, or of its misranked rows."""

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibrate.files import collection as files
from calibrate.files.shard import Shard, shard_path
from calibrate.maths.row_batches import hashes, row_entropy
from calibrate.maths.rule import Rule
from calibrate.parallel.jobs import ONE_PROCESS, Jobs, run
from calibrate.rows.heads import Head
from calibrate.rows.logits_files import Arrays
from calibrate.rows.resume import changed_units, claim_folder, complete_shards
from calibrate.rows.row_budget import row_quotas, wanted_rows
from calibrate.rows.sources import Source, UnitRows, source_of_arrays, source_of_head
from calibrate.rows.work_units import Unit

MAX_BYTES = 10**9  # of a collection, unless asked otherwise


class Progress(NamedTuple):
    """One finished unit, for a progress display."""

    receipt: files.Receipt
    finished: int  # units
    units: int
    resumed: bool  # it was on disk already


Report = Callable[[Progress], None]


def collect(
    head: Head,
    sizes: Sequence[int],
    sets: int,
    seed: int,
    folder: Path,
    max_bytes: int = MAX_BYTES,
    report: Report = lambda progress: None,
    keep: str = "all",
    jobs: Jobs = ONE_PROCESS,
) -> files.Collection:
    """Runs `head` over sets of every size and keeps a sample of the rows, or the misranked ones.

    The same call resumes an interrupted collection, and returns a finished one unchanged. The same
    configuration gives the same bytes on one machine, whatever the jobs, if the head's logits do
    not depend on the number of threads (those of the package do not).

    Args:
      head: the head to calibrate. Workers load it by the reference that `load_head` was given; any
        other head is sent to them.
      sizes: set sizes n.
      sets: number of sets of each size.
      seed: of the data.
      folder: of the collection, new or existing.
      max_bytes: of the whole folder. Each unit of work has a share of it and keeps the rows whose
        index has the lowest hash: an unbiased sample, whatever the order of the units.
      report: called after each unit.
      keep: "all", at most 2,048 good rows of each size, whatever their rank; or "misranked".
      jobs: processes or cluster that the units run on; each unit writes its own shard.
    Raises:
      CalibrateError: another configuration is in `folder`, or it cannot be written, or a worker
        died or stalled.
      QualityError: more than 1 % of the rows are bad (NaN, +inf, or a masked target).
    """
    source = source_of_head(head, sizes, sets, seed)
    return collect_from(source, folder, max_bytes, report, keep, jobs)


def collect_arrays(
    arrays: Arrays,
    folder: Path,
    max_bytes: int = MAX_BYTES,
    report: Report = lambda progress: None,
    keep: str = "all",
    jobs: Jobs = ONE_PROCESS,
) -> files.Collection:
    """Keeps a sample of the rows of arrays on disk, of each head of theirs; see `collect`."""
    return collect_from(source_of_arrays(arrays), folder, max_bytes, report, keep, jobs)


def collect_in_memory(arrays: Arrays) -> files.Collection:
    """The collection that `collect_arrays` would write, with the same digest."""
    plan = _plan(source_of_arrays(arrays), MAX_BYTES, "all")
    shards = [
        (unit.size, unit.number, _kept_rows(plan.source.rows(unit)(), unit, plan.most(unit), True))
        for unit in plan.source.units
    ]
    return files.collection_in_memory(arrays.name, plan.configuration, shards)


class _Plan(NamedTuple):
    """What is to be collected: a source, and how many rows each unit may keep."""

    source: Source
    configuration: dict[str, Any]
    wanted: Mapping[Unit, int]
    quota: Mapping[int, int]

    def most(self, unit: Unit) -> int:
        return min(self.quota[unit.size], self.wanted[unit])


def _plan(source: Source, max_bytes: int, keep: str) -> _Plan:
    configuration = {**source.configuration, "max_bytes": max_bytes}
    if keep != "misranked":  # absent in collections from before the option
        configuration["keep"] = keep
    wanted = wanted_rows(source.units, keep, source.n_heads)
    quota = row_quotas(wanted, max_bytes, source.row_bytes, source.n_heads)
    return _Plan(source, configuration, wanted, quota)


def collect_from(
    source: Source, folder: Path, max_bytes: int, report: Report, keep: str, jobs: Jobs
) -> files.Collection:
    """Collects from any source; see `collect`."""
    folder, plan = Path(folder), _plan(source, max_bytes, keep)
    listed = complete_shards(folder, plan.configuration, source)
    if listed is None or changed_units(folder, listed):
        with files.collection_lock(folder):
            _collect_units(plan, folder, report, keep, jobs)
    collection = files.open_collection(folder)
    files.refuse_bad_rows(collection.manifest)
    return collection


def _collect_units(plan: _Plan, folder: Path, report: Report, keep: str, jobs: Jobs) -> None:
    """Collects the units without a shard; of a complete collection, those whose shard changed."""
    configuration, units = plan.configuration, plan.source.units
    complete = claim_folder(folder, configuration, plan.source)
    if complete:
        units = changed_units(folder, complete)
        for unit in units:
            path = shard_path(folder, unit.size, unit.number)
            state = "damaged" if path.exists() else "missing"
            warnings.warn(f"{path} is {state}; it is collected again", stacklevel=4)
    absolute = folder.absolute()  # workers may have another working folder
    tasks = [
        partial(
            _collect_unit,
            plan.source.rows(unit),
            absolute,
            unit,
            plan.most(unit),
            keep == "all",
            complete[unit]["sha256"] if complete else None,
        )
        for unit in units
    ]
    finished = itertools.count(1)

    def advance(done: tuple[files.Receipt, bool]) -> None:
        receipt, resumed = done
        report(Progress(receipt, next(finished), len(units), resumed))

    receipts = [receipt for receipt, _ in run(tasks, jobs, advance)]
    if not complete:
        files.write_manifest(folder, configuration, receipts)


def _collect_unit(
    read_rows: Callable[[], UnitRows],
    folder: Path,
    unit: Unit,
    most: int,
    keep_all: bool,
    listed: str | None,
) -> tuple[files.Receipt, bool]:
    """The receipt of one unit's shard, and whether it was on disk already.

    `listed` is its digest in the manifest of a complete collection.
    """
    if listed is None:
        sets = range(unit.first, unit.first + unit.sets)
        receipt = files.find_shard(folder, unit.size, unit.number, sets)
        if receipt:
            return receipt, True
    shard = _kept_rows(read_rows(), unit, most, keep_all)
    return files.write_shard(folder, unit.size, unit.number, shard, listed), False


def _kept_rows(unit_rows: UnitRows, unit: Unit, most: int, keep_all: bool) -> Shard:
    """The rows of a unit that are kept, at most so many."""
    good, misranked, H, counts = examine(unit_rows.logits, unit_rows.target)
    rows = np.flatnonzero(good if keep_all else misranked)
    rows = rows[_lowest_hashes(rows + unit.first, most)]
    columns: dict[str, Any] = {
        k: None if x is None else x[rows] for k, x in unit_rows._asdict().items()
    }
    index = rows + unit.first
    return Shard(entropy=H[rows], index=index, counts=counts, **columns)


def examine(
    logits: np.ndarray, target: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Classifies rows; bad ones have NaN, +inf, or a masked target.

    Args:
      logits: (count, n) float32, -inf where masked.
      target: (count,) int, or (count, n) bool where any of several may win.
    Returns:
      (count,) bool, good; (count,) bool, misranked; (count,) entropy, nats; the counts of COUNTS.
    """
    if target.ndim == 1:
        at_target = np.take_along_axis(logits, target[:, None], axis=1)[:, 0]
        n_targets = np.ones(len(logits), np.intp)
    else:
        at_target = np.max(logits, axis=1, where=target, initial=-np.inf)
        n_targets = np.sum(target & (logits == at_target[:, None]), axis=1)
    highest = np.max(logits, axis=1)  # NaN if any is
    nan, inf = np.isnan(highest), highest == np.inf
    # Also a target so far below the highest logit that the largest beta overflows.
    with np.errstate(invalid="ignore", over="ignore"):
        unreachable = ~np.isfinite((highest - at_target) * np.float32(Rule().max_beta))
    masked_target = unreachable & ~nan & ~inf
    good = ~(nan | inf | masked_target)
    misranked = good & (highest > at_target)
    ties = good & ~misranked & (np.sum(logits == at_target[:, None], axis=1) > n_targets)
    counts = [np.ones_like(good), misranked, ties, nan, inf, masked_target]
    return good, misranked, row_entropy(logits), np.array([x.sum() for x in counts], np.int64)


def _lowest_hashes(index: np.ndarray, quota: int) -> np.ndarray:
    """Positions, in order, of the `quota` rows whose index has the lowest hash."""
    if len(index) <= quota:
        return np.arange(len(index))
    return np.sort(np.argsort(hashes(index), kind="stable")[:quota])
