"""Fitting one kind of rule to rows: a constant, a line in log n, or a polynomial of entropy.

Rows are assigned to blocks that share every set size equally. A fit with weights for the blocks is
a fit to a fold, a resample or a share of the rows; the likelihood of each comes from one table, in
which rows that get the same beta are added up.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from calibrate.errors import QualityError
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.fitting.gain import PRIOR_ROWS, prior_share
from calibrate.fitting.solved_rows import Rows
from calibrate.fitting.weighting import (
    N_BLOCKS,
    assign_blocks,
    group_weights,
    require_groups,
    row_weights,
)
from calibrate.maths import solver
from calibrate.maths.bernstein import basis, plain_powers
from calibrate.maths.likelihood import (
    DEGREE,
    TOLERANCE,
    Form,
    Objective,
    constant_form,
    likelihood,
    log_size_form,
    maximise,
    polynomial_form,
)
from calibrate.maths.likelihood_profile import Profile
from calibrate.maths.rule import Rule, horner

KINDS = ("constant", "log-size", "polynomial")  # simplest first
ROWS = ("all", "misranked")
MIN_ROWS = 100
RANK_TOLERANCE = 1e-9  # of the largest singular value of the design
DOMAIN_PERCENTILES = (0.5, 99.5)
N_CELLS = 512  # of the domain: entropies within a cell are treated as equal
NO_ENTROPY = 1e-6  # nats: less is noise of float32
EXPORT_TOLERANCE = 0.01  # of beta, as the runtime evaluates it in float32
ADVICE = "collect more sets, or larger ones, which the head misranks more often (sizes 16..16384)"


class Options(NamedTuple):
    """How a rule is fitted."""

    rows: str | None = None  # "all" or "misranked"; None: those of the collection
    gate: float = 0.0  # nats: at and below it a rule of entropy leaves softmax as it is
    prior_rows: float = PRIOR_ROWS  # see calibrate/fitting/gain.py


@dataclass(frozen=True)
class PooledProfiles:
    """Likelihood profiles, added up by block and cell: a cell's rows all get one beta."""

    series: np.ndarray  # (blocks, cells, columns of a profile)
    weight: np.ndarray  # (blocks, cells)
    profile: Profile  # of no rows

    def objective(self, block_weights: np.ndarray) -> Objective:
        """The objective of (cells,) beta, with a weight for each block.

        Raises:
          QualityError: no row is left.
        """
        total = block_weights @ self.weight.sum(axis=1)
        if not total > 0:
            raise QualityError(
                f"the usable rows come from too few groups to hold some out; {ADVICE}"
            )
        cells = self.profile._replace(series=np.tensordot(block_weights, self.series, 1) / total)
        return likelihood(cells, np.ones(self.series.shape[1]))


@dataclass(frozen=True)
class Problem:
    """The fit of one kind of rule to some rows."""

    kind: str
    form: Form  # of the cells
    data: PooledProfiles
    domain: tuple[float, float]  # entropies, or logarithms of sizes
    rule: Rule
    blocks: np.ndarray  # those that have rows

    @property
    def condition(self) -> float:
        """Condition number of the design: how unequally its coefficients are determined."""
        weight = self.data.weight.sum(axis=0)
        singular = np.linalg.svd(np.sqrt(weight)[:, None] * self.form.design, compute_uv=False)
        full = len(singular) == self.form.design.shape[1] and singular[-1] > 0
        return float(singular[0] / singular[-1]) if full else np.inf


def fit_rule(rows: Rows, kind: str, options: Options | None = None) -> Coefficients:
    """The best rule of a kind for these rows.

    Raises:
      QualityError: as of `build_problem`, `solve_problem` and `checked_coefficients`.
    """
    problem = build_problem(rows, assign_blocks(rows), kind, options or Options())
    return checked_coefficients(problem, solve_problem(problem))


def usable_rows(rows: Rows, kind: str, options: Options) -> np.ndarray:
    """(rows,) bool: the rows that a fit is made of; not those at which the rule is off."""
    usable: np.ndarray = rows.status != solver.UNSOLVED
    if kind != "log-size":
        usable &= rows.entropy > options.gate
    return usable & rows.misranked if options.rows == "misranked" else usable


def require_rows(count: int, adjective: str) -> None:
    """Raises QualityError if a fit has too few rows."""
    if count < MIN_ROWS:
        raise QualityError(
            f"{count} {adjective} rows, fewer than the {MIN_ROWS} that a fit needs; {ADVICE}"
        )


def build_problem(rows: Rows, block: np.ndarray, kind: str, options: Options) -> Problem:
    """The fit of a kind of rule to the usable rows, (rows,) in their blocks.

    Raises:
      QualityError: fewer than 100 usable rows, rows that do not determine such a rule, or a gate
        for a rule that has none.
    """
    if kind == "log-size" and options.gate > 0:
        raise QualityError("a rule by size does not depend on entropy, and so has no gate")
    usable = usable_rows(rows, kind, options)
    rows, block = rows.take(usable), block[usable]
    require_rows(len(block), "usable misranked" if options.rows == "misranked" else "usable")
    require_groups(rows)
    x = np.log(rows.items) if kind == "log-size" else rows.entropy
    domain = _domain(x, kind)
    weight = row_weights(rows)
    at, cell = _assign_cells(x, kind, domain)
    profile = rows.profile.mix(
        rows.plain_profile, prior_share(group_weights(rows), options.prior_rows)[0]
    )
    data = _pool(profile, block, cell, len(at), weight)
    rule = Rule.log_size() if kind == "log-size" else Rule(min_entropy=options.gate)
    problem = Problem(kind, _form(at, kind, domain), data, domain, rule, np.unique(block))
    if not problem.condition < 1 / RANK_TOLERANCE:
        raise QualityError(f"the rows do not determine a rule of kind {kind}; {ADVICE}")
    return problem


def _domain(x: np.ndarray, kind: str) -> tuple[float, float]:
    ends = (0, 100) if kind == "log-size" else DOMAIN_PERCENTILES
    lo, hi = (float(end) if end > NO_ENTROPY else 0.0 for end in np.percentile(x, ends))
    if not lo < hi:
        if kind == "log-size":
            raise QualityError(
                f"the rows have {math.exp(lo):,.0f} items each; collect sets of several sizes"
            )
        raise QualityError(f"the rows' entropies are all {lo:.4g} nats; collect other sets too")
    return lo, hi


def _assign_cells(
    x: np.ndarray, kind: str, domain: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """((cells,) x of each cell, (rows,) cell of each row); no cell is empty."""
    if kind == "log-size" and len(distinct := np.unique(x)) <= N_CELLS:
        return distinct, np.searchsorted(distinct, x)
    lo, hi = domain
    n_cells = 1 if kind == "constant" else N_CELLS
    place = np.clip((x - lo) / (hi - lo), 0, 1)
    _, cell = np.unique(np.minimum((place * n_cells).astype(int), n_cells - 1), return_inverse=True)
    return lo + (hi - lo) * np.bincount(cell, place) / np.bincount(cell), cell


def _pool(
    profile: Profile, block: np.ndarray, cell: np.ndarray, n_cells: int, weight: np.ndarray
) -> PooledProfiles:
    place = block * n_cells + cell
    pooled = profile.pool(place, weight, N_BLOCKS * n_cells).series
    return PooledProfiles(
        pooled.reshape(N_BLOCKS, n_cells, -1),
        np.bincount(place, weight, N_BLOCKS * n_cells).reshape(N_BLOCKS, n_cells),
        profile.take(np.empty(0, int)),
    )


def _form(at: np.ndarray, kind: str, domain: tuple[float, float]) -> Form:
    low, high = Rule().min_beta, Rule().max_beta
    if kind == "constant":
        return constant_form(len(at), low, high)
    if kind == "log-size":
        return log_size_form(at, low, high)
    return polynomial_form(at, domain, low, high)


def solve_problem(
    problem: Problem, block_weights: np.ndarray | None = None, start: np.ndarray | None = None
) -> np.ndarray:
    """The coefficients of the best rule of its form, (k,), in the form's own basis.

    Args:
      block_weights: (N_BLOCKS,), None where all are 1.
      start: an earlier solution: this one is then for a resample, and less exact.
    Raises:
      QualityError: the solver failed.
    """
    weights = np.ones(N_BLOCKS) if block_weights is None else block_weights
    objective = problem.data.objective(weights)
    tolerance = TOLERANCE if start is None else None
    low, high = Rule().min_beta, Rule().max_beta
    try:
        return maximise(objective, problem.form, low, high, start, tolerance).coefficients
    except ArithmeticError as failure:
        raise QualityError(
            f"no rule of kind {problem.kind} was found: {failure}; {ADVICE}"
        ) from None


def checked_coefficients(problem: Problem, c: np.ndarray) -> Coefficients:
    """The rule as a file holds it, whose polynomial is checked in float32.

    Raises:
      QualityError: plain powers would lose accuracy.
    """
    if problem.kind == "polynomial":
        t = np.linspace(0, 1, 65)
        lo, hi = problem.domain
        powers = [np.float32(p) for p in plain_coefficients(problem, c)]
        rounded = horner((lo + t * (hi - lo)).astype(np.float32), powers)
        exact = basis(t, len(c) - 1) @ c
        if not (np.abs(rounded - exact) <= EXPORT_TOLERANCE * exact).all():
            raise QualityError(
                f"the entropies {lo:.4g} to {hi:.4g} nats are too close together for a polynomial "
                "in plain powers"
            )
    return to_coefficients(problem, c)


def to_coefficients(problem: Problem, c: np.ndarray) -> Coefficients:
    """The rule in plain powers, highest first."""
    return Coefficients(problem.rule, (Entry(plain_coefficients(problem, c), problem.domain),))


def plain_coefficients(problem: Problem, c: np.ndarray) -> tuple[float, ...]:
    """The coefficients of a rule in plain powers, highest first."""
    if problem.kind == "log-size":
        return tuple(map(float, c))
    powers = plain_powers(c, problem.domain) if problem.kind == "polynomial" else (float(c[0]),)
    return (0.0,) * (DEGREE + 1 - len(powers)) + powers
