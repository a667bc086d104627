"""Benchmark of fits against least squares of NumPy and SciPy: time and held-out log p_t.

python scripts/benchmarks/bench_fit.py [ROWS ...]    (default: 10,000 and 1,000,000 profiled rows)

All fits use solved rows of one head, drawn with replacement from a collection: peers the optimal
beta of misranked rows, as in the paper; ours the likelihood profiles of all rows. The score is the
mean log p_t of another collection under the deployed rule, equal weight per set size.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from scipy.optimize import curve_fit
from timing import answer_help

from calibrate.core.rule import Rule
from calibrate.core.rule_kinds import KINDS
from calibrate.fitting.fit_rule import applied_beta, fit_kind
from calibrate.fitting.options import Options
from calibrate.fitting.select import fit_and_select
from calibrate.rows.collect import collect
from calibrate.rows.heads import load_head
from calibrate.solver.solved_rows import Rows, solve_collection
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry

HEAD = "max-retrieval"
SIZES = [16 << i for i in range(9)]
SETS = 1_024
REPEATS = 3
START = [0.0, 0.0, 0.0, 0.0, 1.0]


def polyfit(rows: Rows) -> Coefficients:
    used = rows.interior()
    return _entry(used, np.polyfit(used.entropy, used.beta, 4))


def curve_fit_of_beta(rows: Rows) -> Coefficients:
    used = rows.interior()
    powers, _ = curve_fit(lambda H, *c: np.polyval(c, H), used.entropy, used.beta, START)
    return _entry(used, powers)


def curve_fit_of_theta(rows: Rows) -> Coefficients:
    used = rows.interior()
    powers, _ = curve_fit(
        lambda H, *c: 1 / np.maximum(np.polyval(c, H), 1), used.entropy,
        np.minimum(1 / used.beta, 1), [0.0, 0.0, 0.0, 0.0, 2.0],
    )  # fmt: skip
    return _entry(used, powers)


def _entry(used: Rows, powers: np.ndarray) -> Coefficients:
    domain = tuple(np.percentile(used.entropy, (0.5, 99.5)))
    return Coefficients(Rule(), (Entry(tuple(powers), domain),))


FITS: dict[str, Callable[[Rows], Coefficients]] = {
    "numpy.polyfit": polyfit,
    "curve_fit of beta": curve_fit_of_beta,
    "curve_fit of theta": curve_fit_of_theta,
    **{f"ours, {kind}": partial(fit_kind, kind=kind) for kind in KINDS},
    "ours, choice with folds": lambda rows: fit_and_select(rows, Options()).published.coefficients,
}


def main() -> None:
    counts = [int(word) for word in sys.argv[1:]] or [10_000, 1_000_000]
    head = load_head(HEAD)
    with tempfile.TemporaryDirectory() as folder:
        collections = [
            collect(head, SIZES, SETS, seed, Path(folder) / str(seed)) for seed in (0, 1)
        ]
        fitted, held_out = map(solve_collection, collections)
    for count in counts:
        drawn = np.random.default_rng(0).integers(0, len(fitted.beta), count)
        compare(fitted.take(drawn), held_out)


def compare(rows: Rows, held_out: Rows) -> None:
    """Prints seconds, times numpy.polyfit's, and the held-out score of every fit."""
    print(f"{len(rows.beta):,} rows, {len(rows.interior().beta):,} of them interior")
    print(f"{'':24} seconds  times polyfit  held-out log p_t")
    plain = held_out.log_p(np.ones(len(held_out.beta)))
    print(f"{'baseline':24} {'':22} {held_out.shares() @ plain:17.4f}")
    first = None
    for name, make in FITS.items():
        fit, seconds = make(rows), []
        for _ in range(REPEATS):
            start = time.perf_counter()
            make(rows)
            seconds.append(time.perf_counter() - start)
        best = min(seconds)
        first = first or best
        log_p = held_out.log_p(applied_beta(fit, held_out))
        score = held_out.shares() @ log_p
        print(f"{name:24} {best:7.3f} {best / first:14.1f} {score:17.4f}", flush=True)


if __name__ == "__main__":
    answer_help(__doc__)
    main()
