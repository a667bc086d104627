"""The best rule of a form, whether or not its objective is concave: `maximise`.

A concave objective has one maximum, to which any start leads, and a linear programme bounds the
optimality gap. Another is maximised from several starts, and no gap is claimed. The iterations are
those of `constrained_newton`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.core.rule_kinds import Form
from calibrate.fitting.constrained_newton import (
    MIXING_TOLERANCE,
    ROUGH_TOLERANCE,
    Constraint,
    FormConstraint,
    Objective,
    Optimum,
    Search,
    Slack,
)

TOLERANCE = 1e-5  # optimality gap of a solution: nats for a likelihood
N_CONSTANTS = 33  # betas that are tried to begin with
NEAR = 0.98  # weight of the optimum beside beta = low: larger ones are rounded up to 1


class Solution(NamedTuple):
    """The best rule of a form."""

    coefficients: np.ndarray  # (k,)
    value: float  # of the objective: nats for a likelihood
    gap: float  # the optimality gap, at most; NaN: unknown


def maximise(
    objectives: Sequence[Objective],
    form: Form,
    low: float,
    high: float,
    start: np.ndarray | None = None,
    tolerance: float | None = TOLERANCE,
    constraints: Sequence[Constraint | None] | None = None,
) -> list[Solution]:
    """The rule of a form with the smallest beta within TOLERANCE of the optimum, by objective.

    It is on the segment from the optimum to beta = low: where the data do not determine beta, it is
    the smallest. An objective that is not concave is maximised from the local maxima among
    constants and from a rule that follows each row's best constant, and the highest local maximum
    is taken: its optimality gap is not bounded.

    Args:
      objectives: of (rows,) beta within the bounds, such as folds of the same rows; they differ in
        their profiles alone, and are concave all or none.
      form: of the rule.
      low, high: bounds of beta.
      start: an earlier solution; other starts are then used only if they are better than the
        optimum that it leads to.
      tolerance: the largest gap to accept. None: a less exact solution.
      constraints: bounds of scores of the rule of each objective, concave in beta.
    Raises:
      ArithmeticError: a gap exceeds the tolerance, or cannot be bounded.
    """
    searches = [Search(objective, form, low, high, tolerance) for objective in objectives]
    slacks = [
        None if constraint is None else FormConstraint(constraint, form, low, high).slack
        for constraint in constraints or [None] * len(objectives)
    ]
    known = [[] for _ in searches] if start is None else _optima_from(start, searches, slacks)
    return [
        _smallest_beta_within_tolerance(search, slack, optima)
        for search, slack, optima in zip(searches, slacks, known, strict=True)
    ]


def _optima_from(
    start: np.ndarray, searches: Sequence[Search], slacks: Sequence[Slack | None]
) -> list[list[Optimum]]:
    """The local maximum that a start leads to, by search; without constraints all at once."""
    if any(slacks):
        pairs = zip(searches, slacks, strict=True)
        return [search.maximise(start[None], slack) for search, slack in pairs]
    objectives = [search.objective for search in searches]
    series = np.stack([objective.profile.series for objective in objectives])
    every = objectives[0]._replace(profile=objectives[0].profile._replace(series=series))
    together = searches[0]._replace(objective=every)
    return [[optimum] for optimum in together.maximise(np.tile(start, (len(series), 1)))]


def _smallest_beta_within_tolerance(
    search: Search,
    slack: Slack | None,
    known: list[Optimum],
) -> Solution:
    """The rule of smallest beta that is as good as the best optimum: a known one, or another."""
    objective, form, low, high, _ = search
    optima = known
    if not (known and objective.concave):
        least = known[0].value if known else -np.inf
        starts = _starts(objective, form, low, high)
        starts = starts[search.values(starts) > least]
        optima = known + (search.maximise(starts, slack) if len(starts) else [])
    converged = [optimum for optimum in optima if optimum.converged]
    if not converged:
        raise ArithmeticError(f"its optimality gap may be {optima[0].gap:.3g}")
    best = max(converged, key=lambda optimum: optimum.value)
    most = best.value + (np.nan_to_num(best.gap) if objective.concave else 0.0)
    lowest, direction = low * form.ones, form.design @ best.c - low

    def slack_of_tolerance(weight: np.ndarray) -> np.ndarray:
        """At weights of the best rule beside beta = low; not negative within the tolerance."""
        betas = np.clip(low + np.multiply.outer(weight, direction), low, high)
        return objective.values(betas) - most + TOLERANCE

    c = lowest + _smallest_weight(slack_of_tolerance, objective.concave) * (best.c - lowest)
    value = float(search.values(c))
    return Solution(c, value, most - value if objective.concave else np.nan)


def _starts(objective: Objective, form: Form, low: float, high: float) -> np.ndarray:
    """(m, k) coefficients to start from: of a concave objective one rule, else several."""
    betas = np.geomspace(low, high, N_CONSTANTS)
    table = objective.of_constants(betas)
    total = table.sum(axis=0)
    if objective.concave:
        return np.outer(betas[np.argmax(total >= total.max() - TOLERANCE)], form.ones)
    constants = np.outer(betas[_local_maxima(total)], form.ones)
    # Rows that gain little by their best constant have as little weight in a rule that follows it.
    row_weight = np.sqrt(np.ptp(table, axis=1))
    row_beta = betas[table.argmax(axis=1)]
    middle = math.sqrt(low * high) * form.ones
    target = np.linalg.lstsq(row_weight[:, None] * form.design, row_weight * row_beta)[0]
    direction = target - middle
    sides, bounds = form.sides()
    slack, rate = sides @ middle - bounds, -sides @ direction
    steps = slack[rate > 0] / rate[rate > 0]
    return np.vstack([constants, middle + min([1.0, *steps]) * direction])


def _local_maxima(values: np.ndarray) -> list[int]:
    """The indices of local maxima that a dip sets apart, the highest first."""
    maxima: list[int] = []
    beside = np.pad(values, 1, constant_values=-np.inf)
    tops = np.flatnonzero((values >= beside[:-2]) & (values >= beside[2:]))
    for i in tops[np.argsort(-values[tops], kind="stable")]:
        dips = (values[min(i, j) : max(i, j) + 1].min() for j in maxima)
        if all(dip < values[i] - ROUGH_TOLERANCE for dip in dips):
            maxima.append(int(i))
    return maxima


def _smallest_weight(slack: Callable[[np.ndarray], np.ndarray], concave: bool) -> float:
    """The least weight of a rule, beside beta = low, at which the slack is not negative."""
    from scipy.optimize import brentq

    weights = np.array([0.0, NEAR]) if concave else np.linspace(0, NEAR, N_CONSTANTS)
    enough = np.flatnonzero(slack(weights) >= 0)
    if not len(enough):
        return 1.0
    first, tolerance = int(enough[0]), MIXING_TOLERANCE
    if first == 0:
        return 0.0
    root = float(brentq(slack, weights[first - 1], weights[first], xtol=tolerance))
    return float(min(root + tolerance, weights[first]))  # the root may fall short
