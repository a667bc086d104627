"""Constrained maximum likelihood: the coefficients of a rule under which targets are most probable.

`Regression` poses the problem, a kind of rule for pooled rows, and `multistart.maximise` solves it.
The mean of log p_t(beta) is concave in the coefficients of a form, and bounds of log p at some rows
are concave constraints. With sets of targets the mean is not concave, nor is that of p_t^q.
"""

from dataclasses import dataclass

import numpy as np

from calibrate.core.rule import Rule, bare_value
from calibrate.core.rule_kinds import ENTROPY, SIZE, Form, RuleKind
from calibrate.errors import QualityError
from calibrate.fitting.fit_polynomial import EXPORT_TOLERANCE
from calibrate.fitting.groups import ADVICE, N_BLOCKS
from calibrate.fitting.multistart import TOLERANCE, maximise
from calibrate.fitting.options import Options
from calibrate.fitting.pooled_rows import Pool
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry

RANK_TOLERANCE = 1e-9  # of the largest singular value of the design


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
        n_sizes = len(pool.n_items)
        if n_sizes < kind.min_sizes or (kind.by_entropy and not lo < hi):
            raise QualityError(
                f"the rows have {n_sizes} number{'s' * (n_sizes != 1)} of items and entropies of "
                f"{lo:.4g} to {hi:.4g} nats, too few for such a rule; collect sets of more sizes"
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
            rounded = bare_value(features, powers, self.kind.file_kind)
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
