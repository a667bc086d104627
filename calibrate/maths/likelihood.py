"""Maximum likelihood: the rule of a given form under which targets are most probable.

The mean of log p_t(beta) is concave in the coefficients of a form, and what it must keep at some
rows is a concave constraint: there is one best value, and a linear programme bounds what a solution
can still gain. With sets of targets it is not concave, nor is the mean of p_t^q: these are climbed
from several starts, and no gap is claimed.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.maths import climbing
from calibrate.maths.rule_forms import Form

TOLERANCE = 1e-5  # how far a solution may be below the best: nats for a likelihood
N_CONSTANTS = 33  # betas that are tried to begin with
NEAR = 0.98  # of beta - 1: rules that are sharper than this share of the best are as sharp


class Solution(NamedTuple):
    """The best rule of a form."""

    coefficients: np.ndarray  # (k,)
    value: float  # of the objective: nats for a likelihood
    gap: float  # the best rule of the form gains at most this much more; NaN: unknown


def maximise(
    objectives: Sequence[climbing.Objective],
    form: Form,
    low: float,
    high: float,
    start: np.ndarray | None = None,
    tolerance: float | None = TOLERANCE,
    held: Sequence[climbing.Constraint | None] | None = None,
) -> list[Solution]:
    """The least sharp rule of a form, within TOLERANCE of the best found, by objective.

    Less sharp is on the straight way from the rule found to beta = low: where the data do not tell
    one beta from another, beta is the least of them. An objective that is not concave is climbed
    from the peaks among constants and from a rule that follows each row's best constant, and the
    highest peak is kept: nothing bounds what a rule in between could gain.

    Args:
      objectives: of (rows,) beta within the bounds, such as folds of the same rows; they differ in
        their profiles alone, and are concave all or none.
      form: of the rule.
      low, high: bounds of beta.
      start: an earlier solution; others are then climbed from only if they are better than what it
        leads to.
      tolerance: the largest gap to accept. None: a less exact solution.
      held: scores that the rule of each objective must keep, concave in beta.
    Raises:
      ArithmeticError: a gap exceeds the tolerance, or cannot be bounded.
    """
    searches = [climbing.Search(objective, form, low, high, tolerance) for objective in objectives]
    held = held or [None] * len(objectives)
    keeps = [
        None if one is None else climbing.constraint_of_coefficients(one, form, low, high)
        for one in held
    ]
    each = list(zip(searches, keeps, strict=True))
    if start is None:
        found: list[list[climbing.Optimum]] = [[] for _ in each]
    elif any(keeps):
        found = [search.maximise(start[None], keep) for search, keep in each]
    else:
        series = np.stack([objective.profile.series for objective in objectives])
        every = objectives[0]._replace(profile=objectives[0].profile._replace(series=series))
        peaks = searches[0]._replace(objective=every).maximise(np.tile(start, (len(series), 1)))
        found = [[peak] for peak in peaks]
    return [
        _smallest_beta_within_tolerance(*one, peaks) for one, peaks in zip(each, found, strict=True)
    ]


def _smallest_beta_within_tolerance(
    search: climbing.Search, keep: climbing.Slack | None, found: list[climbing.Optimum]
) -> Solution:
    """The least sharp rule that is as good as the best peak: of those found, or from elsewhere."""
    objective, form, low, high, _ = search
    if not (found and objective.concave):
        least = found[0].value if found else -np.inf
        starts = _starts(objective, form, low, high)
        starts = starts[search.values(starts) > least]
        found = found + (search.maximise(starts, keep) if len(starts) else [])
    peaks = [peak for peak in found if peak.found]
    if not peaks:
        raise ArithmeticError(f"it may be short of the best by {found[0].gap:.3g}")
    peak = max(peaks, key=lambda peak: peak.value)
    most = peak.value + (np.nan_to_num(peak.gap) if objective.concave else 0.0)
    plain, way = low * form.ones, form.design @ peak.c - low

    def spare(share: np.ndarray) -> np.ndarray:
        at_shares = np.clip(low + np.multiply.outer(share, way), low, high)
        return objective.values(at_shares) - most + TOLERANCE

    c = plain + _smallest_share(spare, objective.concave) * (peak.c - plain)
    reached = float(search.values(c))
    return Solution(c, reached, most - reached if objective.concave else np.nan)


def _starts(objective: climbing.Objective, form: Form, low: float, high: float) -> np.ndarray:
    """(m, k) coefficients to climb from: of a concave objective one rule, else several."""
    betas = np.geomspace(low, high, N_CONSTANTS)
    table = objective.of_constants(betas)
    total = table.sum(axis=0)
    if objective.concave:
        return np.outer(betas[np.argmax(total >= total.max() - TOLERANCE)], form.ones)
    constants = np.outer(betas[_peaks(total)], form.ones)
    # Rows that gain little by their best constant have as little say in a rule that follows them.
    say = np.sqrt(np.ptp(table, axis=1))
    aim = betas[table.argmax(axis=1)]
    middle = math.sqrt(low * high) * form.ones
    way = np.linalg.lstsq(say[:, None] * form.design, say * aim)[0] - middle
    sides, bounds = form.sides()
    room, fall = sides @ middle - bounds, -sides @ way
    steps = room[fall > 0] / fall[fall > 0]
    return np.vstack([constants, middle + min([1.0, *steps]) * way])


def _peaks(values: np.ndarray) -> list[int]:
    """The indices of local maxima that a dip sets apart, the highest first."""
    peaks: list[int] = []
    beside = np.pad(values, 1, constant_values=-np.inf)
    tops = np.flatnonzero((values >= beside[:-2]) & (values >= beside[2:]))
    for i in tops[np.argsort(-values[tops], kind="stable")]:
        dips = (values[min(i, j) : max(i, j) + 1].min() for j in peaks)
        if all(dip < values[i] - climbing.ROUGH_TOLERANCE for dip in dips):
            peaks.append(int(i))
    return peaks


def _smallest_share(spare: Callable[[np.ndarray], np.ndarray], concave: bool) -> float:
    """The first share of the straight way from beta = low to a rule that has something to spare."""
    from scipy.optimize import brentq

    shares = np.array([0.0, NEAR]) if concave else np.linspace(0, NEAR, N_CONSTANTS)
    enough = np.flatnonzero(spare(shares) >= 0)
    if not len(enough):
        return 1.0
    first = int(enough[0])
    if first == 0:
        return 0.0
    root = float(brentq(spare, shares[first - 1], shares[first], xtol=climbing.SHARE))
    return float(min(root + climbing.SHARE, shares[first]))  # the root may fall short
