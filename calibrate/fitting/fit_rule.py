"""Fits one rule to the inputs of a head, by a procedure.

A procedure is a kind of rule, which is fitted by penalised maximum likelihood
(`penalised_likelihood.py`) with a penalty lambda that cross-validation chooses; or "least-squares"
(`least_squares.py`).
"""

import math
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.core.rule import CONSTANT, DEGREE, POLYNOMIAL, TERMS, RuleForm, beta_of
from calibrate.errors import QualityError
from calibrate.evidence.estimate import estimate
from calibrate.fitting.least_squares import fit_least_squares
from calibrate.fitting.options import LEAST_SQUARES, LIKELIHOOD, FitOptions
from calibrate.fitting.penalised_likelihood import (
    KIND_COLUMNS,
    MIN_RANGE,
    PENALTIES,
    degrees_of_freedom,
    fit_constant_beta,
    is_exact_in_float32,
    make_design,
    make_likelihood,
)
from calibrate.rows.solve import SolvedInputs
from calibrate.store.entries import Entry

N_FOLDS = 5
MIN_GROUPS_OF_SLOPE = 20  # with fewer groups of rows, no slope is fitted
AT_BOUND = 0.99  # beta is at a bound if it is within 1 % of it


@dataclass(frozen=True)
class FittedRule:
    """A rule in numbers.

    Attributes:
      form: its kind and guards.
      coefficients, domain: as in a coefficient file.
      penalty: lambda of the smoothed fit, inf where the rule is a constant; None of least squares.
      degrees_of_freedom: effective ones.
    """

    form: RuleForm
    coefficients: tuple[float, ...]
    domain: tuple[float, ...]
    penalty: float | None
    degrees_of_freedom: float

    def entry(self, layer: int | None = None, head: int | None = None) -> Entry:
        """The rule as an entry of a fit."""
        return Entry(self.coefficients, self.domain, layer, head)

    def beta(self, solved: SolvedInputs) -> np.ndarray:
        """(rows,) beta of each row."""
        log_n = np.log(solved.n)
        beta = beta_of(solved.entropy, log_n, self.coefficients, self.domain, self.form, np)
        return np.broadcast_to(beta, solved.entropy.shape)

    def bound_reached(self, solved: SolvedInputs) -> str:
        """The bound that beta reaches in most rows by weight, "min" or "max"; else ""."""
        beta, share = self.beta(solved), solved.weight / solved.weight.sum()
        if share @ (beta >= AT_BOUND * self.form.max_beta) > 0.5:
            return "max"
        return "min" if share @ (beta <= self.form.min_beta / AT_BOUND) > 0.5 else ""


def fit_rule(
    solved: SolvedInputs, procedure: str, options: FitOptions, has_slope: bool = True
) -> FittedRule:
    """Fits one rule to solved rows.

    Args:
      solved: of one head, of positive weight.
      procedure: a kind of rule, fitted by maximum likelihood; or "least-squares".
      options: resolved; a procedure of the other loss has the defaults of that loss.
      has_slope: False makes every rule of likelihood a constant; see `can_have_slope`.
    Raises:
      QualityError: too few misranked rows for least squares, or no row above the threshold.
    """
    loss = LEAST_SQUARES if procedure == LEAST_SQUARES else LIKELIHOOD
    if options.loss != loss:
        options = FitOptions(loss=loss, seed=options.seed).resolved()
    with threadpool_limits(1):  # sums of several threads differ in their last bits
        if loss == LEAST_SQUARES:
            form = options.form(POLYNOMIAL)
            return FittedRule(form, *fit_least_squares(solved), None, DEGREE + 1.0)
        form = options.form(procedure)
        if form.min_entropy > 0:
            solved = solved.take(solved.entropy > form.min_entropy)
        if not solved.weight.any():
            raise QualityError(f"no input has an entropy above {form.min_entropy:g} nats")
        penalty = choose_penalty(solved, form, options.seed) if has_slope else math.inf
        return fit_smoothed(solved, form, penalty)


def fit_best_constant(solved: SolvedInputs) -> float:
    """The constant beta of highest likelihood within the default bounds."""
    weighted = solved.take(solved.weight > 0)
    return fit_rule(weighted, CONSTANT, FitOptions().resolved()).coefficients[0]


def fit_smoothed(solved: SolvedInputs, form: RuleForm, penalty: float) -> FittedRule:
    """Fits a rule by penalised maximum likelihood.

    Where the file's plain powers are not exact enough in float32, lambda rises to the next of
    PENALTIES, and after the last to infinity.

    Args:
      solved: above the entropy threshold of the form, if it has one; of positive weight.
      form: its kind and guards.
      penalty: lambda; infinity gives the constant.
    """
    design, constant = make_design(solved), fit_constant_beta(solved, form.bounds)
    domain = design.domain(form)
    if penalty < math.inf:
        columns = design.columns(solved.entropy, np.log(solved.n))[:, KIND_COLUMNS[form.kind]]
        likelihood = make_likelihood(solved, columns, constant, form.bounds)
        solutions = likelihood.solve([larger for larger in PENALTIES if larger >= penalty])
        for larger in sorted(solutions):
            point = solutions[larger]
            terms = design.plain_coefficients(form.kind, constant * point.c)
            if is_exact_in_float32(design, form, terms, constant * point.c):
                freedom = degrees_of_freedom(point, larger)
                return FittedRule(form, terms, domain, larger, freedom)
    level = tuple(constant if term == "1" else 0.0 for term in TERMS[form.kind])
    return FittedRule(form, level, domain, math.inf, 1.0)


def choose_penalty(solved: SolvedInputs, form: RuleForm, seed: int = 0) -> float:
    """Chooses lambda by cross-validation.

    It is the largest lambda whose held-out log p is within one standard error of the best, over
    groups, of the paired difference. Each of 5 folds of whole groups is scored by rules that are
    fitted to the other four, with the ranges, means and constant of these. lambda is infinite where
    a slope cannot be seen: without misranked rows, or where a variable of the rule does not vary.

    Args:
      solved, form: see `fit_smoothed`.
      seed: of the folds.
    """
    variables = [solved.entropy] * form.by_entropy + [np.log(solved.n)] * form.by_size
    varies = variables and all(np.ptp(values) > MIN_RANGE for values in variables)
    if not varies or not solved.misranked.any():
        return math.inf
    fold, chosen = deal_folds(solved, seed), KIND_COLUMNS[form.kind]
    log_p = np.empty((len(PENALTIES), len(fold)))
    for i in range(N_FOLDS):
        train, test = solved.take(fold != i), solved.take(fold == i)
        constant, design = fit_constant_beta(train, form.bounds), make_design(train)
        columns, test_columns = (
            design.columns(part.entropy, np.log(part.n))[:, chosen] for part in (train, test)
        )
        solutions = make_likelihood(train, columns, constant, form.bounds).solve(PENALTIES)
        for j, penalty in enumerate(PENALTIES):
            log_p[j, fold == i] = test.log_p(constant * (test_columns @ solutions[penalty].c))
    best = int(np.argmax(log_p @ solved.weight))
    losses = estimate(log_p[best] - log_p, solved.weight, solved.group)
    is_within = losses.mean <= np.nan_to_num(losses.error)
    return max(penalty for penalty, within in zip(PENALTIES, is_within, strict=True) if within)


def can_have_slope(solved: SolvedInputs) -> bool:
    """True if the rows come from enough groups for a rule with a slope."""
    return solved.n_groups() >= MIN_GROUPS_OF_SLOPE


def deal_folds(solved: SolvedInputs, seed: int = 0) -> np.ndarray:
    """(rows,) fold of each row, from 0 to N_FOLDS - 1; rows of one group share a fold.

    Groups are sorted by their largest n, mean entropy and mean log p at beta = 1. Each N_FOLDS
    successive groups go to different folds at random: so the folds are alike, and neither the order
    of the rows nor writing each row twice at half its weight changes them.
    """
    group = solved.group_index()
    n_groups = group.max(initial=-1) + 1
    largest = np.zeros(n_groups)
    np.maximum.at(largest, group, solved.n)
    total = np.bincount(group, solved.weight, n_groups)
    total = np.where(total > 0, total, 1)
    entropy, log_p = (
        np.bincount(group, solved.weight * values, n_groups) / total
        for values in (solved.entropy, solved.log_p(1.0))
    )
    order = np.lexsort([log_p, entropy, largest])
    rng = np.random.default_rng(seed)
    n_deals = -(-n_groups // N_FOLDS)
    deals = rng.permuted(np.tile(np.arange(N_FOLDS), (n_deals, 1)), axis=1).ravel()
    fold = np.empty(n_groups, int)
    fold[order] = deals[:n_groups]
    return np.asarray(fold[group])
