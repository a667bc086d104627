"""Benchmark of fits against least squares of NumPy and SciPy: time and held-out log-likelihood.

python scripts/benchmarks/bench_fit.py [ROWS ...]    (default: 10,000 and 100,000 solved rows)

All fits use solved rows of one head, drawn with replacement from a collection: peers the optimal
beta of misranked rows, as in the paper; ours the likelihood profiles of all rows. The score is the
mean log p of the target on another collection. The last line is the whole fit of a head: its rule,
and five folds of all kinds for the verdict. Processor seconds, the least of three calls; of slow
ones, of fewer.
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

from calibrate.core.rule import KINDS, Rule
from calibrate.fitting.fit import fit_head
from calibrate.fitting.fit_rule import FittedRule, fit_rule
from calibrate.fitting.options import LEAST_SQUARES, FitOptions
from calibrate.rows.collect import collect_from_head
from calibrate.rows.heads import load_head
from calibrate.rows.solve import SolvedInputs, solve_collection

HEAD = "max-retrieval"
SIZES = [16 << i for i in range(9)]
SETS = 1_024
REPEATS, ENOUGH = 3, 5.0  # calls, and seconds after which there is no further one
START = [0.0, 0.0, 0.0, 0.0, 1.0]
OPTIONS = FitOptions().resolved()


def polyfit(rows: SolvedInputs) -> FittedRule:
    used = rows.take(rows.fitted_by_least_squares())
    return _rule(used, np.polyfit(used.entropy, used.beta, 4))


def curve_fit_of_beta(rows: SolvedInputs) -> FittedRule:
    used = rows.take(rows.fitted_by_least_squares())
    powers, _ = curve_fit(lambda H, *c: np.polyval(c, H), used.entropy, used.beta, START)
    return _rule(used, powers)


def curve_fit_of_theta(rows: SolvedInputs) -> FittedRule:
    used = rows.take(rows.fitted_by_least_squares())
    powers, _ = curve_fit(
        lambda H, *c: 1 / np.maximum(np.polyval(c, H), 1), used.entropy,
        np.minimum(1 / used.beta, 1), [0.0, 0.0, 0.0, 0.0, 2.0],
    )  # fmt: skip
    return _rule(used, powers)


def _rule(used: SolvedInputs, powers: np.ndarray) -> FittedRule:
    domain = tuple(np.percentile(used.entropy, (0.5, 99.5)))
    return FittedRule(Rule(), tuple(powers), domain, None, len(powers))


FITS: dict[str, Callable[[SolvedInputs], FittedRule | None]] = {
    "numpy.polyfit": polyfit,
    "curve_fit of beta": curve_fit_of_beta,
    "curve_fit of theta": curve_fit_of_theta,
    **{
        f"ours, {name}": partial(fit_rule, procedure=name, options=OPTIONS)
        for name in (LEAST_SQUARES, *KINDS)
    },
    "ours, with its verdict": lambda rows: fit_head(rows, OPTIONS).rule,
}


def main() -> None:
    counts = [int(word) for word in sys.argv[1:]] or [10_000, 100_000]
    head = load_head(HEAD)
    with tempfile.TemporaryDirectory() as folder:
        collections = [
            collect_from_head(head, SIZES, SETS, seed, Path(folder) / str(seed)) for seed in (0, 1)
        ]
        fitted, held_out = map(solve_collection, collections)
    for count in counts:
        drawn = np.random.default_rng(0).integers(0, len(fitted.beta), count)
        compare(fitted.take(drawn), held_out)


def compare(rows: SolvedInputs, held_out: SolvedInputs) -> None:
    """Prints processor seconds, times numpy.polyfit's, and the held-out score of every fit."""
    n_finite = np.count_nonzero(rows.fitted_by_least_squares())
    print(f"{len(rows.beta):,} rows, {n_finite:,} of them misranked, with a finite optimum")
    print(f"{'':24} seconds  times polyfit  held-out log p")
    print(f"{'baseline':24} {'':22} {held_out.log_p(1.0).mean():15.4f}")
    first = None
    for name, make in FITS.items():
        seconds = []
        while len(seconds) < REPEATS and sum(seconds) < ENOUGH:
            start = time.process_time()
            rule = make(rows)
            seconds.append(time.process_time() - start)
        best = min(seconds)
        first = first or best
        score = held_out.log_p(rule.beta(held_out)).mean()
        print(f"{name:24} {best:7.3f} {best / first:14.1f} {score:15.4f}", flush=True)


if __name__ == "__main__":
    answer_help(__doc__)
    main()
