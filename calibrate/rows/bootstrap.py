"""Bootstrap of a fit: standard errors, the band of its curve; and the learning curve."""

from functools import partial
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.maths.rule import beta_of
from calibrate.parallel.jobs import ONE_PROCESS, Jobs, run
from calibrate.rows.candidates import (
    N_FOLDS,
    Candidate,
    applied_beta,
    log_p_at,
    mean_by_size,
)
from calibrate.rows.model_selection import Choice
from calibrate.rows.rule_fitting import (
    MIN_ROWS,
    Options,
    Problem,
    plain_coefficients,
    solve_each,
    solve_problem,
    to_coefficients,
    usable_rows,
)
from calibrate.rows.weighting import N_BLOCKS

N_RESAMPLES = 200
INTERVAL = (2.5, 97.5)  # per cent
N_CHUNKS = 8  # of resamples; one is a task
BAND_POINTS = 65
JUST_ABOVE = 1e-6  # nats
SHARES = (5, 10, 20, 40, 80)  # blocks that a fit of the learning curve is made of


class Uncertainty(NamedTuple):
    """Of one rule."""

    standard_errors: tuple[float, ...]  # of the coefficients in plain powers
    # (points, 3): entropy or log n; 95 % bootstrap interval of beta. None of a rule of both.
    band: np.ndarray | None


class LearningPoint(NamedTuple):
    """A fit to some of the rows, on rows of another fold."""

    rows: int
    log_p: float  # mean, sizes equal, nats


def bootstrap(candidate: Candidate, jobs: Jobs = ONE_PROCESS) -> Uncertainty:
    """Fits to blocks that are drawn with replacement, of those that have rows.

    Args:
      candidate: the rule.
      jobs: where it runs; the result does not depend on it.
    """
    problem, rng = candidate.problem, np.random.default_rng(1)
    blocks = problem.data.blocks
    used = len(blocks)
    drawn = np.zeros((N_RESAMPLES, N_BLOCKS))
    drawn[:, blocks] = rng.multinomial(used, [1 / used] * used, N_RESAMPLES)
    chunks = np.array_split(drawn, N_CHUNKS)
    tasks = [partial(_refit, problem, candidate.solution, chunk) for chunk in chunks]
    solutions = np.concatenate(run(tasks, jobs))
    powers = np.array([plain_coefficients(problem, c) for c in solutions])
    errors = tuple(float(error) for error in powers.std(axis=0, ddof=1))
    return Uncertainty(errors, _band(problem, powers))


def _band(problem: Problem, powers: np.ndarray) -> np.ndarray | None:
    """Of (resamples, coefficients)."""
    if problem.rule.by_entropy and problem.rule.by_size:
        return None
    x = np.linspace(problem.domain[0], problem.domain[1], BAND_POINTS)
    x[0] = max(x[0], problem.rule.min_entropy + JUST_ABOVE)  # where the rule is on
    curves = [beta_of(x, x, tuple(p), problem.domain, problem.rule, np) for p in powers]
    low, high = np.percentile(curves, INTERVAL, axis=0)
    return np.stack([x, low, high], axis=1)


def _refit(problem: Problem, start: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    with threadpool_limits(1):  # sums of several threads differ in their last bits
        return solve_each(problem, drawn, start)


def learning_curve(choice: Choice, options: Options) -> list[LearningPoint]:
    """Held-out score against the number of rows: the mean of the folds; none of too few rows.

    Fewer groups than blocks cannot be cut into these shares: there is no curve.
    """
    least_sharp = choice.trade[0]  # others trade log p for sharpness
    rows, block, problem = choice.rows, choice.block, least_sharp.problem
    if len(np.unique(block)) < N_BLOCKS:
        return []
    n_usable = int(usable_rows(rows, problem.kind, options).sum())
    counts = {share: n_usable * share // N_BLOCKS for share in SHARES}
    log_p: dict[int, list[float]] = {s: [] for s, count in counts.items() if count >= MIN_ROWS}
    for fold in range(N_FOLDS):
        others = np.flatnonzero(np.arange(N_BLOCKS) % N_FOLDS != fold)
        held_out = rows.take(block % N_FOLDS == fold)
        for share in log_p:
            block_weights = np.zeros(N_BLOCKS)
            block_weights[others[:share]] = 1
            solution = solve_problem(problem, block_weights, least_sharp.solution)
            beta = applied_beta(to_coefficients(problem, solution), held_out)
            log_p[share].append(mean_by_size(held_out, log_p_at(held_out, beta)))
    return [LearningPoint(counts[share], float(np.mean(log_p[share]))) for share in log_p]
