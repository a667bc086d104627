"""Least squares: the polynomial closest to the optimal betas of rows, the paper's procedure."""

from dataclasses import dataclass

import numpy as np

from calibrate.core.rule import Rule
from calibrate.core.rule_kinds import RuleKind
from calibrate.errors import QualityError
from calibrate.fitting.fit_polynomial import (
    LeastSquares,
    LogLeastSquares,
    PolynomialFit,
    fit_powers,
)
from calibrate.fitting.groups import MIN_ROWS
from calibrate.fitting.options import Options
from calibrate.solver.optimal_beta import INTERIOR
from calibrate.solver.solved_rows import Rows
from calibrate.store.coefficients import Coefficients, identity
from calibrate.store.entry import Entry


@dataclass(frozen=True, eq=False)
class LeastSquaresFit:
    """A polynomial close to the optimal betas of those rows that have a finite one above 0."""

    kind: RuleKind
    loss: LogLeastSquares | LeastSquares
    rows: Rows  # that it is fitted to
    rule: Rule
    powers: PolynomialFit
    coefficients: Coefficients

    @classmethod
    def of(
        cls, rows: Rows, kind: RuleKind, loss: LogLeastSquares | LeastSquares, options: Options
    ) -> "LeastSquaresFit":
        """Raises QualityError for fewer than 100 rows with a finite optimal beta."""
        rows = rows.take(options.usable(rows) & (rows.status == INTERIOR))
        rule = options.rule(kind.file_kind)
        if len(rows.size) < MIN_ROWS:
            which = "misranked rows" if options.rows == "misranked" else "rows"
            raise QualityError(
                f"{len(rows.size)} {which} with a finite optimal beta, and the polynomial "
                f"needs {MIN_ROWS}; collect more sets, or larger ones"
            )
        powers = _fit_powers(rows, rule, loss)
        return cls(kind, loss, rows, rule, powers, _in_file(powers, rule))

    def refit(self, block_weights: np.ndarray) -> list[Coefficients]:
        """The same fit to the blocks of each row of (m, N_BLOCKS) weights that are not 0."""
        fits = []
        for weights in block_weights:
            chosen = weights[self.rows.block] > 0
            if not chosen.any():
                fits.append(identity())
                continue
            powers = _fit_powers(self.rows.take(chosen), self.rule, self.loss)
            fits.append(_in_file(powers, self.rule))
        return fits


def _fit_powers(rows: Rows, rule: Rule, loss: LogLeastSquares | LeastSquares) -> PolynomialFit:
    bounds = rule.min_beta, rule.max_beta
    return fit_powers(rows.entropy, rows.beta, rows.weight.astype(float), bounds, loss)


def _in_file(powers: PolynomialFit, rule: Rule) -> Coefficients:
    return Coefficients(rule, (Entry(powers.coefficients, powers.domain),))
