"""Collecting: keeps a sample of a head's rows on disk, or of its misranked rows."""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from calibrate.core.masking import warn_of_masks
from calibrate.core.row_batches import hashes, row_entropy
from calibrate.datasets import rows as files
from calibrate.datasets.logits_files import Arrays, Part
from calibrate.datasets.logits_rows import (
    OPTIONAL_COLUMNS,
    LoggedRows,
    at_target,
    check_no_probabilities,
    in_float32,
)
from calibrate.datasets.manifest import Entry
from calibrate.datasets.resume import Plan, Shard, run_units
from calibrate.datasets.row_quality import check_bad_rows, find_bad
from calibrate.datasets.rows import (
    KeptRows,
    RowCollection,
    check_unit,
    entry_of_rows,
    most_bytes,
    row_bytes,
    rows_in_memory,
    shard_name,
)
from calibrate.errors import CalibrateError, command
from calibrate.parallel.jobs import ONE_PROCESS, Jobs
from calibrate.parallel.progress import SILENT, Progress
from calibrate.rows.heads import Head, call, head_loader, reference_of
from calibrate.rows.sampling import MAX_ROWS, Budget, fair_share, row_quotas, sample_rows
from calibrate.rows.work_units import (
    UNIT_SIZES,
    Unit,
    UnitSizes,
    attended_pieces,
    one_ahead,
    plan_units,
    unit_seed,
)
from calibrate.storage.atomic_io import SPACE

STREAM = "collect"  # of sets that are drawn
MAX_BYTES = 10**9  # of a collection, unless asked otherwise
# Rows of each size of a head that draws them, if rows of every rank are kept: enough for a rule of
# a few coefficients.
MAX_KEPT_OF_ALL = 2048

# Of a unit of work, from the good rows and the misranked ones (rows,) bool: the numbers of those
# to keep, rising, and their weights, None to leave these as they are.
Choose = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray | None]]


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
    source = _source_of_head(head, sizes, sets, seed, max_bytes, keep, unit_sizes, max_kept)
    reference = reference_of(head)
    beside = {files.HEAD: f"{reference}\n".encode()} if reference else {}
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

    More than `max_rows`, or than max_bytes hold, are sampled by head, size and weight.
    """
    source = _source_of_arrays(arrays, max_bytes, keep, max_rows)
    return _collect_from(source, folder, progress, jobs)


def collect_in_memory(arrays: Arrays, max_rows: int = MAX_ROWS) -> RowCollection:
    """The collection that `collect_arrays` would write, with the same digest."""
    return _collect_in_memory(_source_of_arrays(arrays, MAX_BYTES, "all", max_rows))


def collect_head_in_memory(
    head: Head, sizes: Sequence[int], sets: int, seed: int, keep: str = "all"
) -> RowCollection:
    """The collection that `collect` would write, with the same digest."""
    collection = _collect_in_memory(_source_of_head(head, sizes, sets, seed, MAX_BYTES, keep))
    check_bad_rows(collection.manifest)
    return collection


def _collect_in_memory(source: "_Source") -> RowCollection:
    shards = [(unit.size, unit.number, source.keep(unit)()) for unit in source.units]
    return rows_in_memory(source.configuration["head"], source.configuration, shards)


@dataclass(frozen=True)
class _Source:
    """The source of rows, unit by unit, and the configuration that determines them."""

    shown: str  # what it is called in messages
    configuration: dict[str, Any]
    units: list[Unit]
    rows: Callable[[Unit], Callable[[], LoggedRows]]  # a reader, which other processes can run too
    choose: Callable[[Unit], Choose]  # likewise
    has_mask: bool = False  # whether arrays say which items are masked

    def keep(self, unit: Unit) -> Callable[[], KeptRows]:
        """Reads and samples a unit; another process can call it."""
        return partial(_kept_rows, self.rows(unit), unit, self.choose(unit))

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


def _source_of_head(
    head: Head,
    sizes: Sequence[int],
    sets: int,
    seed: int,
    max_bytes: int,
    keep: str,
    unit_sizes: UnitSizes = UNIT_SIZES,
    max_kept: int = MAX_KEPT_OF_ALL,
) -> _Source:
    """The source of the sets that are drawn for a head."""
    n = sorted(set(sizes))
    configuration = {
        "head": head.name, "fingerprint": head.fingerprint, "sizes": n, "sets": sets, "seed": seed,
    }  # fmt: skip
    if hasattr(head, "trained_up_to"):
        configuration["trained_up_to"] = int(head.trained_up_to)
    units = [unit for size in n for unit in plan_units(size, sets, unit_sizes)]
    first = units[0]  # shows whether the targets of this head are masks
    batch = call(head, "sample", unit_seed(STREAM, seed, first), first.size, first.sets)
    masks = np.asarray(getattr(batch, "target", None)).ndim > 1
    load_head = head_loader(head)
    bytes_of_row = {size: row_bytes(size, masks) for size in n}
    most = rows_of_units(units, keep, max_bytes, bytes_of_row, max_kept)

    def rows(unit: Unit) -> Callable[[], LoggedRows]:
        return partial(_rows_of_head, load_head, seed, unit, unit_sizes.items_per_piece)

    def choose(unit: Unit) -> Choose:
        return partial(_lowest_hashes, unit.first, most[unit], keep)

    configuration = _with_limits(configuration, max_bytes, keep)
    return _Source(f"head {head.name}", configuration, units, rows, choose)


def _source_of_arrays(arrays: Arrays, max_bytes: int, keep: str, max_rows: int) -> _Source:
    """The source of rows on disk."""
    units = [unit for size in arrays.sizes for unit in plan_units(size, arrays.count(size))]
    configuration: dict[str, Any] = {
        "head": arrays.name, "fingerprint": arrays.fingerprint, "sizes": arrays.sizes,
        "sets": sum(map(arrays.count, arrays.sizes)), "seed": 0, "of": "logits", **arrays.split,
    }  # fmt: skip
    if "layer" in arrays.columns:
        configuration["heads"] = [list(head) for head in arrays.heads]
    most_before = MAX_KEPT_OF_ALL * len(arrays.heads)
    if keep == "all" and max(map(arrays.count, arrays.sizes)) > most_before:
        configuration["max_rows"] = max_rows  # collections of before, of fewer rows, are the same
    chosen = _sample(arrays, len(units), max_bytes, keep, max_rows)

    def rows(unit: Unit) -> Callable[[], LoggedRows]:
        part = arrays.part(unit.size, unit.first, unit.sets)
        return partial(_rows_of_files, part, arrays.columns)

    def choose(unit: Unit) -> Choose:
        kept, weight = (x[unit.first : unit.first + unit.sets] for x in chosen[unit.size])
        return partial(_those_sampled, kept, weight if "weight" in arrays.columns else None)

    configuration = _with_limits(configuration, max_bytes, keep)
    return _Source(arrays.shown, configuration, units, rows, choose, arrays.has_mask)


def _with_limits(configuration: dict[str, Any], max_bytes: int, keep: str) -> dict[str, Any]:
    given = {} if keep == "misranked" else {"keep": keep}  # absent from before the option
    return {**configuration, "max_bytes": max_bytes, **given}


def _sample(
    arrays: Arrays, n_units: int, max_bytes: int, keep: str, max_rows: int
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """The kept rows of each size, (rows,) bool, and their weights, in the order of files."""
    columns = {size: arrays.columns_of(size) for size in arrays.sizes}
    candidate = {
        size: ~of["bad"] & (of["misranked"] | (keep == "all")) for size, of in columns.items()
    }
    head = {size: arrays.head_index(size) for size in arrays.sizes}
    n_heads = len(arrays.heads)
    size_bytes = [row_bytes(size, arrays.sets_of_targets, arrays.columns) for size in arrays.sizes]
    counts = np.stack([np.bincount(head[n][candidate[n]], minlength=n_heads) for n in arrays.sizes])
    room = max_bytes - _overhead(n_units, len(arrays.sizes), n_heads)
    most = max_rows if keep == "all" else max(1, sum(map(arrays.count, arrays.sizes)))
    quotas = row_quotas(
        counts.ravel(), np.repeat(size_bytes, n_heads), Budget(most, max(room, 0))
    ).reshape(-1, n_heads)
    short = (quotas == 0) & (counts > 0)
    if short.any():
        n_strata = int((counts > 0).sum())
        needed = max_bytes - room + n_strata * max(size_bytes)
        _refuse_budget(max_bytes, "size and head", needed)
    if (n_kept := int(quotas.sum())) < (n_rows := int(counts.sum())):
        warnings.warn(
            f"{arrays.shown}: {n_kept:,} of {n_rows:,} rows are kept, a sample by size, head and "
            f"weight; the limits are {most:,} rows and {max_bytes:,} bytes",
            stacklevel=2,
        )
    samples = {}
    for size, quota in zip(arrays.sizes, quotas, strict=True):
        rows = np.flatnonzero(candidate[size])
        kept, weight = candidate[size].copy(), columns[size]["weight"].copy()
        kept[rows], weight[rows] = sample_rows(head[size][rows], weight[rows], rows, quota)
        samples[size] = kept, weight
    return samples


def _rows_of_head(
    load_head: Callable[[], Head], seed: int, unit: Unit, items_per_piece: int
) -> LoggedRows:
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
    return LoggedRows(logits, target.astype(np.int32) if target.ndim == 1 else target)


def _rows_of_files(part: Part, columns: Collection[str]) -> LoggedRows:
    """A unit of rows on disk, with those optional columns."""
    left_out: dict[str, Any] = dict.fromkeys(OPTIONAL_COLUMNS.keys() - columns)
    return part.read()._replace(**left_out)


def rows_of_units(
    units: Sequence[Unit],
    keep: str,
    max_bytes: int,
    row_bytes: Mapping[int, int],
    max_kept: int = MAX_KEPT_OF_ALL,
) -> dict[Unit, int]:
    """The number of rows of a head that each unit may keep, so that all files fit in max_bytes.

    A unit has its share of the rows of its size. Every unit gets the same bytes; those that a unit
    cannot use go to the others.
    """
    requested = wanted_rows(units, keep, max_kept)
    overhead = _overhead(len(units), len(row_bytes), 1)
    share = fair_share([n * row_bytes[unit.size] for unit, n in requested.items()],
                       max_bytes - overhead)  # fmt: skip
    largest = max(row_bytes.values())
    if share < largest:
        _refuse_budget(max_bytes, "unit", overhead + len(requested) * largest)
    return {unit: min(share // row_bytes[unit.size], n) for unit, n in requested.items()}


def wanted_rows(units: Sequence[Unit], keep: str, max_kept: int) -> dict[Unit, int]:
    """The number of rows that each unit keeps without a limit on bytes: its share of its size's."""
    sets: Counter[int] = Counter()
    for unit in units:
        sets[unit.size] += unit.sets
    requested = {}
    for unit in units:
        count = sets[unit.size]
        most = min(count, max_kept) if keep == "all" else count
        requested[unit] = most * (unit.first + unit.sets) // count - most * unit.first // count
    return requested


def _overhead(n_units: int, n_sizes: int, n_heads: int) -> int:
    """The bytes of a collection beside its rows, at most."""
    of_manifest = files.MANIFEST_BASE + files.MANIFEST_PER_HEAD * n_heads
    of_manifest += files.MANIFEST_PER_SIZE * n_sizes
    return of_manifest + (files.MANIFEST_PER_SHARD + files.SHARD_OVERHEAD) * n_units


def _refuse_budget(max_bytes: int, each: str, needed: int) -> NoReturn:
    raise CalibrateError(
        f"max_bytes is {max_bytes}, too few for one row of each {each}; give at least {needed}"
    )


def _collect_from(
    source: _Source,
    folder: Path,
    progress: Progress,
    jobs: Jobs,
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> RowCollection:
    shards = [source.shard(unit) for unit in source.units]
    most = source.configuration["max_bytes"]
    less = command("collect", max_bytes=True)
    full = f"{SPACE}, or collect less: `{less}`, which is {most:,}"
    plan = Plan(
        "collecting", RowCollection, source.configuration, shards, source.difference, beside, full
    )
    collection = run_units(Path(folder), plan, jobs, progress)
    check_bad_rows(collection.manifest, source.has_mask)
    return collection


def _pack_unit(unit: Unit, keep: Callable[[], KeptRows]) -> tuple[bytes, Entry]:
    rows = keep()
    data = rows.pack()
    return data, entry_of_rows(unit.size, unit.number, rows, data)


def _kept_rows(read_rows: Callable[[], LoggedRows], unit: Unit, choose: Choose) -> KeptRows:
    """The rows of a unit that are kept."""
    unit_rows = read_rows()
    good, misranked, H, counts = examine(unit_rows.logits, unit_rows.target)
    rows, weight = choose(good, misranked)
    given = {name: x for name, x in unit_rows._asdict().items() if x is not None}
    columns: dict[str, Any] = {name: x[rows] for name, x in given.items()}
    if weight is not None:
        columns["weight"] = weight
    index = rows + unit.first
    return KeptRows(entropy=H[rows], index=index, counts=counts, **columns)


def _lowest_hashes(
    first: int, most: int, keep: str, good: np.ndarray, misranked: np.ndarray
) -> tuple[np.ndarray, None]:
    """The rows of a head's unit, at most so many: those of the lowest hashes of their index."""
    rows = np.flatnonzero(good if keep == "all" else misranked)
    if len(rows) > most:
        rows = np.sort(rows[np.argsort(hashes(rows + first), kind="stable")[:most]])
    return rows, None


def _those_sampled(
    kept: np.ndarray, weight: np.ndarray | None, good: np.ndarray, misranked: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """The good rows of arrays that were sampled, by (rows,) bool."""
    rows = np.flatnonzero(kept & good)
    return rows, None if weight is None else weight[rows]


def examine(
    logits: np.ndarray, target: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(rows,) good, misranked, and entropy; and the counts of COUNTS.

    Takes logits and targets as of LoggedRows; bad rows have NaN, +inf, or a masked target.
    """
    of_target = at_target(logits, target)
    n_targets: Any = 1
    if target.ndim > 1:
        n_targets = np.sum(target & (logits == of_target[:, None]), axis=1)
    highest = np.max(logits, axis=1)  # NaN if any is
    bad = find_bad(highest, of_target)
    good = ~np.any(bad, axis=0)
    misranked = good & (highest > of_target)
    ties = good & ~misranked & (np.sum(logits == of_target[:, None], axis=1) > n_targets)
    counts = [np.ones_like(good), misranked, ties, *bad]
    return good, misranked, row_entropy(logits), np.array([x.sum() for x in counts], np.int64)
