"""Constrained maximum likelihood: the coefficients of a rule under which targets are most probable.

`Regression` poses the problem, a kind of rule for pooled rows, and `maximise` solves it by the
iterations of `constrained_newton`.

The mean of log p_t(beta) is concave in the coefficients of a form, and bounds of log p at some rows
are concave constraints: the maximum is unique, and a linear programme bounds the optimality gap.
With sets of targets the mean is not concave, nor is that of p_t^q: these are maximised from several
starts, and no gap is claimed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from calibrate.core.rule import Rule, bare_value
from calibrate.core.rule_kinds import ENTROPY, SIZE, Form, RuleKind
from calibrate.errors import QualityError
from calibrate.fitting import constrained_newton
from calibrate.fitting.fit_polynomial import EXPORT_TOLERANCE
from calibrate.fitting.groups import ADVICE, N_BLOCKS
from calibrate.fitting.options import Options
from calibrate.fitting.pooled_rows import Pool
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry

RANK_TOLERANCE = 1e-9  # of the largest singular value of the design
TOLERANCE = 1e-5  # optimality gap of a solution: nats for a likelihood
N_CONSTANTS = 33  # betas that are tried to begin with
NEAR = 0.98  # weight of the optimum beside beta = low: larger ones are rounded up to 1


@dataclass(frozen=True, eq=False)
class Regression:
    """One kind of rule for pooled rows: its design and constraints, and their weights."""

    kind: RuleKind
    form: Form  # of the cells
    pool: Pool
    domain: tuple[float, ...]  # of entropies, log n, or both
    rule: Rule

    @classmethod
    def of(cls, kind: RuleKind, pool: Pool, options: Options) -> "Regression":
        """A kind of rule; raises QualityError if the rows do not determine such a rule."""
        lo, hi = pool.domain
        small, large = map(float, np.log(pool.n_items[[0, -1]]))
        if len(pool.n_items) < kind.min_sizes or (kind.by_entropy and not lo < hi):
            raise QualityError(
                f"the rows have {len(pool.n_items)} numbers of items and entropies of {lo:.4g} to "
                f"{hi:.4g} nats, too few for such a rule; collect sets of more sizes"
            )
        domain, rule = kind.domain((lo, hi), (small, large)), options.rule(kind.file_kind)
        if ENTROPY not in kind.needs:
            pool = pool.by_size() if SIZE in kind.needs else pool.at_once()
        bounds = rule.min_beta, rule.max_beta
        form = kind.form(pool.cells.entropy, pool.cells.log_n, domain, *bounds)
        regression = cls(kind, form, pool, domain, rule)
        if not regression.condition < 1 / RANK_TOLERANCE:
            raise QualityError(f"the rows do not determine a rule of kind {kind.name}; {ADVICE}")
        return regression

    @property
    def condition(self) -> float:
        """Condition number of the design: how unequally its coefficients are determined."""
        weight = self.pool.cell_weight
        singular = np.linalg.svd(np.sqrt(weight)[:, None] * self.form.design, compute_uv=False)
        full = len(singular) == self.form.design.shape[1] and singular[-1] > 0
        return float(singular[0] / singular[-1]) if full else np.inf

    def solve(
        self, block_weights: np.ndarray | None = None, start: np.ndarray | None = None
    ) -> np.ndarray:
        """The coefficients of the best rule of its form, (k,), in the form's own basis.

        Blocks have weights (N_BLOCKS,), or 1. With an earlier solution as `start`, this one is for
        a resample, and less exact. Raises QualityError if the solver failed.
        """
        weights = np.ones(N_BLOCKS) if block_weights is None else block_weights
        (c,) = self.solve_each(weights[None], start)
        return np.asarray(c)

    def solve_each(self, block_weights: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
        """(m, k): `solve` for each of some weights of blocks, (m, N_BLOCKS), at once."""
        objectives = [self.pool.objective(weights) for weights in block_weights]
        tolerance = TOLERANCE if start is None else None
        low, high = self.rule.min_beta, self.rule.max_beta
        constraints = [self.pool.constraint(weights) for weights in block_weights]
        try:
            solutions = maximise(objectives, self.form, low, high, start, tolerance, constraints)
        except ArithmeticError as failure:
            raise QualityError(
                f"the fit of a rule of kind {self.kind.name} did not converge: {failure}"
            ) from None
        return np.array([solution.coefficients for solution in solutions])

    def plain_coefficients(self, c: np.ndarray) -> tuple[float, ...]:
        """The coefficients of a rule in plain terms, in the order of `core/rule.py`."""
        return self.kind.file_coefficients(c, self.domain)

    def coefficients(self, c: np.ndarray) -> Coefficients:
        """The rule in plain powers, highest first."""
        return Coefficients(self.rule, (Entry(self.plain_coefficients(c), self.domain),))

    def checked_coefficients(self, c: np.ndarray) -> Coefficients:
        """The rule as a file holds it; QualityError if plain powers lose accuracy in float32."""
        fit, needs = self.coefficients(c), self.kind.needs
        if ENTROPY in needs:
            lo, hi = self.domain[:2]
            cells, exact = self.pool.cells, self.form.design @ c
            powers = [np.float32(p) for p in fit.only.coefficients]
            features = [np.clip(cells.entropy, lo, hi).astype(np.float32)]
            features += [cells.log_n.astype(np.float32)] if SIZE in needs else []
            rounded = bare_value(features, powers, self.kind.file_kind)
            if not (np.abs(rounded - exact) <= EXPORT_TOLERANCE * np.maximum(exact, 1)).all():
                raise QualityError(
                    f"the entropies {lo:.4g} to {hi:.4g} nats are too close together for powers of "
                    "them"
                )
        return fit


@dataclass(frozen=True, eq=False)
class LikelihoodFit:
    """A rule of constrained maximum likelihood."""

    regression: Regression
    solution: np.ndarray  # (k,) coefficients in the form's own basis
    coefficients: Coefficients

    @classmethod
    def of(cls, regression: Regression) -> "LikelihoodFit":
        """The best rule; raises QualityError if there is none that a file can hold."""
        solution = regression.solve()
        return cls(regression, solution, regression.checked_coefficients(solution))

    @property
    def kind(self) -> RuleKind:
        """The kind of the rule."""
        return self.regression.kind

    def refit(self, block_weights: np.ndarray) -> list[Coefficients]:
        """The same fit for each of some weights of blocks, (m, N_BLOCKS), less exact."""
        solutions = self.regression.solve_each(block_weights, self.solution)
        return [self.regression.coefficients(c) for c in solutions]


class Solution(NamedTuple):
    """The best rule of a form."""

    coefficients: np.ndarray  # (k,)
    value: float  # of the objective: nats for a likelihood
    gap: float  # the optimality gap, at most; NaN: unknown


def maximise(
    objectives: Sequence[constrained_newton.Objective],
    form: Form,
    low: float,
    high: float,
    start: np.ndarray | None = None,
    tolerance: float | None = TOLERANCE,
    constraints: Sequence[constrained_newton.Constraint | None] | None = None,
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
    searches = [
        constrained_newton.Search(objective, form, low, high, tolerance) for objective in objectives
    ]
    slacks = [
        None if x is None else constrained_newton.constraint_of_coefficients(x, form, low, high)
        for x in constraints or [None] * len(objectives)
    ]
    each = list(zip(searches, slacks, strict=True))
    if start is None:
        optima: list[list[constrained_newton.Optimum]] = [[] for _ in each]
    elif any(slacks):
        optima = [search.maximise(start[None], slack) for search, slack in each]
    else:
        series = np.stack([objective.profile.series for objective in objectives])
        every = objectives[0]._replace(profile=objectives[0].profile._replace(series=series))
        together = searches[0]._replace(objective=every)
        optima = [[x] for x in together.maximise(np.tile(start, (len(series), 1)))]
    return [
        _smallest_beta_within_tolerance(search, slack, known)
        for (search, slack), known in zip(each, optima, strict=True)
    ]


def _smallest_beta_within_tolerance(
    search: constrained_newton.Search,
    slack: constrained_newton.Slack | None,
    known: list[constrained_newton.Optimum],
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

    def within_tolerance(weight: np.ndarray) -> np.ndarray:
        betas = np.clip(low + np.multiply.outer(weight, direction), low, high)
        return objective.values(betas) - most + TOLERANCE

    c = lowest + _smallest_weight(within_tolerance, objective.concave) * (best.c - lowest)
    value = float(search.values(c))
    return Solution(c, value, most - value if objective.concave else np.nan)


def _starts(
    objective: constrained_newton.Objective, form: Form, low: float, high: float
) -> np.ndarray:
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
        if all(dip < values[i] - constrained_newton.ROUGH_TOLERANCE for dip in dips):
            maxima.append(int(i))
    return maxima


def _smallest_weight(slack: Callable[[np.ndarray], np.ndarray], concave: bool) -> float:
    """The least weight of a rule, beside beta = low, at which the slack is not negative."""
    from scipy.optimize import brentq

    weights = np.array([0.0, NEAR]) if concave else np.linspace(0, NEAR, N_CONSTANTS)
    enough = np.flatnonzero(slack(weights) >= 0)
    if not len(enough):
        return 1.0
    first, tolerance = int(enough[0]), constrained_newton.MIXING_TOLERANCE
    if first == 0:
        return 0.0
    root = float(brentq(slack, weights[first - 1], weights[first], xtol=tolerance))
    return float(min(root + tolerance, weights[first]))  # the root may fall short
