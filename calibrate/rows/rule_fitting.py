"""Fitting one kind of rule to rows: a constant, a line in log n, a polynomial of entropy, or both.

A fit with weights for the blocks of rows is a fit to a fold or a resample.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.prior import PRIOR_ROWS
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths import rule_forms, solver
from calibrate.maths.likelihood import TOLERANCE, maximise
from calibrate.maths.rule import (
    ENTROPY_AND_SIZE,
    ENTROPY_POLYNOMIAL,
    LOG_SIZE,
    N_POWERS,
    Rule,
    beta_of,
    horner,
    surface,
)
from calibrate.rows.groups import MIN_ROWS, N_BLOCKS, require_groups
from calibrate.rows.pooling import Cells, Pool, pool
from calibrate.rows.solved_rows import Rows

CONSTANT, POLYNOMIAL = "constant", "polynomial"
KINDS = (CONSTANT, LOG_SIZE, POLYNOMIAL, ENTROPY_AND_SIZE)  # simplest first
FEWEST_SIZES = {LOG_SIZE: 2, ENTROPY_AND_SIZE: 3}  # that determine such a rule
RANK_TOLERANCE = 1e-9  # of the largest singular value of the design
DOMAIN_PERCENTILES = (0.5, 99.5)
NO_ENTROPY = 1e-6  # nats: less is noise of float32
EXPORT_TOLERANCE = 0.01  # of beta, as the runtime evaluates it in float32
LEAST_MIN_BETA = 1 / 64
ADVICE = "collect more sets, or larger sets; of arrays, give more rows"


class Options(NamedTuple):
    """How rows are fitted."""

    rows: str | None = None  # "all" or "misranked"; None: those of the collection
    gate: float = 0.0  # nats: at and below it a rule of entropy leaves softmax as it is; 0: none
    prior_rows: float = PRIOR_ROWS  # see calibrate/evidence/prior.py
    q: float | None = None  # the dial of sharpness, from 0 to 1; None: found, from 0
    # Up to this set size log p may fall by ALLOWED_LOSS; None: that of the collection, if any.
    trained_up_to: int | None = None
    force: str | None = None  # a kind to choose if it beats plain softmax, even if another is best
    min_beta: float = 1.0  # the least beta of a rule, from 1/64 to 1

    def checked(self) -> "Options":
        """The options; raises CalibrateError for one that is out of range."""
        ranges = {"q": (0, 1), "trained_up_to": (0, np.inf), "min_beta": (LEAST_MIN_BETA, 1)}
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise CalibrateError(f"{name} is {value}; give a number from {low:g} to {high:g}")
        if not isinstance(self.trained_up_to, int | np.integer | None):
            raise CalibrateError(f"trained_up_to is {self.trained_up_to}; give an integer")
        return self

    def record(self) -> dict[str, Any]:
        """What a coefficient file keeps of them."""
        given = {name: value for name, value in self._asdict().items() if value is not None}
        if self.min_beta == 1:  # files from before the option are of the same fit
            del given["min_beta"]
        return given | {"degree": rule_forms.DEGREE}

    def rule(self, kind: str) -> Rule:
        """The guards of a kind of rule."""
        if kind == LOG_SIZE:
            return Rule.log_size(min_beta=self.min_beta)
        family = kind if kind == ENTROPY_AND_SIZE else ENTROPY_POLYNOMIAL
        return Rule(self.gate, self.min_beta, kind=family)

    def usable(self, rows: Rows, kind: str) -> np.ndarray:
        """(rows,) bool: the rows that a fit is made of; not those at which the rule is off."""
        usable: np.ndarray = (rows.weight > 0) & (rows.status != solver.UNSOLVED)
        if kind != LOG_SIZE and self.gate > 0:
            usable &= rows.entropy > self.gate
        return usable & rows.misranked if self.rows == "misranked" else usable


def require_rows(count: int, adjective: str) -> None:
    """Raises QualityError if a fit has too few rows."""
    if count < MIN_ROWS:
        raise QualityError(
            f"{count} {adjective} rows, fewer than the {MIN_ROWS} that a fit needs; {ADVICE}"
        )


def pool_usable(rows: Rows, block: np.ndarray, options: Options, q: float) -> Pool:
    """Pools the usable rows, in their blocks (rows,); raises QualityError for too few."""
    misranked = options.rows == "misranked"
    require_rows(len(rows.size), "usable misranked" if misranked else "usable")
    require_groups(rows)
    ends = np.percentile(rows.entropy, DOMAIN_PERCENTILES)
    lo, hi = (float(end) if end > NO_ENTROPY else 0.0 for end in ends)
    return pool(rows, block, (lo, hi), q, options.prior_rows, options.trained_up_to or 0)


@dataclass(frozen=True, eq=False)
class KindFit:
    """The fit of one kind of rule to some rows."""

    kind: str
    form: rule_forms.Form  # of the cells
    data: Pool
    domain: tuple[float, ...]  # of entropies, log n, or both
    rule: Rule

    @classmethod
    def of(cls, kind: str, data: Pool, options: Options) -> "KindFit":
        """A kind of rule; raises QualityError if the rows do not determine such a rule."""
        (lo, hi), sizes = data.domain, tuple(map(float, np.log(data.n_items[[0, -1]])))
        if len(data.n_items) < FEWEST_SIZES.get(kind, 1) or (kind != LOG_SIZE and not lo < hi):
            raise QualityError(
                f"the rows have {len(data.n_items)} numbers of items and entropies of {lo:.4g} to "
                f"{hi:.4g} nats, too few for such a rule; collect sets of more sizes"
            )
        domain = {LOG_SIZE: sizes, ENTROPY_AND_SIZE: (lo, hi, *sizes)}.get(kind, (lo, hi))
        data = {CONSTANT: data.at_once, LOG_SIZE: data.by_size}.get(kind, lambda: data)()
        rule = options.rule(kind)
        fit = cls(kind, _form(data.cells, kind, domain, rule), data, domain, rule)
        if not fit.condition < 1 / RANK_TOLERANCE:
            raise QualityError(f"the rows do not determine a rule of kind {kind}; {ADVICE}")
        return fit

    @property
    def condition(self) -> float:
        """Condition number of the design: how unequally its coefficients are determined."""
        weight = self.data.cell_weight
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
        objectives = [self.data.objective(weights) for weights in block_weights]
        tolerance = TOLERANCE if start is None else None
        low, high = self.rule.min_beta, self.rule.max_beta
        held = [self.data.held_scores(weights) for weights in block_weights]
        try:
            found = maximise(objectives, self.form, low, high, start, tolerance, held)
        except ArithmeticError as failure:
            raise QualityError(f"no rule of kind {self.kind} was found: {failure}") from None
        return np.array([solution.coefficients for solution in found])

    def plain_coefficients(self, c: np.ndarray) -> tuple[float, ...]:
        """The coefficients of a rule in plain terms, in the order of `maths/rule.py`."""
        if self.kind == LOG_SIZE:
            return tuple(map(float, c))
        if self.kind == ENTROPY_AND_SIZE:
            return tuple(map(float, rule_forms.plain_terms(c, self.domain)))
        powers: tuple[float, ...] = (float(c[0]),)
        if self.kind == POLYNOMIAL:
            powers = rule_forms.plain_powers(c, (self.domain[0], self.domain[1]))
        return (0.0,) * (N_POWERS - len(powers)) + powers

    def coefficients(self, c: np.ndarray) -> Coefficients:
        """The rule in plain powers, highest first."""
        return Coefficients(self.rule, (Entry(self.plain_coefficients(c), self.domain),))

    def checked_coefficients(self, c: np.ndarray) -> Coefficients:
        """The rule as a file holds it; QualityError if plain powers lose accuracy in float32."""
        fit = self.coefficients(c)
        if self.kind in (POLYNOMIAL, ENTROPY_AND_SIZE):
            lo, hi = self.domain[:2]
            cells, exact = self.data.cells, self.form.design @ c
            powers = [np.float32(p) for p in fit.only.coefficients]
            at = np.clip(cells.entropy, lo, hi).astype(np.float32), cells.log_n.astype(np.float32)
            rounded = horner(at[0], powers) if self.kind == POLYNOMIAL else surface(*at, powers)
            if not (np.abs(rounded - exact) <= EXPORT_TOLERANCE * np.maximum(exact, 1)).all():
                raise QualityError(
                    f"the entropies {lo:.4g} to {hi:.4g} nats are too close together for powers of "
                    "them"
                )
        return fit


def applied_beta(
    fit: Coefficients, rows: Rows, some: np.ndarray | slice = slice(None)
) -> np.ndarray:
    """(rows,) beta that a fit gives to rows, or to some of them."""
    entry, H, log_n = fit.only, rows.entropy[some], np.log(rows.items[some])
    return np.asarray(beta_of(H, log_n, entry.coefficients, entry.domain, fit.rule, np))


def _form(cells: Cells, kind: str, domain: tuple[float, ...], rule: Rule) -> rule_forms.Form:
    low, high = rule.min_beta, rule.max_beta
    if kind == CONSTANT:
        return rule_forms.constant_form(len(cells.entropy), low, high)
    if kind == LOG_SIZE:
        return rule_forms.log_size_form(cells.log_n, low, high)
    if kind == ENTROPY_AND_SIZE:
        return rule_forms.entropy_and_size_form(cells.entropy, cells.log_n, domain, low, high)
    return rule_forms.polynomial_form(cells.entropy, domain, low, high)
