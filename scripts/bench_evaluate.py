"""Benchmark of scoring every rule at once against the head's bare forward pass over the same sets.

python scripts/bench_evaluate.py [ROUNDS]   # about a minute a round on two cores
"""

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
from timing import answer_help

from calibrate.evidence.baselines import fixed_rules, in_order
from calibrate.files.coefficients import Coefficients
from calibrate.rows.collect import collect
from calibrate.rows.fit_collection import solve_collection
from calibrate.rows.heads import load_head
from calibrate.rows.rivals import fitted_rules
from calibrate.rows.score_head import STREAM, held_out_sets, score_head
from calibrate.rows.work_units import attended_pieces, one_ahead, plan_units

SIZES = [16 << i for i in range(11)]


def main() -> None:
    from pathlib import Path
    from tempfile import TemporaryDirectory

    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    head = load_head("max-retrieval")
    with TemporaryDirectory() as folder:
        rows = solve_collection(collect(head, SIZES, 512, 0, Path(folder) / "c"))
    rules = in_order({**fixed_rules(), **fitted_rules(rows)})
    print(f"{len(rules)} rules, the best of 40 constants among them: {', '.join(rules)}")
    print(f"{'n':>6}  {'sets':>6}  {'forward':>8}  {'scoring':>8}  ratio")
    totals = [0.0, 0.0]
    for size in SIZES:
        sets = held_out_sets(size)
        forward, scoring = timed(
            rounds,
            lambda size=size, sets=sets: run_forward(head, size, sets),
            lambda size=size, sets=sets: run_scoring(head, size, sets, rules),
        )
        totals = [totals[0] + forward, totals[1] + scoring]
        print(f"{size:>6}  {sets:>6}  {forward:7.2f}s  {scoring:7.2f}s  {scoring / forward:.2f}",
              flush=True)  # fmt: skip
    print(f"all together: {totals[1] / totals[0]:.2f} times the forward pass")


def timed(rounds: int, *calls: Callable[[], Any]) -> list[float]:
    """Median seconds of each call, taken in turns after one to warm up."""
    seconds: list[list[float]] = [[] for _ in calls]
    for i in range(rounds + 1):
        for call, taken in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            if i:
                taken.append(time.perf_counter() - start)
    return [median(taken) for taken in seconds]


def run_forward(head: Any, size: int, sets: int) -> None:
    for unit in plan_units(size, sets):
        for _, _, attended in one_ahead(attended_pieces(head, STREAM, 0, unit)):
            jax.block_until_ready(attended)


def run_scoring(head: Any, size: int, sets: int, rules: dict[str, Coefficients]) -> None:
    score_head(head, [size], sets, 0, rules)


if __name__ == "__main__":
    answer_help(__doc__)
    main()
