"""Sampling: the rows that a collection keeps within its limits on rows and bytes.

A head draws its inputs independently, so a unit keeps the rows with the lowest hashes of their
index. Of arrays, every stratum, a (set size, head), gets the same share of the limit, and what a
stratum does not need goes to the others. Rows of a stratum are drawn at random, and each kept row
stands for as many as were given for one that is kept: sums of weights are unbiased.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from calibrate.errors import CalibrateError, warn_user
from calibrate.rows.logits_files import Arrays
from calibrate.rows.rows import OPTIONAL_COLUMNS, hashes, row_bytes
from calibrate.rows.units import Unit

# Rows of each size that are kept of a head if rows of every rank are: enough for a rule of a few
# coefficients.
MAX_KEPT_OF_ALL = 2048
MAX_ROWS = 1 << 18  # of arrays; solved in about a minute at 1,000 items a row
MAX_WEIGHT = float(np.finfo(np.float32).max)

# Upper bounds of the bytes of a manifest, and of a shard beside its rows.
MANIFEST_BASE = 2_048
MANIFEST_PER_HEAD = 32
MANIFEST_PER_SIZE = 256
MANIFEST_PER_SHARD = 256
SHARD_OVERHEAD = 2_048


def unit_quotas(
    units: Sequence[Unit],
    keep: str,
    max_bytes: int,
    bytes_of_row: Mapping[int, int],
) -> dict[Unit, int]:
    """The number of rows that each unit of a head may keep, so that all files fit in max_bytes.

    A unit asks for its share of the rows of its size. Every unit gets the same number of bytes, and
    what a unit does not need goes to the others.
    """
    requested = _requested_rows(units, keep)
    overhead = _overhead(len(units), len(bytes_of_row), 1)
    bytes_requested = [n * bytes_of_row[unit.size] for unit, n in requested.items()]
    bytes_per_unit = fair_share(bytes_requested, max_bytes - overhead)
    largest = max(bytes_of_row.values())
    if bytes_per_unit < largest:
        _refuse_budget(max_bytes, "unit", overhead + len(requested) * largest)
    return {
        unit: min(bytes_per_unit // bytes_of_row[unit.size], n) for unit, n in requested.items()
    }


def _requested_rows(units: Sequence[Unit], keep: str) -> dict[Unit, int]:
    """The number of rows that each unit keeps without a limit on bytes."""
    sets: Counter[int] = Counter()
    for unit in units:
        sets[unit.size] += unit.sets
    requested = {}
    for unit in units:
        count = sets[unit.size]
        most = min(count, MAX_KEPT_OF_ALL) if keep == "all" else count
        requested[unit] = most * (unit.first + unit.sets) // count - most * unit.first // count
    return requested


def sample_arrays(
    arrays: Arrays, n_units: int, max_bytes: int, keep: str, max_rows: int
) -> tuple[np.ndarray, Arrays]:
    """Chooses the rows of arrays that are kept.

    Returns:
      (rows,) bool, True for rows that are kept; and the arrays, with the weights of the sample.
    """
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
    warn_user(
        f"{arrays.shown}: {n_kept:,} of {n_rows:,} rows are kept, a random sample of each size and "
        f"head; the limits are {most:,} rows and {max_bytes:,} bytes"
    )
    index = np.empty(len(candidate), np.int64)  # number of each row among those of its size
    for size in arrays.sizes:
        index[arrays.places(size)] = np.arange(arrays.count(size))
    kept, weight = candidate.copy(), arrays.weight.copy()
    kept[candidate], weight[candidate] = sample_rows(
        stratum[candidate], weight[candidate], index[candidate], quotas
    )
    return kept, replace(arrays, weight=weight, columns=columns)


def fair_share(requested: Sequence[int], total: int) -> int:
    """The largest share such that min(request, share), summed, is at most `total`.

    If all requests fit, it is the largest request.
    """
    share, left = 0, total
    for i, request in enumerate(sorted(requested)):
        share = left // (len(requested) - i)
        if request > share:
            return share
        left -= request
        share = request
    return share


def row_quotas(
    counts: np.ndarray, bytes_of_row: np.ndarray, max_rows: int, max_bytes: int
) -> np.ndarray:
    """(strata,) number of rows of each stratum that are kept.

    Args:
      counts: (strata,) rows of each.
      bytes_of_row: (strata,) bytes of one row of each.
      max_rows, max_bytes: of all strata together.
    """
    quotas = np.minimum(counts, fair_share(counts.tolist(), max_rows))
    share = fair_share((quotas * bytes_of_row).tolist(), max_bytes)
    return np.asarray(np.minimum(quotas, share // bytes_of_row))


def sample_rows(
    stratum: np.ndarray, weight: np.ndarray, index: np.ndarray, quotas: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draws rows of each stratum at random, without replacement, regardless of their weight.

    Args:
      stratum: (rows,) int, the number of each row's stratum.
      weight: (rows,) float > 0.
      index: (rows,) int; rows are drawn by its hash, so that their order does not matter.
      quotas: (strata,) number of rows of each stratum, at least one.
    Returns:
      (rows,) bool, True for rows that are kept; and (rows,) float32, the weight of a kept row: its
      own, times the number of rows of its stratum over the number that is kept.
    """
    counts = np.bincount(stratum, minlength=len(quotas))
    by_hash = np.lexsort((hashes(index), stratum))  # one stratum after the other
    first = np.cumsum(counts) - counts
    kept = np.empty(len(stratum), bool)
    kept[by_hash] = np.arange(len(stratum)) < (first + quotas)[stratum[by_hash]]
    scale = np.maximum(counts / np.maximum(quotas, 1), 1)
    return kept, np.minimum(weight * scale[stratum], MAX_WEIGHT).astype(np.float32)


def _overhead(n_units: int, n_sizes: int, n_heads: int) -> int:
    """Upper bound of the bytes of a collection beside its rows."""
    manifest = MANIFEST_BASE + MANIFEST_PER_HEAD * n_heads + MANIFEST_PER_SIZE * n_sizes
    return manifest + (MANIFEST_PER_SHARD + SHARD_OVERHEAD) * n_units


def _refuse_budget(max_bytes: int, each: str, needed: int) -> NoReturn:
    raise CalibrateError(
        f"max_bytes is {max_bytes}, too few for one row of each {each}; give at least {needed}"
    )
