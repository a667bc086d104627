"""Fitting the polynomial to optimal betas of a collection's rows: the paper's procedure."""

import numpy as np

from calibrate.core.rule_kinds import KINDS, SIMPLEST
from calibrate.datasets.rows import RowCollection
from calibrate.errors import QualityError
from calibrate.fitting.cross_validate import Candidate, fit_candidate
from calibrate.fitting.fit_result import FitResult, row_counts, with_metadata
from calibrate.fitting.options import Options, resolve_options
from calibrate.fitting.polynomial import PolynomialFit
from calibrate.fitting.rule_fitting import LeastSquaresFit, applied_beta
from calibrate.solver.solved_rows import Rows
from calibrate.store.coefficients import Coefficients


def fit_solved(collection: RowCollection, rows: Rows, name: str, options: Options) -> FitResult:
    """Fits the polynomial to the optimal betas of solved rows.

    Args:
      collection: whose rows these are.
      rows: all that it has, solved.
      name: of the fit.
      options: with a loss of the optimal beta.
    Raises:
      CalibrateError: an option is out of range.
      QualityError: fewer than 100 rows with a finite optimum.
    """
    options = resolve_options(collection, options)
    candidate = fit_candidate(rows, KINDS[options.kind or ""], options)
    assert isinstance(candidate.fitted, LeastSquaresFit)
    powers = candidate.fitted.powers
    counts = {"used": powers.n_rows, "at_bound": powers.n_at_bound}
    quality = {
        "rows": row_counts(collection, rows.count_by_status()) | counts,
        "residuals": _residuals(rows, candidate.fit, powers),
        "held_out": candidate.held_out.gain_records(),
        "verdict": _polynomial_verdict(candidate, powers, _constant(rows, options)),
    }
    fit = with_metadata(candidate.fit, name, collection, quality, options.record())
    return FitResult(fit, rows)


def _constant(rows: Rows, options: Options) -> Candidate | None:
    """A constant by maximum likelihood on all rows, scored on the same folds."""
    try:
        return fit_candidate(rows, SIMPLEST, Options(min_beta=options.min_beta))
    except QualityError:
        return None


def _polynomial_verdict(
    candidate: Candidate, powers: PolynomialFit, constant: Candidate | None
) -> str:
    """The gain of the rule, and the share of the optimal beta that the entropy explains."""
    mean, low, high, p = candidate.gain
    significant = (
        "" if candidate.gain.significant else f", not significantly better (p-value {p:.2g})"
    )
    text = (
        f"{candidate.kind} gains {mean:.4f} nats of log-likelihood over the baseline (95 % "
        f"interval {low:.4f} to {high:.4f}){significant}; entropy explains {powers.r_squared:.0%} "
        f"of log beta in {powers.n_rows:,} rows"
    )
    if constant is None:
        return text
    beta = constant.fit.only.coefficients[-1]
    return (
        f"{text}; a constant (maximum likelihood, beta = {beta:.3g}) gains "
        f"{constant.gain.mean:.4f} nats"
    )


def _residuals(rows: Rows, fit: Coefficients, powers: PolynomialFit) -> dict[str, float]:
    """The error of the fit on rows with a finite optimum; theta as it is applied, at most 1."""
    used = rows.interior()
    applied = applied_beta(fit, used)
    return {
        "beta_rms": float(np.sqrt(np.mean((applied - used.beta) ** 2))),
        "theta_rms": float(np.sqrt(np.mean((1 / applied - np.minimum(1 / used.beta, 1)) ** 2))),
        "log_beta_r_squared": powers.r_squared,
    }
