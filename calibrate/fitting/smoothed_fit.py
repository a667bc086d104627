"""The smoothed fit: maximum likelihood with a penalty towards the best constant.

    minimise  - weighted mean of log p(beta) + lambda sum over k >= 1 of c_k^2

over the coefficients c of a `Design`, with b0 the likelihood's constant. lambda is chosen by 5
folds of whole groups: the largest whose held-out log-likelihood is within one standard error of
the best. At lambda = infinity the rule is the constant b0.
"""

import math
from typing import NamedTuple

import numpy as np

from calibrate.core.rule import CONSTANT, TERMS, Rule, beta_of
from calibrate.evidence.estimate import estimate
from calibrate.fitting.design import MIN_RANGE, Design
from calibrate.fitting.fitted_rule import FittedRule
from calibrate.fitting.folds import N_FOLDS, deal_folds
from calibrate.solver.likelihood_profile import Profile
from calibrate.solver.solved_rows import Rows

PENALTIES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0)
MIN_GROUPS_OF_SLOPE = 20  # with fewer, no slope is fitted
MAX_ROUNDING = 0.01  # of beta, by which plain powers in float32 may differ on the domain
GRID = 129  # points of each variable, at which this is checked
# Newton's method.
MAX_STEPS = 100
LEAST_GAIN = 1e-12  # nats, predicted of the last step
ARMIJO = 0.1  # share of the predicted gain that a step must have
MIN_LENGTH = 1e-6  # of a step
FLAT = 1e-12  # least curvature, in times of the largest
FIRST_SLOPES = (0.0, 0.3, -0.3)  # c_1 of the starts where the likelihood is not concave


class Problem(NamedTuple):
    """A penalised likelihood: a function of the coefficients c of a design."""

    profile: Profile
    share: np.ndarray  # (rows,) of the weight
    columns: np.ndarray  # (rows, k), the first of ones
    constant: float  # b0
    bounds: tuple[float, float]

    @classmethod
    def of(
        cls, rows: Rows, design: Design, constant: float, bounds: tuple[float, float]
    ) -> "Problem":
        """The problem of some rows."""
        columns = design.columns(rows.entropy, np.log(rows.items))
        share = rows.weight / rows.weight.sum()
        return cls(rows.profile, share, columns, constant, bounds)

    def loss(self, c: np.ndarray, penalty: float) -> tuple[float, np.ndarray, np.ndarray]:
        """The mean NLL plus the penalty, with its gradient and Hessian in c."""
        raw = self.constant * (self.columns @ c)
        low, high = self.bounds
        value, slope, curvature = self.profile.derivatives(np.clip(raw, low, high))
        moves = self.share * ((raw > low) & (raw < high)) * self.constant
        smooth = np.full(len(c), 2 * penalty)
        smooth[0] = 0.0  # the level is free
        gradient = smooth * c - (moves * slope) @ self.columns
        weighted = self.columns * (moves * self.constant * curvature)[:, None]
        hessian = np.diag(smooth) - self.columns.T @ weighted
        return float(smooth @ c**2 / 2 - self.share @ value), gradient, hessian

    def minimise(self, start: np.ndarray, penalty: float) -> np.ndarray:
        """A local minimum, from a start, by Newton's method with backtracking.

        Negative eigenvalues of the Hessian count by their size. SciPy's trust-exact ends at the
        same points and takes 2.3 times as long for 600 rows, 1.4 times for 6,000.
        """
        c, (value, gradient, hessian) = start, self.loss(start, penalty)
        for _ in range(MAX_STEPS):
            sizes, axes = np.linalg.eigh(hessian)
            sizes = np.maximum(np.abs(sizes), FLAT * np.abs(sizes).max(initial=FLAT))
            step = -axes @ ((axes.T @ gradient) / sizes)
            gain, length = -float(gradient @ step), 1.0
            if gain < LEAST_GAIN:
                break
            after = self.loss(c + step, penalty)
            while after[0] > value - ARMIJO * length * gain and length > MIN_LENGTH:
                length /= 2
                after = self.loss(c + length * step, penalty)
            if after[0] >= value:
                break
            c, (value, gradient, hessian) = c + length * step, after
        return c

    def solve(self, penalties: tuple[float, ...]) -> dict[float, np.ndarray]:
        """The best coefficients at each penalty: from the largest on, each starts at the last."""
        zero = np.zeros(self.columns.shape[1])
        zero[0] = 1.0
        solutions, last = {}, zero
        for penalty in sorted(penalties, reverse=True):
            starts = [last]
            if not self.profile.concave and len(zero) > 1:
                starts += [zero + np.eye(len(zero))[1] * slope for slope in FIRST_SLOPES]
            found = [self.minimise(start, penalty) for start in starts]
            last = min(found, key=lambda c: self.loss(c, penalty)[0])
            solutions[penalty] = last
        return solutions

    def degrees_of_freedom(self, c: np.ndarray, penalty: float) -> float:
        """The effective degrees of freedom: the trace of (A + 2 lambda D)^-1 A."""
        without = self.loss(c, 0.0)[2]
        with_penalty = self.loss(c, penalty)[2]
        return float(np.trace(np.linalg.pinv(with_penalty, rcond=1e-12) @ without))


def fit_smoothed(
    rows: Rows, kind: str, rule: Rule, seed: int = 0, has_slope: bool = True
) -> FittedRule:
    """Fits a rule of a kind to rows by penalised maximum likelihood.

    Args:
      rows: those that are fitted, of positive weight.
      kind: of rule, one of KINDS.
      rule: its guards.
      seed: of the folds that choose lambda.
      has_slope: False where the rows are too few groups for a slope: see `can_have_slope`.
    """
    bounds = rule.min_beta, rule.max_beta
    constant = fit_constant(rows, bounds)
    design = Design.of(kind, rows.entropy, np.log(rows.items), rows.weight)
    if kind != CONSTANT and has_slope and varies(rows, rule) and rows.misranked.any():
        problem = Problem.of(rows, design, constant, bounds)
        chosen = choose_penalty(rows, kind, rule, seed)
        solutions = problem.solve(tuple(x for x in PENALTIES if x >= chosen))
        if exact := _first_exact(design, rule, constant, solutions):
            c, penalty = exact
            coefficients = design.plain_coefficients(constant * c)
            freedom = problem.degrees_of_freedom(c, penalty)
            return FittedRule(rule, coefficients, design.domain, penalty, freedom)
    level = tuple(constant if term == "1" else 0.0 for term in TERMS[kind])
    return FittedRule(rule, level, design.domain, math.inf, 1.0)


def can_have_slope(rows: Rows) -> bool:
    """True if the rows come from enough groups for a rule with a slope."""
    return rows.n_groups() >= MIN_GROUPS_OF_SLOPE


def varies(rows: Rows, rule: Rule) -> bool:
    """True if the variables of the rule differ among the rows."""
    variables = [rows.entropy] * rule.by_entropy + [np.log(rows.items)] * rule.by_size
    return all(np.ptp(values) > MIN_RANGE for values in variables)


def fit_constant(rows: Rows, bounds: tuple[float, float]) -> float:
    """The likelihood's best constant.

    Where every row is ranked right the likelihood rises for ever: then log(N + 1) / m, the optimum
    of N + 1 pairs of items m apart, N ranked right and one wrong.
    """
    if not rows.misranked.any():
        margins = rows.margin[np.isfinite(rows.margin)]
        weight = rows.weight[np.isfinite(rows.margin)]
        if len(margins) and weight.any():
            m = float(np.quantile(margins, 0.5, method="inverted_cdf", weights=weight))
            if m > 0:
                return float(np.clip(math.log(rows.weight.sum() + 1) / m, *bounds))
    return _best_beta(rows, bounds)


def _best_beta(rows: Rows, bounds: tuple[float, float]) -> float:
    """The beta of highest log-likelihood: the best node, then SciPy between its neighbours."""
    from scipy.optimize import minimize_scalar

    total = rows.profile.weighted_sum(rows.weight / rows.weight.sum())
    betas = np.unique(np.clip(total.nodes(), *bounds))
    values = total.log_p_at_each(betas)
    best = int(np.argmax(values))
    low, high = np.log(betas[[max(best - 1, 0), min(best + 1, len(betas) - 1)]])
    found = minimize_scalar(
        lambda x: -total.log_p_at_each(np.exp([x]))[0],
        bounds=(low, high),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return float(np.exp(found.x)) if -found.fun > values[best] else float(betas[best])


def choose_penalty(rows: Rows, kind: str, rule: Rule, seed: int) -> float:
    """The largest lambda within one standard error of the best, by folds of whole groups."""
    bounds = rule.min_beta, rule.max_beta
    fold = deal_folds(rows, seed)
    held_out = np.empty((len(PENALTIES), len(fold)))
    for i in range(N_FOLDS):
        train, test = rows.take(fold != i), rows.take(fold == i)
        design = Design.of(kind, train.entropy, np.log(train.items), train.weight)
        problem = Problem.of(train, design, fit_constant(train, bounds), bounds)
        columns = design.columns(test.entropy, np.log(test.items))
        solutions = problem.solve(PENALTIES)
        for j, penalty in enumerate(PENALTIES):
            held_out[j, fold == i] = test.log_p(problem.constant * (columns @ solutions[penalty]))
    best = int(np.argmax(held_out @ rows.weight))
    losses = estimate(held_out[best] - held_out, rows.weight, rows.group)
    within = losses.mean <= np.nan_to_num(losses.error)
    return max(penalty for penalty, is_within in zip(PENALTIES, within, strict=True) if is_within)


def _first_exact(
    design: Design, rule: Rule, constant: float, solutions: dict[float, np.ndarray]
) -> tuple[np.ndarray, float] | None:
    """The solution of least penalty whose plain powers are exact enough in float32."""
    axes = [np.linspace(x.low, x.high, GRID) for x in (design.entropy, design.log_n)]
    entropy, log_n = (x.ravel() for x in np.meshgrid(*axes))
    for penalty in sorted(solutions):
        c = solutions[penalty]
        exact = np.clip(
            constant * (design.columns(entropy, log_n) @ c), rule.min_beta, rule.max_beta
        )
        terms = _float32(design.plain_coefficients(constant * c))
        guards = rule._replace(min_entropy=0.0)
        single = (entropy.astype(np.float32), log_n.astype(np.float32))
        rounded = beta_of(*single, terms, _float32(design.domain), guards, np)
        if (np.abs(rounded - exact) <= MAX_ROUNDING * exact).all():
            return c, penalty
    return None


def _float32(numbers: tuple[float, ...]) -> tuple[np.float32, ...]:
    return tuple(map(np.float32, numbers))
