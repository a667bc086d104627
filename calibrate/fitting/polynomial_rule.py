"""The polynomial of solved rows: fitted to their optimal betas, and scored on rows left out."""

from dataclasses import dataclass

import numpy as np

from calibrate.core.rule_kinds import CONSTANT, POLYNOMIAL
from calibrate.errors import QualityError
from calibrate.evidence.metrics import LOG_P
from calibrate.evidence.prior import Gain, cautious_gain
from calibrate.evidence.scores import OWN, PLAIN, Evidence
from calibrate.fitting.groups import MIN_ROWS, N_BLOCKS, N_FOLDS
from calibrate.fitting.polynomial import PolynomialFit, fit_powers
from calibrate.fitting.row_problem import Candidate, RowProblem, scores_at
from calibrate.fitting.rule_fitting import Options, applied_beta
from calibrate.solver.optimal_beta import INTERIOR
from calibrate.solver.solved_rows import Rows
from calibrate.store.coefficients import Coefficients, Entry


@dataclass(frozen=True, eq=False)
class FittedPolynomial:
    """A polynomial of rows, and what it gains on rows that folds left out."""

    fit: Coefficients
    powers: PolynomialFit
    gain: Gain  # of log p over the baseline
    held_out: Evidence  # log p of the baseline and of OWN, by five folds
    constant: Candidate | None  # a constant, fitted to all rows; None where they do not allow it

    @property
    def verdict(self) -> str:
        """The gain of the rule, and the share of the optimal beta that the entropy explains."""
        mean, low, high, p = self.gain
        significant = (
            "" if self.gain.significant else f", not significantly better (p-value {p:.2g})"
        )
        return (
            f"polynomial gains {mean:.4f} nats of log-likelihood over the baseline (95 % interval "
            f"{low:.4f} to {high:.4f}){significant}; entropy explains "
            f"{self.powers.r_squared:.0%} of log beta in {self.powers.n_rows:,} rows{self._beside}"
        )

    @property
    def _beside(self) -> str:
        """The gain of a constant on the same folds."""
        if self.constant is None:
            return ""
        beta = self.constant.fit.only.coefficients[-1]
        return (
            f"; a constant (maximum likelihood, beta = {beta:.3g}) gains "
            f"{self.constant.gain.mean:.4f} nats"
        )


def polynomial_rule(rows: Rows, options: Options) -> tuple[Coefficients, PolynomialFit]:
    """The polynomial close to the optimal betas of those rows that have a finite one above 0.

    Raises:
      QualityError: fewer than 100 of them.
    """
    used = rows.take(options.usable(rows, POLYNOMIAL) & (rows.status == INTERIOR))
    if len(used.size) < MIN_ROWS:
        raise QualityError(
            f"{len(used.size)} misranked rows with a finite optimal beta, and the polynomial needs "
            f"{MIN_ROWS}; collect more sets, or larger ones"
        )
    return _fit(used, options)


def _fit(used: Rows, options: Options) -> tuple[Coefficients, PolynomialFit]:
    rule = options.rule(POLYNOMIAL)
    bounds = rule.min_beta, rule.max_beta
    weight = used.weight.astype(float)
    powers = fit_powers(used.entropy, used.beta, weight, bounds, options.loss)
    return Coefficients(rule, (Entry(powers.coefficients, powers.domain),)), powers


def score_polynomial(rows: Rows, options: Options) -> FittedPolynomial:
    """Fits the polynomial, and scores it on five folds of all rows, misranked or not.

    Raises:
      QualityError: as `polynomial_rule`.
    """
    fit, powers = polynomial_rule(rows, options)
    problem = RowProblem(rows, options)
    fold = (np.arange(N_BLOCKS) % N_FOLDS)[problem.block]
    beta = np.ones(len(fold))
    fitted = options.usable(problem.rows, POLYNOMIAL) & (problem.rows.status == INTERIOR)
    for left_out in range(N_FOLDS):
        others = fitted & (fold != left_out)
        if others.any():  # else softmax stays as it is there
            of_others, _ = _fit(problem.rows.take(others), options)
            beta[fold == left_out] = applied_beta(of_others, problem.rows, fold == left_out)
    evidence = problem.evidence.with_rule(OWN, scores_at(problem.rows, beta))
    gain = cautious_gain(evidence, OWN, PLAIN, options.prior_rows)
    log_p = np.array([evidence.scores(name, LOG_P) for name in (PLAIN, OWN)], np.float32)
    held_out = evidence.with_only((PLAIN, OWN), {LOG_P: log_p})
    return FittedPolynomial(fit, powers, gain, held_out, _constant(rows, options))


def _constant(rows: Rows, options: Options) -> Candidate | None:
    """A constant by maximum likelihood on all rows, scored on the same folds."""
    try:
        return RowProblem(rows, Options(min_beta=options.min_beta)).solve(CONSTANT)
    except QualityError:
        return None
