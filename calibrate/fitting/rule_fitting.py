"""Fitting one kind of rule to rows: a constant, a line in log n, a polynomial of entropy, or both.

A fit with weights for the blocks of rows is a fit to a fold or a resample.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from calibrate.core import rule_forms
from calibrate.core.rule import LOG_SIZE, Rule, bare_value, beta_of
from calibrate.core.rule_kinds import ENTROPY, KINDS, POLYNOMIAL, SIZE
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.non_inferiority import NLL_TOLERANCE
from calibrate.evidence.prior import PRIOR_ROWS
from calibrate.fitting.groups import MIN_ROWS, N_BLOCKS, require_groups
from calibrate.fitting.likelihood import TOLERANCE, maximise
from calibrate.fitting.polynomial import LEAST_SQUARES, LOG_LEAST_SQUARES
from calibrate.fitting.pooled_rows import Pool, pool
from calibrate.solver.optimal_beta import UNSOLVED
from calibrate.solver.solved_rows import Rows
from calibrate.store.coefficients import Coefficients, Entry

LIKELIHOOD = "likelihood"
LOSSES = (LIKELIHOOD, LOG_LEAST_SQUARES, LEAST_SQUARES)
RANK_TOLERANCE = 1e-9  # of the largest singular value of the design
DOMAIN_PERCENTILES = (0.5, 99.5)
NO_ENTROPY = 1e-6  # nats: less is noise of float32
EXPORT_TOLERANCE = 0.01  # of beta, as the runtime evaluates it in float32
MIN_BETA_LIMIT = 1 / 64
ADVICE = "collect more sets, or larger sets; of arrays, give more rows"


class Options(NamedTuple):
    """Options of a fit to rows."""

    rows: str | None = None  # "all" or "misranked"; None: those of the collection
    min_entropy: float = 0.0  # nats: at and below it beta is 1; 0 is no threshold
    prior_rows: float = PRIOR_ROWS  # see calibrate/evidence/prior.py
    q: float | None = None  # of the loss, 0 (maximum likelihood) to 1; None: chosen, from 0
    # Up to this set size log p may fall by `tolerance`; None: that of the collection, if any.
    trained_up_to: int | None = None
    kind: str | None = None  # of rule, published whatever its verdict; None: chosen by scores
    min_beta: float = 1.0  # the least beta of a rule, from 1/64 to 1
    loss: str = LIKELIHOOD  # or one of the optimal beta, for polynomials: see fitting/polynomial.py
    tolerance: float = NLL_TOLERANCE  # nats, in the mean of held-out rows of a size

    @classmethod
    def of_the_paper(cls) -> "Options":
        """The paper's procedure, robust: see `calibrate/fitting/polynomial.py`."""
        return cls("misranked", 0.5, kind=POLYNOMIAL, loss=LOG_LEAST_SQUARES)

    def checked(self) -> "Options":
        """The options; raises CalibrateError for one that is out of range."""
        ranges = {
            "q": (0, 1), "trained_up_to": (0, np.inf), "tolerance": (0, np.inf),
            "min_beta": (MIN_BETA_LIMIT, 1),
        }  # fmt: skip
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise CalibrateError(f"{name} is {value}; give a number from {low:g} to {high:g}")
        if not isinstance(self.trained_up_to, int | np.integer | None):
            raise CalibrateError(f"trained_up_to is {self.trained_up_to}; give an integer")
        choices = {"kind": (None, *KINDS), "loss": LOSSES, "rows": (None, "all", "misranked")}
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                words = ", ".join(filter(None, known))
                raise CalibrateError(f"{name} is {value!r}; give one of {words}")
        if self.loss != LIKELIHOOD and (self.kind != POLYNOMIAL or self.q):
            raise CalibrateError(
                f"loss {self.loss} fits the polynomial alone, and has no q; give kind polynomial"
            )
        return self

    def record(self) -> dict[str, Any]:
        """The options as a coefficient file keeps them."""
        given = {name: value for name, value in self._asdict().items() if value is not None}
        # Keys of files stay as they were, and files from before an option are of the same fit.
        absent = {"min_beta": 1, "loss": LIKELIHOOD, "tolerance": NLL_TOLERANCE}
        given = {k: value for k, value in given.items() if absent.get(k) != value}
        of_files = {"min_entropy": "gate", "kind": "force"}
        named = {of_files.get(name, name): value for name, value in given.items()}
        return named | {"degree": rule_forms.DEGREE}

    def rule(self, kind: str) -> Rule:
        """The guards of a kind of rule."""
        return self.guards(KINDS[kind].file_kind)

    def guards(self, file_kind: str) -> Rule:
        """The same by the kind in files, which holds a constant, too."""
        if file_kind == LOG_SIZE:
            return Rule.log_size(min_beta=self.min_beta)
        return Rule(self.min_entropy, self.min_beta, kind=file_kind)

    def usable(self, rows: Rows, kind: str) -> np.ndarray:
        """(rows,) bool: the rows that a fit is made of; not those at which the rule is off."""
        usable: np.ndarray = (rows.weight > 0) & (rows.status != UNSOLVED)
        if kind != LOG_SIZE and self.min_entropy > 0:
            usable &= rows.entropy > self.min_entropy
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
    held = options.trained_up_to or 0, options.tolerance
    return pool(rows, block, (lo, hi), q, options.prior_rows, *held)


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
        of, (lo, hi) = KINDS[kind], data.domain
        small, large = map(float, np.log(data.n_items[[0, -1]]))
        if len(data.n_items) < of.min_sizes or (kind != LOG_SIZE and not lo < hi):
            raise QualityError(
                f"the rows have {len(data.n_items)} numbers of items and entropies of {lo:.4g} to "
                f"{hi:.4g} nats, too few for such a rule; collect sets of more sizes"
            )
        domain, rule = of.domain((lo, hi), (small, large)), options.rule(kind)
        if ENTROPY not in of.needs:
            data = data.by_size() if SIZE in of.needs else data.at_once()
        bounds = rule.min_beta, rule.max_beta
        form = of.form(data.cells.entropy, data.cells.log_n, domain, *bounds)
        fit = cls(kind, form, data, domain, rule)
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
        constraints = [self.data.constraint(weights) for weights in block_weights]
        try:
            solutions = maximise(objectives, self.form, low, high, start, tolerance, constraints)
        except ArithmeticError as failure:
            raise QualityError(
                f"the fit of a rule of kind {self.kind} did not converge: {failure}"
            ) from None
        return np.array([solution.coefficients for solution in solutions])

    def plain_coefficients(self, c: np.ndarray) -> tuple[float, ...]:
        """The coefficients of a rule in plain terms, in the order of `core/rule.py`."""
        return KINDS[self.kind].powers(c, self.domain)

    def coefficients(self, c: np.ndarray) -> Coefficients:
        """The rule in plain powers, highest first."""
        return Coefficients(self.rule, (Entry(self.plain_coefficients(c), self.domain),))

    def checked_coefficients(self, c: np.ndarray) -> Coefficients:
        """The rule as a file holds it; QualityError if plain powers lose accuracy in float32."""
        fit, needs = self.coefficients(c), KINDS[self.kind].needs
        if ENTROPY in needs:
            lo, hi = self.domain[:2]
            cells, exact = self.data.cells, self.form.design @ c
            powers = [np.float32(p) for p in fit.only.coefficients]
            at = [np.clip(cells.entropy, lo, hi).astype(np.float32)]
            at += [cells.log_n.astype(np.float32)] if SIZE in needs else []
            rounded = bare_value(at, powers)
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
