"""Fitting one rule to the inputs of a head: by maximum likelihood, or by the paper's procedure."""

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.core.rule import CONSTANT, DEGREE, POLYNOMIAL, Rule
from calibrate.errors import QualityError
from calibrate.fitting.fitted_rule import FittedRule
from calibrate.fitting.options import LEAST_SQUARES, LIKELIHOOD, FitOptions
from calibrate.fitting.smoothed_fit import fit_smoothed
from calibrate.solver.solved_rows import Rows


def fit_rule(rows: Rows, procedure: str, options: FitOptions, has_slope: bool = True) -> FittedRule:
    """Fits a rule to solved rows.

    Args:
      rows: of one head, of positive weight.
      procedure: a kind of rule, fitted by maximum likelihood; or "least-squares".
      options: resolved; a procedure of the other loss has the defaults of that.
      has_slope: see `smoothed_fit.fit_smoothed`.
    Raises:
      QualityError: too few misranked rows for least squares, or no row above the threshold.
    """
    with threadpool_limits(1):  # sums of several threads differ in their last bits
        loss = LEAST_SQUARES if procedure == LEAST_SQUARES else LIKELIHOOD
        if options.loss != loss:  # a rival of the fit has the defaults of its loss
            options = FitOptions(loss=loss, seed=options.seed).resolved()
        if loss == LEAST_SQUARES:
            return fit_paper(rows, options.rule(POLYNOMIAL))
        rule = options.rule(procedure)
        above = rows.take(rows.entropy > rule.min_entropy) if rule.min_entropy > 0 else rows
        if not above.weight.any():
            raise QualityError(f"no input has an entropy above {rule.min_entropy:g} nats")
        return fit_smoothed(above, procedure, rule, options.seed, has_slope)


def fit_best_constant(rows: Rows) -> float:
    """The constant of highest likelihood within the default bounds."""
    weighted = rows.take(rows.weight > 0)
    return fit_rule(weighted, CONSTANT, FitOptions().resolved()).coefficients[0]


def fit_paper(rows: Rows, rule: Rule) -> FittedRule:
    """The paper's procedure: numpy.polyfit of the optimal beta on the entropy of misranked rows.

    Nothing is clipped before the fit; the guards of the rule bound beta where it is applied.

    Reference: Velickovic et al. 2024, appendix B.
    """
    used = rows.take(rows.fitted_by_least_squares())
    if len(np.unique(used.entropy)) <= DEGREE:
        raise QualityError(
            f"the misranked inputs have {len(np.unique(used.entropy))} different entropies, and a "
            f"polynomial of degree {DEGREE} needs more; collect more inputs"
        )
    low, high = float(used.entropy.min()), float(used.entropy.max())
    powers = np.polyfit(used.entropy, used.beta, DEGREE, w=np.sqrt(used.weight))
    return FittedRule(rule, tuple(map(float, powers)), (low, high), None, DEGREE + 1.0)
