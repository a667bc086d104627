"""Fitting one kind of rule to rows under a loss: `fit_rule`.

A likelihood fits any kind to the rows, added up in cells. Least squares fit the polynomial to the
optimal betas of the rows. Either is fitted again to some blocks of the rows by `refit`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from calibrate.core.rule import Rule, bare_value, beta_of
from calibrate.core.rule_kinds import ENTROPY, KINDS, SIZE, Form, RuleKind
from calibrate.errors import QualityError
from calibrate.fitting.groups import ADVICE, MIN_ROWS, N_BLOCKS, deal_into_blocks
from calibrate.fitting.likelihood import TOLERANCE, maximise
from calibrate.fitting.options import LogLikelihood, Loss, Options
from calibrate.fitting.polynomial import (
    EXPORT_TOLERANCE,
    LeastSquares,
    LogLeastSquares,
    PolynomialFit,
    fit_powers,
)
from calibrate.fitting.pooled_rows import Pool, pool_rows
from calibrate.solver.optimal_beta import INTERIOR
from calibrate.solver.solved_rows import Rows
from calibrate.store.coefficients import Coefficients, Entry, identity

RANK_TOLERANCE = 1e-9  # of the largest singular value of the design


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
      kind: of rule; least squares fit its polynomial of degree 4 in entropy, whatever the kind.
      loss: which rule is best.
      options: of the fit, but for the loss and its q.
      pooled: q -> the rows, added up, which the fits of several kinds share; None: made here.
    Raises:
      ValueError: rows that no block holds.
      QualityError: too few rows, or rows that do not determine such a rule.
    """
    if (rows.block < 0).any():
        raise ValueError("rows are in no block; give those of `groups.deal_into_blocks`")
    if not isinstance(loss, LogLikelihood):
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
class Regression:
    """One kind of rule for pooled rows: its design and constraints, and their weights."""

    kind: RuleKind
    form: Form  # of the cells
    pool: Pool
    domain: tuple[float, ...]  # of entropies, log n, or both
    rule: Rule

    @classmethod
    def of(cls, kind: RuleKind, pool: Pool, options: Options) -> "Regression":
        """A kind of rule; raises QualityError if the rows do not determine such a rule."""
        lo, hi = pool.domain
        small, large = map(float, np.log(pool.n_items[[0, -1]]))
        if len(pool.n_items) < kind.min_sizes or (kind.by_entropy and not lo < hi):
            raise QualityError(
                f"the rows have {len(pool.n_items)} numbers of items and entropies of {lo:.4g} to "
                f"{hi:.4g} nats, too few for such a rule; collect sets of more sizes"
            )
        domain, rule = kind.domain((lo, hi), (small, large)), options.rule(kind.file_kind)
        if ENTROPY not in kind.needs:
            pool = pool.by_size() if SIZE in kind.needs else pool.at_once()
        bounds = rule.min_beta, rule.max_beta
        form = kind.form(pool.cells.entropy, pool.cells.log_n, domain, *bounds)
        regression = cls(kind, form, pool, domain, rule)
        if not regression.condition < 1 / RANK_TOLERANCE:
            raise QualityError(f"the rows do not determine a rule of kind {kind.name}; {ADVICE}")
        return regression

    @property
    def condition(self) -> float:
        """Condition number of the design: how unequally its coefficients are determined."""
        weight = self.pool.cell_weight
        singular = np.linalg.svd(np.sqrt(weight)[:, None] * self.form.design, compute_uv=False)
        full = len(singular) == self.form.design.shape[1] and singular[-1] > 0
        return float(singular[0] / singular[-1]) if full else np.inf

    def solve(
        self, block_weights: np.ndarray | None = None, start: np.ndarray | None = None
    ) -> np.ndarray:
        """The coefficients of the best rule of its form, (k,), in the form's own basis.

        Blocks have weights (N_BLOCKS,), or 1. With an earlier solution as `start`, this one is for
        a resample, and less exact. Raises QualityError if the solver failed.
        """
        weights = np.ones(N_BLOCKS) if block_weights is None else block_weights
        (c,) = self.solve_each(weights[None], start)
        return np.asarray(c)

    def solve_each(self, block_weights: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
        """(m, k): `solve` for each of some weights of blocks, (m, N_BLOCKS), at once."""
        objectives = [self.pool.objective(weights) for weights in block_weights]
        tolerance = TOLERANCE if start is None else None
        low, high = self.rule.min_beta, self.rule.max_beta
        constraints = [self.pool.constraint(weights) for weights in block_weights]
        try:
            solutions = maximise(objectives, self.form, low, high, start, tolerance, constraints)
        except ArithmeticError as failure:
            raise QualityError(
                f"the fit of a rule of kind {self.kind.name} did not converge: {failure}"
            ) from None
        return np.array([solution.coefficients for solution in solutions])

    def plain_coefficients(self, c: np.ndarray) -> tuple[float, ...]:
        """The coefficients of a rule in plain terms, in the order of `core/rule.py`."""
        return self.kind.file_coefficients(c, self.domain)

    def coefficients(self, c: np.ndarray) -> Coefficients:
        """The rule in plain powers, highest first."""
        return Coefficients(self.rule, (Entry(self.plain_coefficients(c), self.domain),))

    def checked_coefficients(self, c: np.ndarray) -> Coefficients:
        """The rule as a file holds it; QualityError if plain powers lose accuracy in float32."""
        fit, needs = self.coefficients(c), self.kind.needs
        if ENTROPY in needs:
            lo, hi = self.domain[:2]
            cells, exact = self.pool.cells, self.form.design @ c
            powers = [np.float32(p) for p in fit.only.coefficients]
            features = [np.clip(cells.entropy, lo, hi).astype(np.float32)]
            features += [cells.log_n.astype(np.float32)] if SIZE in needs else []
            rounded = bare_value(features, powers)
            if not (np.abs(rounded - exact) <= EXPORT_TOLERANCE * np.maximum(exact, 1)).all():
                raise QualityError(
                    f"the entropies {lo:.4g} to {hi:.4g} nats are too close together for powers of "
                    "them"
                )
        return fit


@dataclass(frozen=True, eq=False)
class LikelihoodFit:
    """A rule of constrained maximum likelihood."""

    regression: Regression
    solution: np.ndarray  # (k,) coefficients in the form's own basis
    coefficients: Coefficients

    @classmethod
    def of(cls, regression: Regression) -> "LikelihoodFit":
        """The best rule; raises QualityError if there is none that a file can hold."""
        solution = regression.solve()
        return cls(regression, solution, regression.checked_coefficients(solution))

    @property
    def kind(self) -> RuleKind:
        """The kind of the rule."""
        return self.regression.kind

    def refit(self, block_weights: np.ndarray) -> list[Coefficients]:
        """The same fit for each of some weights of blocks, (m, N_BLOCKS), less exact."""
        solutions = self.regression.solve_each(block_weights, self.solution)
        return [self.regression.coefficients(c) for c in solutions]


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
            raise QualityError(
                f"{len(rows.size)} misranked rows with a finite optimal beta, and the polynomial "
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
    entry, H, log_n = fit.only, rows.entropy[some], np.log(rows.items[some])
    return np.asarray(beta_of(H, log_n, entry.coefficients, entry.domain, fit.rule, np))
