"""Uncertainty of a fit: its refits to blocks of rows that are drawn with replacement."""

from functools import partial

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.core.rule import beta_of
from calibrate.fitting.groups import N_BLOCKS
from calibrate.fitting.maximum_likelihood import LikelihoodFit, Regression
from calibrate.parallel import ONE_PROCESS, Jobs, run

N_RESAMPLES = 200
INTERVAL = (2.5, 97.5)  # per cent
N_CHUNKS = 8  # of resamples; one is a task
BAND_POINTS = 65
JUST_ABOVE = 1e-6  # nats


def bootstrap(
    fitted: LikelihoodFit, jobs: Jobs = ONE_PROCESS, n_resamples: int | None = None
) -> tuple[list[float], np.ndarray | None]:
    """Fits to blocks that are drawn with replacement, of those that have rows.

    Args:
      fitted: the fit to all rows, from which the others start.
      jobs: processes that share the work; the result does not depend on them.
      n_resamples: N_RESAMPLES if None.
    Returns:
      Standard errors of the coefficients in plain powers; and (points, 3): entropy or log n, and
      the 95 % interval of beta there, None of a rule of both.
    """
    regression, rng = fitted.regression, np.random.default_rng(1)
    n_resamples = N_RESAMPLES if n_resamples is None else n_resamples
    blocks = regression.pool.blocks
    used = len(blocks)
    drawn = np.zeros((n_resamples, N_BLOCKS))
    drawn[:, blocks] = rng.multinomial(used, [1 / used] * used, n_resamples)
    chunks = np.array_split(drawn, N_CHUNKS)
    tasks = [partial(_solve_each, regression, fitted.solution, chunk) for chunk in chunks]
    solutions = np.concatenate(run(tasks, jobs))
    powers = np.array([regression.plain_coefficients(c) for c in solutions])
    return powers.std(axis=0, ddof=1).tolist(), _band(regression, powers)


def _band(regression: Regression, powers: np.ndarray) -> np.ndarray | None:
    """The interval of the curves of (resamples, coefficients)."""
    domain, rule = regression.domain, regression.rule
    if rule.depends_on_both:
        return None
    x = np.linspace(domain[0], domain[1], BAND_POINTS)
    if least := rule.min_entropy:
        x[0] = max(x[0], least + JUST_ABOVE)  # where the rule is on
    curves = [beta_of(x, x, tuple(p), domain, rule, np) for p in powers]
    low, high = np.percentile(curves, INTERVAL, axis=0)
    return np.stack([x, low, high], axis=1)


def _solve_each(regression: Regression, start: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    with threadpool_limits(1):  # sums of several threads differ in their last bits
        return regression.solve_each(drawn, start)
