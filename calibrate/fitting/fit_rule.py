"""Fitting a rule to the inputs of a head: by maximum likelihood, or by the paper's least squares.

A procedure is a kind of rule, which is fitted by penalised maximum likelihood (`smoothed_fit.py`),
or "least-squares". The penalty lambda of each kind is chosen here, by folds of whole groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.core.rule import CONSTANT, DEGREE, POLYNOMIAL, TERMS, Rule, beta_of
from calibrate.errors import QualityError
from calibrate.evidence.estimate import estimate
from calibrate.fitting.options import LEAST_SQUARES, LIKELIHOOD, FitOptions
from calibrate.fitting.smoothed_fit import (
    KIND_COLUMNS,
    MIN_RANGE,
    Design,
    degrees_of_freedom,
    fit_constant_beta,
    make_design,
    make_likelihood,
)
from calibrate.rows.solve import SolvedInputs
from calibrate.store.coefficient_file import Entry

PENALTIES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0)  # the values of lambda that are tried
N_FOLDS = 5
MIN_GROUPS_OF_SLOPE = 20  # with fewer groups of rows, no slope is fitted
MAX_FLOAT32_ERROR = 0.01  # of beta on the domain, between plain powers and the Legendre form
GRID = 129  # points of each variable, at which this is checked
LEAST_R_SQUARED = 1e-9  # less is rounding
AT_BOUND = 0.99  # beta is at a bound if it is within 1 % of it


@dataclass(frozen=True)
class FittedRule:
    """A rule in numbers.

    Attributes:
      rule: its kind and guards.
      coefficients, domain: as in a coefficient file.
      penalty: lambda of the smoothed fit, inf where the rule is a constant; None of least squares.
      degrees_of_freedom: effective ones.
    """

    rule: Rule
    coefficients: tuple[float, ...]
    domain: tuple[float, ...]
    penalty: float | None
    degrees_of_freedom: float

    def entry(self, layer: int | None = None, head: int | None = None) -> Entry:
        """The rule as an entry of a fit."""
        return Entry(self.coefficients, self.domain, layer, head)

    def beta(self, rows: SolvedInputs) -> np.ndarray:
        """(rows,) beta of each row."""
        log_n = np.log(rows.n)
        beta = beta_of(rows.entropy, log_n, self.coefficients, self.domain, self.rule, np)
        return np.broadcast_to(beta, rows.entropy.shape)

    def bound_reached(self, rows: SolvedInputs) -> str:
        """The bound that beta reaches in most rows by weight, "min" or "max"; else ""."""
        beta, share = self.beta(rows), rows.weight / rows.weight.sum()
        if share @ (beta >= AT_BOUND * self.rule.max_beta) > 0.5:
            return "max"
        return "min" if share @ (beta <= self.rule.min_beta / AT_BOUND) > 0.5 else ""

    def r_squared(self, rows: SolvedInputs) -> float | None:
        """R^2 of log beta: 1 - Var(log beta* - log beta) / Var(log beta*).

        It is of the misranked rows with a finite optimal beta*; None where these do not vary.
        """
        used = rows.take(rows.fitted_by_least_squares())
        if not len(used.beta):
            return None
        share = used.weight / used.weight.sum()
        optimal = np.log(used.beta)
        residual = optimal - np.log(self.beta(used))
        total, rest = (share @ (values - share @ values) ** 2 for values in (optimal, residual))
        if not total > 0:
            return None
        r_squared = float(1 - rest / total)
        return 0.0 if abs(r_squared) < LEAST_R_SQUARED else r_squared


def fit_rule(
    rows: SolvedInputs, procedure: str, options: FitOptions, has_slope: bool = True
) -> FittedRule:
    """Fits one rule to solved rows; see `fit_rules`.

    Raises:
      QualityError: too few misranked rows for least squares, or no row above the threshold.
    """
    rules = fit_rules(rows, [procedure], options, has_slope)
    if not rules:
        raise QualityError(_find_obstacle(rows, procedure, options))
    return rules[procedure]


def fit_rules(
    rows: SolvedInputs, procedures: Sequence[str], options: FitOptions, has_slope: bool = True
) -> dict[str, FittedRule]:
    """Fits a rule by each procedure to the same rows; leaves out those that cannot be fitted.

    Args:
      rows: of one head, of positive weight.
      procedures: kinds of rule, fitted by maximum likelihood; or "least-squares".
      options: resolved; a procedure of the other loss has the defaults of that loss.
      has_slope: False makes every rule of likelihood a constant; see `can_have_slope`.
    Returns:
      By procedure.
    """
    guards = {
        name: _guards(name, options)
        for name in procedures
        if not _find_obstacle(rows, name, options)
    }
    fitted = {}
    with threadpool_limits(1):  # sums of several threads differ in their last bits
        if LEAST_SQUARES in guards:
            fitted[LEAST_SQUARES] = fit_least_squares(rows, guards.pop(LEAST_SQUARES))
        for threshold in sorted({rule.min_entropy for rule in guards.values()}):
            rules = [rule for rule in guards.values() if rule.min_entropy == threshold]
            above = rows.take(rows.entropy > threshold) if threshold > 0 else rows
            penalties = choose_penalties(above, rules, options.seed, has_slope)
            design, constant = make_design(above), fit_constant_beta(above, rules[0].bounds)
            for rule in rules:
                fitted[rule.kind] = fit_smoothed(
                    above, rule, penalties[rule.kind], design, constant
                )
    return fitted


def fit_best_constant(rows: SolvedInputs) -> float:
    """The constant beta of highest likelihood within the default bounds."""
    weighted = rows.take(rows.weight > 0)
    return fit_rule(weighted, CONSTANT, FitOptions().resolved()).coefficients[0]


def _guards(procedure: str, options: FitOptions) -> Rule:
    """The guards of a procedure's rule."""
    loss = LEAST_SQUARES if procedure == LEAST_SQUARES else LIKELIHOOD
    if options.loss != loss:
        options = FitOptions(loss=loss).resolved()
    return options.rule(POLYNOMIAL if procedure == LEAST_SQUARES else procedure)


def _find_obstacle(rows: SolvedInputs, procedure: str, options: FitOptions) -> str:
    """The reason why a procedure cannot be fitted to rows; "" if it can."""
    if procedure == LEAST_SQUARES:
        n_entropies = len(np.unique(rows.entropy[rows.fitted_by_least_squares()]))
        if n_entropies <= DEGREE:
            return (
                f"the misranked inputs have {n_entropies} different entropies, and a polynomial of "
                f"degree {DEGREE} needs more; collect more inputs"
            )
        return ""
    threshold = _guards(procedure, options).min_entropy
    if threshold > 0 and not rows.weight[rows.entropy > threshold].any():
        return f"no input has an entropy above {threshold:g} nats"
    return ""


def fit_least_squares(rows: SolvedInputs, rule: Rule) -> FittedRule:
    """The paper's procedure: numpy.polyfit of the optimal beta on the entropy of misranked rows.

    No optimal beta is clipped; the guards of the rule bound beta where it is applied.

    Reference: Velickovic et al. 2024, appendix B.
    """
    used = rows.take(rows.fitted_by_least_squares())
    powers = np.polyfit(used.entropy, used.beta, DEGREE, w=np.sqrt(used.weight))
    domain = float(used.entropy.min()), float(used.entropy.max())
    return FittedRule(rule, tuple(map(float, powers)), domain, None, DEGREE + 1.0)


def fit_smoothed(
    rows: SolvedInputs, rule: Rule, penalty: float, design: Design, constant: float
) -> FittedRule:
    """Fits a rule by penalised maximum likelihood.

    Where the file's plain powers are not exact enough in float32, lambda rises to the next of
    PENALTIES, and after the last to infinity.

    Args:
      rows: above the entropy threshold of the rule, if it has one; of positive weight.
      rule: its kind and guards.
      penalty: lambda; infinity gives the constant.
      design: of these rows.
      constant: their beta of highest likelihood.
    """
    domain = design.domain(rule)
    if penalty < math.inf:
        columns = design.columns(rows.entropy, np.log(rows.n))[:, KIND_COLUMNS[rule.kind]]
        likelihood = make_likelihood(rows, columns, constant, rule.bounds)
        solutions = likelihood.solve([larger for larger in PENALTIES if larger >= penalty])
        for larger in sorted(solutions):
            point = solutions[larger]
            terms = design.plain_coefficients(rule.kind, constant * point.c)
            if is_exact_in_float32(design, rule, terms, constant * point.c):
                freedom = degrees_of_freedom(point, larger)
                return FittedRule(rule, terms, domain, larger, freedom)
    level = tuple(constant if term == "1" else 0.0 for term in TERMS[rule.kind])
    return FittedRule(rule, level, domain, math.inf, 1.0)


def can_have_slope(rows: SolvedInputs) -> bool:
    """True if the rows come from enough groups for a rule with a slope."""
    return rows.n_groups() >= MIN_GROUPS_OF_SLOPE


def choose_penalties(
    rows: SolvedInputs, rules: Sequence[Rule], seed: int = 0, has_slope: bool = True
) -> dict[str, float]:
    """Chooses lambda of each kind by cross-validation.

    It is the largest lambda whose held-out log p is within one standard error of the best. Each of
    5 folds of whole groups is scored by rules that are fitted to the other four, with the ranges,
    means and constant of these. lambda is infinite where a slope cannot be seen: without misranked
    rows, or where a variable of the kind does not vary.

    Args:
      rows: see `fit_smoothed`.
      rules: of several kinds, with the same bounds of beta.
      seed: of the folds.
      has_slope: see `fit_rules`.
    Returns:
      By kind.
    """
    kinds = [rule.kind for rule in rules if has_slope and _can_see_slope(rows, rule)]
    if not kinds:
        return {rule.kind: math.inf for rule in rules}
    bounds = rules[0].bounds
    fold = deal_folds(rows, seed)
    log_p = {kind: np.empty((len(PENALTIES), len(fold))) for kind in kinds}
    for i in range(N_FOLDS):
        train, test = rows.take(fold != i), rows.take(fold == i)
        constant, design = fit_constant_beta(train, bounds), make_design(train)
        columns, test_columns = (
            design.columns(part.entropy, np.log(part.n)) for part in (train, test)
        )
        for kind in kinds:
            chosen = KIND_COLUMNS[kind]
            likelihood = make_likelihood(train, columns[:, chosen], constant, bounds)
            solutions = likelihood.solve(PENALTIES)
            for j, penalty in enumerate(PENALTIES):
                beta = constant * (test_columns[:, chosen] @ solutions[penalty].c)
                log_p[kind][j, fold == i] = test.log_p(beta)
    without_slope = {rule.kind: math.inf for rule in rules}
    return without_slope | {kind: _largest_within_one_error(log_p[kind], rows) for kind in kinds}


def _can_see_slope(rows: SolvedInputs, rule: Rule) -> bool:
    """True if the rows tell a slope: some are misranked, and every variable of the rule varies."""
    variables = []
    if rule.by_entropy:
        variables.append(rows.entropy)
    if rule.by_size:
        variables.append(np.log(rows.n))
    varies = all(np.ptp(values) > MIN_RANGE for values in variables)
    return bool(variables) and varies and bool(rows.misranked.any())


def _largest_within_one_error(log_p: np.ndarray, rows: SolvedInputs) -> float:
    """The largest of PENALTIES whose held-out log p (penalties, rows) is as good as the best.

    As good: the mean loss against the best is within one standard error, over groups, of that
    paired difference.
    """
    best = int(np.argmax(log_p @ rows.weight))
    losses = estimate(log_p[best] - log_p, rows.weight, rows.group)
    is_within = losses.mean <= np.nan_to_num(losses.error)
    return max(penalty for penalty, within in zip(PENALTIES, is_within, strict=True) if within)


def deal_folds(rows: SolvedInputs, seed: int = 0) -> np.ndarray:
    """(rows,) fold of each row, from 0 to N_FOLDS - 1; rows of one group share a fold.

    Groups are sorted by their largest n, mean entropy and mean log p at beta = 1. Each N_FOLDS
    successive groups go to different folds at random: so the folds are alike, and neither the order
    of the rows nor writing each row twice at half its weight changes them.
    """
    group = rows.group_index()
    n_groups = group.max(initial=-1) + 1
    largest = np.zeros(n_groups)
    np.maximum.at(largest, group, rows.n)
    total = np.bincount(group, rows.weight, n_groups)
    total = np.where(total > 0, total, 1)
    entropy, log_p = (
        np.bincount(group, rows.weight * values, n_groups) / total
        for values in (rows.entropy, rows.log_p(1.0))
    )
    order = np.lexsort([log_p, entropy, largest])
    rng = np.random.default_rng(seed)
    n_deals = -(-n_groups // N_FOLDS)
    deals = rng.permuted(np.tile(np.arange(N_FOLDS), (n_deals, 1)), axis=1).ravel()
    fold = np.empty(n_groups, int)
    fold[order] = deals[:n_groups]
    return np.asarray(fold[group])


def is_exact_in_float32(
    design: Design, rule: Rule, terms: tuple[float, ...], c: np.ndarray
) -> bool:
    """True if the plain powers of a file give the beta of the columns within 1 % in float32.

    A narrow domain far from 0 makes the powers cancel.

    Args:
      design, rule: of the fit.
      terms: the coefficients of the file.
      c: (columns of the kind,) the same rule in the columns.
    """
    axes = [np.linspace(v.low, v.high, GRID) for v in (design.entropy, design.log_n)]
    entropy, log_n = (points.ravel() for points in np.meshgrid(*axes))
    exact = design.columns(entropy, log_n)[:, KIND_COLUMNS[rule.kind]] @ c
    exact = np.clip(exact, rule.min_beta, rule.max_beta)
    in_float32 = beta_of(
        entropy.astype(np.float32),
        log_n.astype(np.float32),
        tuple(map(np.float32, terms)),
        tuple(map(np.float32, design.domain(rule))),
        rule._replace(min_entropy=0.0),
        np,
    )
    return bool((np.abs(in_float32 - exact) <= MAX_FLOAT32_ERROR * exact).all())
