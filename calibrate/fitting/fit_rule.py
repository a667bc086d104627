"""Fitting a rule to the inputs of a head: by maximum likelihood, or by the paper's least squares.

A procedure is a kind of rule, which is fitted by penalised maximum likelihood
(`penalised_likelihood.py`), or "least-squares". `cross_validation.py` chooses the penalty lambda of
each kind.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.core.rule import CONSTANT, DEGREE, POLYNOMIAL, TERMS, RuleForm, beta_of
from calibrate.errors import QualityError
from calibrate.fitting.cross_validation import choose_penalties
from calibrate.fitting.options import LEAST_SQUARES, LIKELIHOOD, FitOptions
from calibrate.fitting.penalised_likelihood import (
    KIND_COLUMNS,
    PENALTIES,
    Design,
    degrees_of_freedom,
    fit_constant_beta,
    is_exact_in_float32,
    make_design,
    make_likelihood,
)
from calibrate.rows.solve import SolvedInputs
from calibrate.store.entries import Entry

MIN_GROUPS_OF_SLOPE = 20  # with fewer groups of rows, no slope is fitted
LEAST_R_SQUARED = 1e-9  # less is rounding
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

    def r_squared(self, solved: SolvedInputs) -> float | None:
        """R^2 of log beta: 1 - Var(log beta* - log beta) / Var(log beta*).

        It is of the misranked rows with a finite optimal beta*; None where these do not vary.
        """
        used = solved.take(solved.fitted_by_least_squares())
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
    solved: SolvedInputs, procedure: str, options: FitOptions, has_slope: bool = True
) -> FittedRule:
    """Fits one rule to solved rows; see `fit_rules`.

    Raises:
      QualityError: too few misranked rows for least squares, or no row above the threshold.
    """
    rules = fit_rules(solved, [procedure], options, has_slope)
    if not rules:
        raise QualityError(_find_obstacle(solved, procedure, options))
    return rules[procedure]


def fit_rules(
    solved: SolvedInputs, procedures: Sequence[str], options: FitOptions, has_slope: bool = True
) -> dict[str, FittedRule]:
    """Fits a rule by each procedure to the same rows; leaves out those that cannot be fitted.

    Args:
      solved: of one head, of positive weight.
      procedures: kinds of rule, fitted by maximum likelihood; or "least-squares".
      options: resolved; a procedure of the other loss has the defaults of that loss.
      has_slope: False makes every rule of likelihood a constant; see `can_have_slope`.
    Returns:
      By procedure.
    """
    forms = {
        procedure: _form(procedure, options)
        for procedure in procedures
        if not _find_obstacle(solved, procedure, options)
    }
    fitted = {}
    with threadpool_limits(1):  # sums of several threads differ in their last bits
        if LEAST_SQUARES in forms:
            fitted[LEAST_SQUARES] = fit_least_squares(solved, forms.pop(LEAST_SQUARES))
        for threshold in sorted({form.min_entropy for form in forms.values()}):
            of_threshold = [form for form in forms.values() if form.min_entropy == threshold]
            above = solved.take(solved.entropy > threshold) if threshold > 0 else solved
            penalties = choose_penalties(above, of_threshold, options.seed, has_slope)
            design, constant = make_design(above), fit_constant_beta(above, of_threshold[0].bounds)
            for form in of_threshold:
                fitted[form.kind] = fit_smoothed(
                    above, form, penalties[form.kind], design, constant
                )
    return fitted


def fit_best_constant(solved: SolvedInputs) -> float:
    """The constant beta of highest likelihood within the default bounds."""
    weighted = solved.take(solved.weight > 0)
    return fit_rule(weighted, CONSTANT, FitOptions().resolved()).coefficients[0]


def _form(procedure: str, options: FitOptions) -> RuleForm:
    """The form of a procedure's rule."""
    loss = LEAST_SQUARES if procedure == LEAST_SQUARES else LIKELIHOOD
    if options.loss != loss:
        options = FitOptions(loss=loss).resolved()
    return options.form(POLYNOMIAL if procedure == LEAST_SQUARES else procedure)


def _find_obstacle(solved: SolvedInputs, procedure: str, options: FitOptions) -> str:
    """The reason why a procedure cannot be fitted to rows; "" if it can."""
    if procedure == LEAST_SQUARES:
        n_entropies = len(np.unique(solved.entropy[solved.fitted_by_least_squares()]))
        if n_entropies <= DEGREE:
            return (
                f"the misranked inputs have {n_entropies} different entropies, and a polynomial of "
                f"degree {DEGREE} needs more; collect more inputs"
            )
        return ""
    threshold = _form(procedure, options).min_entropy
    if threshold > 0 and not solved.weight[solved.entropy > threshold].any():
        return f"no input has an entropy above {threshold:g} nats"
    return ""


def fit_least_squares(solved: SolvedInputs, form: RuleForm) -> FittedRule:
    """The paper's procedure: numpy.polyfit of the optimal beta on the entropy of misranked rows.

    No optimal beta is clipped; the guards of the form bound beta where it is applied.

    Reference: Velickovic et al. 2024, appendix B.
    """
    used = solved.take(solved.fitted_by_least_squares())
    powers = np.polyfit(used.entropy, used.beta, DEGREE, w=np.sqrt(used.weight))
    domain = float(used.entropy.min()), float(used.entropy.max())
    return FittedRule(form, tuple(map(float, powers)), domain, None, DEGREE + 1.0)


def fit_smoothed(
    solved: SolvedInputs, form: RuleForm, penalty: float, design: Design, constant: float
) -> FittedRule:
    """Fits a rule by penalised maximum likelihood.

    Where the file's plain powers are not exact enough in float32, lambda rises to the next of
    PENALTIES, and after the last to infinity.

    Args:
      solved: above the entropy threshold of the form, if it has one; of positive weight.
      form: its kind and guards.
      penalty: lambda; infinity gives the constant.
      design: of these rows.
      constant: their beta of highest likelihood.
    """
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


def can_have_slope(solved: SolvedInputs) -> bool:
    """True if the rows come from enough groups for a rule with a slope."""
    return solved.n_groups() >= MIN_GROUPS_OF_SLOPE
