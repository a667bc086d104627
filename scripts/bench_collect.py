"""Benchmark of collecting against the head's bare forward pass over the same sets.

The peer runs `attend` over the same pieces and waits for the logits; drawing the sets is not
included. Collecting draws, runs, classifies, and writes shards to disk.

    python scripts/bench_collect.py [SETS]
"""

import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from timing import answer_help

from calibrate.rows import work_units
from calibrate.rows.collect import collect
from calibrate.rows.heads import load_head
from calibrate.rows.sources import STREAM

SIZES = [16 << k for k in range(11)]
REPEATS = 7


def bare_pass(head, sizes: list[int], sets: int) -> float:
    """Seconds spent in attend alone."""
    total = 0.0
    for unit in (u for size in sizes for u in work_units.plan_units(size, sets)):
        seed = work_units.unit_seed(STREAM, 0, unit)
        batch = head.sample(seed, unit.size, unit.sets)
        per_piece = max(1, work_units.ITEMS_PER_PIECE // unit.size)
        cuts = [slice(i, i + per_piece) for i in range(0, unit.sets, per_piece)]
        start = time.perf_counter()
        pieces = (jax.tree.map(lambda leaf, cut=cut: leaf[cut], batch) for cut in cuts)
        for attended in work_units.one_ahead(map(head.attend, pieces)):
            attended.logits.block_until_ready()
        total += time.perf_counter() - start
    return total


def full_collect(head, sizes: list[int], sets: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        collect(head, sizes, sets, 0, Path(folder) / "run")
        return time.perf_counter() - start


def main() -> None:
    sets = int(sys.argv[1]) if len(sys.argv) > 1 else 2_048
    head = load_head("max-retrieval")
    print(f"{'n':>7} {'bare pass, s':>13} {'collect, s':>11} {'ratio':>6}   {sets:,} sets, medians")
    totals = np.zeros(2)
    for size in SIZES:
        bare_pass(head, [size], sets)  # compiles
        full_collect(head, [size], sets)
        # In turns, so that the load of a shared machine affects both alike.
        pairs = [
            (bare_pass(head, [size], sets), full_collect(head, [size], sets))
            for _ in range(REPEATS)
        ]
        bare, full = np.median(pairs, axis=0)
        totals += bare, full
        print(f"{size:>7,} {bare:>13.3f} {full:>11.3f} {full / bare:>6.2f}", flush=True)
    print(f"{'all':>7} {totals[0]:>13.2f} {totals[1]:>11.2f} {totals[1] / totals[0]:>6.2f}")


if __name__ == "__main__":
    answer_help(__doc__)
    main()
