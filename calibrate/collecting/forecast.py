"""Forecast: what a collection would hold and take, from a run over a hundredth of its rows."""

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from calibrate.collecting.collect import Source, examine
from calibrate.collecting.sampling import row_quotas, wanted_rows
from calibrate.collecting.work_units import ITEMS_PER_PIECE, Unit
from calibrate.files import collection as files
from calibrate.parallel.jobs import HERE, Jobs

PROBED_SHARE = 0.01


class SizeForecast(NamedTuple):
    """What is expected of one set size."""

    size: int
    sets: int
    rows: int  # that are kept
    bytes: int
    seconds: float


class Forecast(NamedTuple):
    """What is expected of a collection."""

    sizes: list[SizeForecast]
    bytes: int  # of the whole folder; of the manifest an upper bound
    seconds: float

    @property
    def rows(self) -> int:
        return sum(size.rows for size in self.sizes)


def forecast(
    source: Source,
    max_bytes: int,
    keep: str = "all",
    jobs: Jobs = HERE,
    clock: Callable[[], float] = time.perf_counter,
) -> Forecast:
    """Runs a hundredth of the sets of each size, from a piece to a unit, and writes nothing.

    Args:
      source: what would be collected.
      max_bytes, keep: as in `collect`.
      jobs: as many units as its processes are worked on at once; a probe runs in this one.
      clock: seconds that never go back.
    Raises:
      CalibrateError: a head that fails, or max_bytes that are too few.
    """
    wanted = wanted_rows(source.units, keep, source.n_heads)
    quota = row_quotas(wanted, max_bytes, source.row_bytes, source.n_heads)
    sets = Counter[int]()
    room = Counter[int]()
    for unit in source.units:
        sets[unit.size] += unit.sets
        room[unit.size] += min(quota[unit.size], wanted[unit])
    found = []
    at_once = min(jobs.processes, len(source.units))
    for size, count in sets.items():
        once, seconds, share = _probe(source, size, count, keep, clock)
        rows = min(room[size], round(share * count))
        n_shards = sum(unit.size == size for unit in source.units)
        per_shard = files.SHARD_OVERHEAD + files.MANIFEST_PER_SHARD
        in_bytes = rows * source.row_bytes[size] + n_shards * per_shard + files.MANIFEST_PER_SIZE
        found.append(SizeForecast(size, count, rows, in_bytes, once + seconds / at_once))
    return Forecast(
        found,
        files.MANIFEST_BASE
        + files.MANIFEST_PER_HEAD * source.n_heads
        + sum(size.bytes for size in found),
        sum(size.seconds for size in found),
    )


def _probe(
    source: Source, size: int, sets: int, keep: str, clock: Callable[[], float]
) -> tuple[float, float, float]:
    """(seconds that each process takes to begin, seconds for all sets of one size, share kept)."""
    first = next(unit for unit in source.units if unit.size == size)
    most = max(math.ceil(PROBED_SHARE * sets), ITEMS_PER_PIECE // size, 1)
    probed = Unit(size, first.number, first.first, min(most, first.sets))
    rows = source.rows(probed)
    begun = clock()
    examine(*rows()[:2])
    compiled = clock()
    found = rows()
    good, misranked, *_ = map(np.asarray, examine(found.logits, found.target))
    seconds = clock() - compiled
    once = max(compiled - begun - seconds, 0)  # what is compiled, loaded or read the first time
    share = float((good if keep == "all" else misranked).mean())
    return once, seconds * sets / probed.sets, share
