"""Uncertainty: how far a fit would move on other rows, and whether more rows would help."""

from functools import partial
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.fitting.model_selection import (
    INTERVAL,
    N_FOLDS,
    Candidate,
    Choice,
    applied_beta,
    mean_by_size,
    scores,
)
from calibrate.fitting.rule_fitting import (
    MIN_ROWS,
    N_BLOCKS,
    Options,
    Sample,
    as_rule,
    powers_of,
    solve,
    usable,
)
from calibrate.maths.rule import beta_of
from calibrate.parallel.jobs import ONE_PROCESS, Jobs, run

N_RESAMPLES = 200
N_CHUNKS = 8  # of resamples: what one job does at a time
BAND_POINTS = 65
JUST_ABOVE = 1e-6  # nats
SHARES = (5, 10, 20, 40, 80)  # blocks that a fit of the learning curve is made of


class Uncertainty(NamedTuple):
    """Of one rule."""

    standard_errors: tuple[float, ...]  # of the coefficients in plain powers
    band: np.ndarray  # (points, 3): entropy or log n; 95 % bootstrap interval of beta


class LearningPoint(NamedTuple):
    """A fit to some of the rows, on rows of another fold."""

    rows: int
    log_p: float  # mean, sizes alike, nats


def bootstrap(candidate: Candidate, jobs: Jobs = ONE_PROCESS) -> Uncertainty:
    """Fits to blocks drawn anew, with replacement.

    Args:
      candidate: the rule.
      jobs: where it is done; the result does not depend on it.
    """
    rng = np.random.default_rng(1)
    drawn = rng.multinomial(N_BLOCKS, [1 / N_BLOCKS] * N_BLOCKS, N_RESAMPLES).astype(float)
    chunks = np.array_split(drawn, N_CHUNKS)
    tasks = [partial(_refit, candidate.sample, candidate.solution, chunk) for chunk in chunks]
    solutions = np.concatenate(run(tasks, jobs))
    sample = candidate.sample
    powers = np.array([powers_of(sample, c) for c in solutions])
    x = np.linspace(*sample.domain, BAND_POINTS)
    x[0] = max(x[0], sample.rule.min_entropy + JUST_ABOVE)  # where the rule is on
    curves = [beta_of(x, x, tuple(p), sample.domain, sample.rule, np) for p in powers]
    low, high = np.percentile(curves, INTERVAL, axis=0)
    errors = tuple(float(error) for error in powers.std(axis=0, ddof=1))
    return Uncertainty(errors, np.stack([x, low, high], axis=1))


def _refit(sample: Sample, start: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    with threadpool_limits(1):  # sums of several threads differ in their last bits
        return np.array([solve(sample, of_block, start) for of_block in drawn])


def learning_curve(choice: Choice, options: Options) -> list[LearningPoint]:
    """Held-out score against the number of rows: the mean of the folds; none of too few rows."""
    rows, block, sample = choice.rows, choice.block, choice.chosen.sample
    fitted = block[usable(rows, sample.kind, options)]
    counts = {share: len(fitted) * share // N_BLOCKS for share in SHARES}
    found: dict[int, list[float]] = {s: [] for s, count in counts.items() if count >= MIN_ROWS}
    for fold in range(N_FOLDS):
        others = np.flatnonzero(np.arange(N_BLOCKS) % N_FOLDS != fold)
        held_out = rows.take(block % N_FOLDS == fold)
        for share in found:
            of_block = np.zeros(N_BLOCKS)
            of_block[others[:share]] = 1
            fit = as_rule(sample, solve(sample, of_block, choice.chosen.solution))
            log_p = scores(held_out, applied_beta(fit, held_out), "likelihood")
            found[share].append(mean_by_size(held_out, log_p))
    return [LearningPoint(counts[share], float(np.mean(found[share]))) for share in found]
