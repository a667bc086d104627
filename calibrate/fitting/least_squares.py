"""The polynomial of the optimal betas of one head's rows, beside a constant, and its verdict."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calibrate.core.rule_kinds import OF_LEAST_SQUARES, SIMPLEST
from calibrate.errors import QualityError
from calibrate.evidence.evidence import OWN
from calibrate.fitting.cross_validate import Candidate, fit_candidate
from calibrate.fitting.fit_polynomial import PolynomialFit
from calibrate.fitting.fit_rule import LeastSquaresFit, applied_beta
from calibrate.fitting.options import Options
from calibrate.fitting.select import bound_note
from calibrate.fitting.verdict_clauses import margin_clause, without_gain
from calibrate.solver.solved_rows import Rows


@dataclass(frozen=True, eq=False)
class LeastSquaresResult:
    """The polynomial of a head, and what it is compared with.

    Attributes:
      polynomial: fitted by least squares to the rows with a finite optimum, scored on all.
      constant: by maximum likelihood on all rows, scored on the same folds; None if too few.
      powers: the polynomial and how well it describes the optimal betas.
      misranked_only: whether the collection keeps no other rows.
    """

    polynomial: Candidate
    constant: Candidate | None
    powers: PolynomialFit
    misranked_only: bool

    @property
    def candidates(self) -> list[Candidate]:
        """The rules that were compared, simplest first."""
        return [c for c in (self.constant, self.polynomial) if c is not None]

    @cached_property
    def verdict(self) -> str:
        """The gain of the polynomial, also at trained sizes, and what the entropy explains."""
        gain = self.polynomial.gain
        where = "on misranked rows, the only ones kept: " if self.misranked_only else ""
        clauses = [
            f"{where}{self.polynomial.kind} gains {gain.mean:.4f} nats of log-likelihood over the "
            f"baseline (95 % interval {gain.low:.4f} to {gain.high:.4f})"
            + ("" if gain.significant else f", {without_gain(gain)}"),
            *self._trained(),
            f"{_explained(self.powers.r_squared)} of log beta in {self.powers.n_rows:,} rows",
        ]
        if self.constant is not None:
            beta = self.constant.coefficients.only.coefficients[-1]
            which = " of the same rows" if self.misranked_only else ""
            clauses.append(
                f"a constant (maximum likelihood{which}, beta = {beta:.3g}) gains "
                f"{self.constant.gain.mean:.4f} nats"
            )
        return "; ".join([*clauses, *filter(None, [self.bound_note])])

    @cached_property
    def bound_note(self) -> str:
        """Advice where most rows have a beta at a bound; "" elsewhere."""
        return bound_note(self.polynomial.rows, self.polynomial.coefficients)

    def _trained(self) -> list[str]:
        """The loss at sizes that the head was trained on, if rows have them."""
        limit = self.polynomial.options.trained_limit()
        trained = limit.check(self.polynomial.held_out_evidence, OWN)
        return [margin_clause(trained)] if trained.n else []

    def residuals(self, rows: Rows) -> dict[str, float]:
        """The error on rows with a finite optimum; theta as it is applied, at most 1."""
        used = rows.interior()
        applied = applied_beta(self.polynomial.coefficients, used)
        theta = np.minimum(1 / used.beta, 1)
        return {
            "beta_rms": float(np.sqrt(np.mean((applied - used.beta) ** 2))),
            "theta_rms": float(np.sqrt(np.mean((1 / applied - theta) ** 2))),
            "log_beta_r_squared": self.powers.r_squared,
        }


def _explained(r_squared: float) -> str:
    """The share that the entropy explains; below 0 a constant would be nearer to the optima."""
    if r_squared < 0:
        return f"entropy explains nothing (R^2 {r_squared:.2f})"
    return f"entropy explains {r_squared:.0%}"


def fit_least_squares(
    rows: Rows, options: Options, misranked_only: bool = False
) -> LeastSquaresResult:
    """Fits the polynomial to the optimal betas of the rows of one head.

    Args:
      rows: solved, all of the head.
      options: with a loss of the optimal beta.
      misranked_only: whether the collection keeps no other rows.
    Raises:
      QualityError: fewer than 100 rows with a finite optimum.
    """
    polynomial = fit_candidate(rows, OF_LEAST_SQUARES, options)
    assert isinstance(polynomial.fitted, LeastSquaresFit)
    return LeastSquaresResult(
        polynomial,
        _constant(rows, options),
        polynomial.fitted.powers,
        misranked_only,
    )


def _constant(rows: Rows, options: Options) -> Candidate | None:
    try:
        return fit_candidate(rows, SIMPLEST, Options(min_beta=options.min_beta))
    except QualityError:
        return None
