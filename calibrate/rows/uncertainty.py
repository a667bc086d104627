"""How sure a fit is: standard errors and the band of its curve by bootstrap."""

from functools import partial

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.maths.rule import beta_of
from calibrate.parallel.jobs import ONE_PROCESS, Jobs, run
from calibrate.rows.groups import N_BLOCKS
from calibrate.rows.row_problem import Candidate
from calibrate.rows.rule_fitting import KindFit

N_RESAMPLES = 200
INTERVAL = (2.5, 97.5)  # per cent
N_CHUNKS = 8  # of resamples; one is a task
BAND_POINTS = 65
JUST_ABOVE = 1e-6  # nats


def bootstrap(
    candidate: Candidate, jobs: Jobs = ONE_PROCESS
) -> tuple[list[float], np.ndarray | None]:
    """Fits to blocks that are drawn with replacement, of those that have rows.

    Returns:
      Standard errors of the coefficients in plain powers; and (points, 3): entropy or log n, and
      the 95 % interval of beta there, None of a rule of both.
    """
    kind_fit, rng = candidate.kind_fit, np.random.default_rng(1)
    blocks = kind_fit.data.blocks
    used = len(blocks)
    drawn = np.zeros((N_RESAMPLES, N_BLOCKS))
    drawn[:, blocks] = rng.multinomial(used, [1 / used] * used, N_RESAMPLES)
    chunks = np.array_split(drawn, N_CHUNKS)
    tasks = [partial(_refit, kind_fit, candidate.solution, chunk) for chunk in chunks]
    solutions = np.concatenate(run(tasks, jobs))
    powers = np.array([kind_fit.plain_coefficients(c) for c in solutions])
    return powers.std(axis=0, ddof=1).tolist(), _band(kind_fit, powers)


def _band(kind_fit: KindFit, powers: np.ndarray) -> np.ndarray | None:
    """The interval of the curves of (resamples, coefficients)."""
    if kind_fit.rule.by_entropy and kind_fit.rule.by_size:
        return None
    x = np.linspace(kind_fit.domain[0], kind_fit.domain[1], BAND_POINTS)
    x[0] = max(x[0], kind_fit.rule.min_entropy + JUST_ABOVE)  # where the rule is on
    curves = [beta_of(x, x, tuple(p), kind_fit.domain, kind_fit.rule, np) for p in powers]
    low, high = np.percentile(curves, INTERVAL, axis=0)
    return np.stack([x, low, high], axis=1)


def _refit(kind_fit: KindFit, start: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    with threadpool_limits(1):  # sums of several threads differ in their last bits
        return kind_fit.solve_each(drawn, start)
