"""Keeping: which rows of a unit of work a collection has, within a number of rows and of bytes."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from calibrate.core.row_batches import hashes, row_entropy
from calibrate.datasets.logit_rows import OPTIONAL_COLUMNS, LogitRows, at_target
from calibrate.datasets.logits_files import Arrays
from calibrate.datasets.row_collection import (
    MANIFEST_BASE,
    MANIFEST_PER_HEAD,
    MANIFEST_PER_SHARD,
    MANIFEST_PER_SIZE,
    SHARD_OVERHEAD,
    row_bytes,
)
from calibrate.datasets.row_quality import find_bad
from calibrate.errors import CalibrateError
from calibrate.rows.sampling import fair_share, row_quotas, sample_rows
from calibrate.rows.work_units import Unit

# Rows of each size of a head that draws them, if rows of every rank are kept: enough for a rule of
# a few coefficients.
MAX_KEPT_OF_ALL = 2048


class Examined(NamedTuple):
    """Rows of a unit of work, examined: (rows,) each, and the counts of COUNTS."""

    good: np.ndarray  # bool; bad rows have NaN, +inf, or a masked target
    misranked: np.ndarray  # bool
    entropy: np.ndarray
    counts: np.ndarray


def examine(logits: np.ndarray, target: np.ndarray) -> Examined:
    """Examines logits and targets as of LogitRows."""
    of_target = at_target(logits, target)
    n_targets: Any = 1
    if target.ndim > 1:
        n_targets = np.sum(target & (logits == of_target[:, None]), axis=1)
    highest = np.max(logits, axis=1)  # NaN if any is
    bad = find_bad(highest, of_target)
    good = ~np.any(bad, axis=0)
    misranked = good & (highest > of_target)
    ties = good & ~misranked & (np.sum(logits == of_target[:, None], axis=1) > n_targets)
    counts = np.array([x.sum() for x in (np.ones_like(good), misranked, ties, *bad)], np.int64)
    return Examined(good, misranked, row_entropy(logits), counts)


def take_kept(rows: LogitRows, examined: Examined, kept: np.ndarray, first: int) -> LogitRows:
    """The rows of a unit that are kept, by their positions, rising; its first row is `first`."""
    return replace(
        rows.take(kept),
        entropy=examined.entropy[kept],
        index=kept + first,
        counts=examined.counts,
    )


def lowest_hashes(rows: np.ndarray, first: int, most: int) -> np.ndarray:
    """Those of some rows of a unit with the lowest hashes of their index, at most so many.

    Takes and gives positions in the unit, rising; its first row is `first`.
    """
    if len(rows) > most:
        rows = np.sort(rows[np.argsort(hashes(rows + first), kind="stable")[:most]])
    return rows


def rows_of_units(
    units: Sequence[Unit],
    keep: str,
    max_bytes: int,
    bytes_of_row: Mapping[int, int],
    max_kept: int = MAX_KEPT_OF_ALL,
) -> dict[Unit, int]:
    """The number of rows of a head that each unit may keep, so that all files fit in max_bytes.

    A unit has its share of the rows of its size. Every unit gets the same bytes; those that a unit
    cannot use go to the others.
    """
    requested = _requested_rows(units, keep, max_kept)
    overhead = _overhead(len(units), len(bytes_of_row), 1)
    bytes_requested = [n * bytes_of_row[unit.size] for unit, n in requested.items()]
    bytes_per_unit = fair_share(bytes_requested, max_bytes - overhead)
    largest = max(bytes_of_row.values())
    if bytes_per_unit < largest:
        _refuse_budget(max_bytes, "unit", overhead + len(requested) * largest)
    return {
        unit: min(bytes_per_unit // bytes_of_row[unit.size], n) for unit, n in requested.items()
    }


def _requested_rows(units: Sequence[Unit], keep: str, max_kept: int) -> dict[Unit, int]:
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


def sample_arrays(
    arrays: Arrays, n_units: int, max_bytes: int, keep: str, max_rows: int
) -> tuple[np.ndarray, Arrays]:
    """(rows,) bool, which rows of arrays are kept, and the arrays, with the weights of a sample."""
    candidate = (arrays.bad_reason == 0) & (arrays.misranked | (keep == "all"))
    n_heads, n_sizes = len(arrays.heads), len(arrays.sizes)
    stratum = np.searchsorted(arrays.sizes, arrays.size) * n_heads + arrays.head_number
    counts = np.bincount(stratum[candidate], minlength=n_sizes * n_heads)
    columns = tuple(x for x in OPTIONAL_COLUMNS if x in (*arrays.columns, "weight"))
    size_bytes = [row_bytes(size, arrays.sets_of_targets, columns) for size in arrays.sizes]
    bytes_for_rows = max_bytes - _overhead(n_units, n_sizes, n_heads)
    most = max_rows if keep == "all" else max(1, len(arrays.size))
    quotas = row_quotas(counts, np.repeat(size_bytes, n_heads), most, max(bytes_for_rows, 0))
    if ((quotas == 0) & (counts > 0)).any():
        needed = max_bytes - bytes_for_rows + int((counts > 0).sum()) * max(size_bytes)
        _refuse_budget(max_bytes, "size and head", needed)
    n_kept, n_rows = int(quotas.sum()), int(counts.sum())
    if n_kept == n_rows:
        return candidate, arrays
    warnings.warn(
        f"{arrays.shown}: {n_kept:,} of {n_rows:,} rows are kept, a random sample of each size and "
        f"head; the limits are {most:,} rows and {max_bytes:,} bytes",
        stacklevel=2,
    )
    index = np.empty(len(candidate), np.int64)  # numbers of the rows in their size
    for size in arrays.sizes:
        index[arrays.places(size)] = np.arange(arrays.count(size))
    kept, weight = candidate.copy(), arrays.weight.copy()
    kept[candidate], weight[candidate] = sample_rows(
        stratum[candidate], weight[candidate], index[candidate], quotas
    )
    return kept, replace(arrays, weight=weight, columns=columns)


def _overhead(n_units: int, n_sizes: int, n_heads: int) -> int:
    """The bytes of a collection beside its rows, at most."""
    of_manifest = MANIFEST_BASE + MANIFEST_PER_HEAD * n_heads
    of_manifest += MANIFEST_PER_SIZE * n_sizes
    return of_manifest + (MANIFEST_PER_SHARD + SHARD_OVERHEAD) * n_units


def _refuse_budget(max_bytes: int, each: str, needed: int) -> NoReturn:
    raise CalibrateError(
        f"max_bytes is {max_bytes}, too few for one row of each {each}; give at least {needed}"
    )
