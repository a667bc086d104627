"""Fitting one kind of rule to rows under a loss: `fit_rule`.

A likelihood fits any kind to the rows, added up in cells. Least squares fit the polynomial to the
optimal betas of the rows. Either is fitted again to some blocks of the rows by `refit`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from calibrate.core.rule import Rule
from calibrate.core.rule_kinds import KINDS, RuleKind
from calibrate.errors import QualityError
from calibrate.fitting.fit_polynomial import (
    LeastSquares,
    LogLeastSquares,
    PolynomialFit,
    fit_powers,
)
from calibrate.fitting.groups import MIN_ROWS, deal_into_blocks
from calibrate.fitting.maximum_likelihood import LikelihoodFit, Regression
from calibrate.fitting.options import LogLikelihood, Loss, Options
from calibrate.fitting.pooled_rows import Pool, pool_rows
from calibrate.solver.optimal_beta import INTERIOR
from calibrate.solver.solved_rows import Rows
from calibrate.store.coefficients import Coefficients, identity
from calibrate.store.entry import Entry


class FittedRule(Protocol):
    """A rule that is fitted to rows."""

    @property
    def coefficients(self) -> Coefficients:
        """The rule, as a file holds it."""

    def refit(self, block_weights: np.ndarray) -> list[Coefficients]:
        """The same fit for each of some weights of blocks, (m, N_BLOCKS): folds, or resamples."""


def fit_rule(
    rows: Rows,
    kind: RuleKind,
    loss: Loss,
    options: Options,
    pooled: Callable[[float], Pool] | None = None,
) -> "LikelihoodFit | LeastSquaresFit":
    """The best rule of a kind for these rows.

    Args:
      rows: in blocks, as `groups.deal_into_blocks` deals them.
      kind: of rule; least squares fit the polynomial of degree 4 in entropy alone.
      loss: which rule is best.
      options: of the fit, but for the loss and its q.
      pooled: q -> the rows, added up, which the fits of several kinds share; None: made here.
    Raises:
      ValueError: rows that no block holds, or another kind than least squares fit.
      QualityError: too few rows, or rows that do not determine such a rule.
    """
    if (rows.block < 0).any():
        raise ValueError("rows are in no block; give those of `groups.deal_into_blocks`")
    if not isinstance(loss, LogLikelihood):
        if not kind.least_squares:
            raise ValueError(f"least squares do not fit a rule of kind {kind.name!r}")
        return LeastSquaresFit.of(rows, kind, loss, options)
    if options.min_entropy > 0 and not kind.by_entropy:
        raise QualityError("a rule of log n does not depend on entropy, and has no threshold")
    pool = pooled(loss.q) if pooled else pool_rows(rows, options, loss.q)
    return LikelihoodFit.of(Regression.of(kind, pool, options))


def fit_kind(rows: Rows, kind: str, options: Options | None = None) -> Coefficients:
    """The best rule of a kind, by its name, for solved rows; see `fit_rule`."""
    options = options or Options()
    rows = deal_into_blocks(rows)
    return fit_rule(rows, KINDS[kind], options.loss_of_fit(), options).coefficients


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


def applied_beta(
    fit: Coefficients, rows: Rows, some: np.ndarray | slice = slice(None)
) -> np.ndarray:
    """(rows,) beta that a fit gives to rows, or to some of them."""
    return fit.only.beta_at(rows.entropy[some], np.log(rows.items[some]), fit.rule)
