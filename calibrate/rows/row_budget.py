"""Sampling: how many rows each unit of a collection may keep."""

from collections import Counter
from collections.abc import Mapping, Sequence

from calibrate.errors import CalibrateError
from calibrate.files import rows as files
from calibrate.rows.work_units import Unit

# Rows of each size, if rows of every rank are kept: enough for a rule of a few coefficients.
MOST_KEPT_OF_ALL = 2048


def wanted_rows(units: Sequence[Unit], keep: str, n_heads: int = 1) -> dict[Unit, int]:
    """How many rows each unit keeps without a limit on bytes: its share of the rows of its size."""
    sets: Counter[int] = Counter()
    for unit in units:
        sets[unit.size] += unit.sets
    most = dict(sets)
    if keep == "all":
        most = {size: min(count, MOST_KEPT_OF_ALL * n_heads) for size, count in sets.items()}
    return {
        u: most[u.size] * (u.first + u.sets) // sets[u.size]
        - most[u.size] * u.first // sets[u.size]
        for u in units
    }


def row_quotas(
    wanted_rows: Mapping[Unit, int], max_bytes: int, row_bytes: Mapping[int, int], n_heads: int = 1
) -> dict[int, int]:
    """How many rows a unit of each size may keep, so that all files together fit in max_bytes.

    Every unit gets the same bytes; those that a unit cannot use go to the others.
    """
    overhead = files.MANIFEST_BASE + files.MANIFEST_PER_HEAD * n_heads
    overhead += files.MANIFEST_PER_SIZE * len(row_bytes)
    overhead += (files.MANIFEST_PER_SHARD + files.SHARD_OVERHEAD) * len(wanted_rows)
    left = max_bytes - overhead
    wanted = sorted(rows * row_bytes[unit.size] for unit, rows in wanted_rows.items())
    level = 0
    for i, most in enumerate(wanted):
        level = left // (len(wanted) - i)
        if most > level:
            break
        left -= most
        level = most
    largest = max(row_bytes.values())
    if level < largest:
        needed = overhead + len(wanted) * largest
        raise CalibrateError(
            f"max_bytes is {max_bytes}, too few for one row of each unit; give at least {needed}"
        )
    return {size: level // bytes_each for size, bytes_each in row_bytes.items()}
