"""Benchmark of collecting and of scoring against the head's bare forward pass over the same sets.

Collecting draws, runs, classifies, and writes shards to disk; its peer runs `attend` over sets that
are drawn already. Scoring has every rule at once; its peer draws, too.

    python scripts/bench_head.py collect [SETS]     # of each size; 2,048
    python scripts/bench_head.py evaluate           # about a minute a round on two cores
"""

import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ten_heads import fitted_rules, fixed_rules, score_head
from timing import answer_help, medians

from calibrate.rows import work_units
from calibrate.rows.collect import collect
from calibrate.rows.heads import load_head
from calibrate.rows.score_head import held_out_sets
from calibrate.rows.solved_rows import solve_collection

SIZES = [16 << k for k in range(11)]
ROUNDS = {"collect": 7, "evaluate": 2}
Call = Callable[..., Any]


def of_collecting(head: Any, sets: int) -> Iterable[tuple[int, int, Call, Call]]:
    """(size, sets, peer, ours) of each size."""
    for size in SIZES:
        pieces = list(drawn_pieces(head, size, sets))
        yield (
            size, sets, lambda pieces=pieces: wait_for(map(head.attend, pieces)),
            lambda size=size: collect_anew(head, [size], sets),
        )  # fmt: skip


def drawn_pieces(head: Any, size: int, sets: int) -> Iterable[Any]:
    """The sets of one size, in the pieces in which the head sees them."""
    per_piece = max(1, work_units.ITEMS_PER_PIECE // size)
    for unit in work_units.plan_units(size, sets):
        batch = head.sample(work_units.unit_seed("collect", 0, unit), size, unit.sets)
        for i in range(0, unit.sets, per_piece):
            yield jax.tree.map(lambda leaf, i=i: leaf[i : i + per_piece], batch)


def wait_for(attended: Iterable[Any]) -> None:
    for piece in work_units.one_ahead(attended):
        jax.block_until_ready(piece.logits)


def collect_anew(head: Any, sizes: list[int], sets: int, use: Call = lambda run: None) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return use(collect(head, sizes, sets, 0, Path(folder) / "run"))


def of_scoring(head: Any) -> Iterable[tuple[int, int, Call, Call]]:
    """(size, sets, peer, ours) of each size."""
    rules = {**fixed_rules(), **fitted_rules(collect_anew(head, SIZES, 512, solve_collection))}
    print(f"{len(rules)} rules: {', '.join(rules)}")

    def forward(size: int, sets: int) -> None:
        for unit in work_units.plan_units(size, sets):
            pieces = work_units.attended_pieces(head, "evaluate", 0, unit)
            wait_for(attended for _, _, attended in pieces)

    for size in SIZES:
        sets = held_out_sets(size)
        yield (
            size, sets, lambda size=size, sets=sets: forward(size, sets),
            lambda size=size, sets=sets: score_head(head, [size], sets, 0, rules),
        )  # fmt: skip


def main(what: str, sets: int = 2_048) -> None:
    head, totals = load_head("max-retrieval"), np.zeros(2)
    rows = of_collecting(head, sets) if what == "collect" else of_scoring(head)
    print(f"{'n':>7} {'sets':>7} {'bare pass, s':>13} {what + ', s':>12} {'ratio':>6}")
    for size, count, peer, ours in rows:
        bare, full = medians({"bare": peer, what: ours}, ROUNDS[what]).values()
        totals += bare, full
        print(f"{size:>7,} {count:>7,} {bare:>13.3f} {full:>12.3f} {full / bare:>6.2f}", flush=True)
    print(f"{'all':>15} {totals[0]:>13.2f} {totals[1]:>12.2f} {totals[1] / totals[0]:>6.2f}")


if __name__ == "__main__":
    answer_help(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
