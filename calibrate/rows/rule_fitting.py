"""Fitting one kind of rule to rows: a constant, a line in log n, a polynomial of entropy, or both.

Rows are assigned to blocks that share every set size equally. A fit with weights for the blocks is
a fit to a fold, a resample or a share of the rows.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from calibrate.errors import QualityError
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths import solver
from calibrate.maths.likelihood import TOLERANCE, maximise_each
from calibrate.maths.rule import ENTROPY_AND_SIZE, N_POWERS, Rule, horner, surface
from calibrate.maths.rule_forms import (
    Form,
    constant_form,
    entropy_and_size_form,
    log_size_form,
    plain_powers,
    plain_terms,
    polynomial_form,
)
from calibrate.rows.gain import PRIOR_ROWS
from calibrate.rows.pooling import Cells, Pool, pool
from calibrate.rows.solved_rows import Rows
from calibrate.rows.weighting import N_BLOCKS, assign_blocks, require_groups

KINDS = ("constant", "log-size", "polynomial", ENTROPY_AND_SIZE)  # simplest first
ROWS = ("all", "misranked")
MIN_ROWS = 100
FEWEST_SIZES = 3  # that determine a rule of entropy and size
RANK_TOLERANCE = 1e-9  # of the largest singular value of the design
DOMAIN_PERCENTILES = (0.5, 99.5)
NO_ENTROPY = 1e-6  # nats: less is noise of float32
EXPORT_TOLERANCE = 0.01  # of beta, as the runtime evaluates it in float32
ADVICE = "collect more sets, or larger sets; of arrays, give more rows"


class Options(NamedTuple):
    """How a rule is fitted."""

    rows: str | None = None  # "all" or "misranked"; None: those of the collection
    gate: float = 0.0  # nats: at and below it a rule of entropy leaves softmax as it is
    prior_rows: float = PRIOR_ROWS  # see calibrate/rows/gain.py
    q: float | None = None  # the dial of sharpness, from 0 to 1; None: `choose` finds it, from 0
    # Up to this set size log p may fall by HARM at most; None: that of the collection, if any.
    trained_up_to: int | None = None


@dataclass(frozen=True, eq=False)
class Problem:
    """The fit of one kind of rule to some rows."""

    kind: str
    form: Form  # of the cells
    data: Pool
    domain: tuple[float, ...]  # of entropies, log n, or both
    rule: Rule

    @property
    def condition(self) -> float:
        """Condition number of the design: how unequally its coefficients are determined."""
        weight = self.data.cell_weight
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
    usable: np.ndarray = (rows.weight > 0) & (rows.status != solver.UNSOLVED)
    if kind != "log-size":
        usable &= rows.entropy > options.gate
    return usable & rows.misranked if options.rows == "misranked" else usable


def require_rows(count: int, adjective: str) -> None:
    """Raises QualityError if a fit has too few rows."""
    if count < MIN_ROWS:
        raise QualityError(
            f"{count} {adjective} rows, fewer than the {MIN_ROWS} that a fit needs; {ADVICE}"
        )


class Pools:
    """Rows to fit, pooled once for all kinds of rule that are made of the same ones."""

    def __init__(self, rows: Rows, block: np.ndarray, options: Options) -> None:
        """Of rows, and the block of each, (rows,)."""
        self._rows, self._block, self._options = rows, block, options
        self._pooled: dict[bytes, tuple[Rows, tuple[float, float], Pool]] = {}

    def of_kind(self, kind: str) -> tuple[Rows, tuple[float, float], Pool]:
        """The rows that a kind of rule is made of, their domain of entropies, and their pool.

        Raises:
          QualityError: there are too few.
        """
        usable = usable_rows(self._rows, kind, self._options)
        if usable.tobytes() not in self._pooled:
            self._pooled[usable.tobytes()] = self._pool(usable)
        return self._pooled[usable.tobytes()]

    def _pool(self, usable: np.ndarray) -> tuple[Rows, tuple[float, float], Pool]:
        rows, options = self._rows.take(usable), self._options
        adjective = "usable misranked" if options.rows == "misranked" else "usable"
        require_rows(len(rows.size), adjective)
        require_groups(rows)
        ends = np.percentile(rows.entropy, DOMAIN_PERCENTILES)
        lo, hi = (float(end) if end > NO_ENTROPY else 0.0 for end in ends)
        block, q = self._block[usable], options.q or 0.0
        return (
            rows,
            (lo, hi),
            pool(rows, block, (lo, hi), q, options.prior_rows, options.trained_up_to or 0),
        )


def build_problem(
    rows: Rows, block: np.ndarray, kind: str, options: Options, pools: Pools | None = None
) -> Problem:
    """The fit of a kind of rule to the usable rows, (rows,) in their blocks.

    Args:
      pools: of the same rows, blocks and options.
    Raises:
      QualityError: fewer than 100 usable rows, rows that do not determine such a rule, or a gate
        for a rule that has none.
    """
    if kind == "log-size" and options.gate > 0:
        raise QualityError("a rule by size does not depend on entropy, and so has no gate")
    used, entropies, data = (pools or Pools(rows, block, options)).of_kind(kind)
    sizes = float(np.log(used.items.min())), float(np.log(used.items.max()))
    _require_range(kind, entropies, sizes, len(np.unique(used.items)))
    domain = {"log-size": sizes, ENTROPY_AND_SIZE: (*entropies, *sizes)}.get(kind, entropies)
    data = {"constant": data.at_once, "log-size": data.by_size}.get(kind, lambda: data)()
    form = _form(data.cells, kind, domain)
    problem = Problem(kind, form, data, domain, _rule(kind, options))
    if not problem.condition < 1 / RANK_TOLERANCE:
        raise QualityError(f"the rows do not determine a rule of kind {kind}; {ADVICE}")
    return problem


def _require_range(
    kind: str, entropies: tuple[float, float], sizes: tuple[float, float], n_sizes: int
) -> None:
    """Raises QualityError if what a rule goes by is the same in all rows."""
    if kind in ("log-size", ENTROPY_AND_SIZE) and n_sizes == 1:
        raise QualityError(
            f"the rows have {math.exp(sizes[0]):,.0f} items each; collect sets of several sizes"
        )
    if kind == ENTROPY_AND_SIZE and n_sizes < FEWEST_SIZES:
        raise QualityError(f"the rows are of {n_sizes} sizes; collect sets of {FEWEST_SIZES}")
    if kind != "log-size" and not entropies[0] < entropies[1]:
        raise QualityError(
            f"the rows' entropies are all {entropies[0]:.4g} nats; collect other sets too"
        )


def _rule(kind: str, options: Options) -> Rule:
    if kind == "log-size":
        return Rule.log_size()
    if kind == ENTROPY_AND_SIZE:
        return Rule(min_entropy=options.gate, kind=ENTROPY_AND_SIZE)
    return Rule(min_entropy=options.gate)


def _form(cells: Cells, kind: str, domain: tuple[float, ...]) -> Form:
    low, high = Rule().min_beta, Rule().max_beta
    if kind == "constant":
        return constant_form(len(cells.entropy), low, high)
    if kind == "log-size":
        return log_size_form(cells.log_n, low, high)
    if kind == ENTROPY_AND_SIZE:
        return entropy_and_size_form(cells.entropy, cells.log_n, domain, low, high)
    return polynomial_form(cells.entropy, domain, low, high)


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
    (c,) = solve_each(problem, weights[None], start)
    return np.asarray(c)


def solve_each(
    problem: Problem, block_weights: np.ndarray, start: np.ndarray | None = None
) -> np.ndarray:
    """(m, k): `solve_problem` for each of some weights of blocks, (m, N_BLOCKS), at once."""
    try:
        objectives = [problem.data.objective(weights) for weights in block_weights]
    except QualityError as failure:
        raise QualityError(f"{failure}; {ADVICE}") from None
    tolerance = TOLERANCE if start is None else None
    low, high = Rule().min_beta, Rule().max_beta
    held = [problem.data.held_scores(weights) for weights in block_weights]
    try:
        found = maximise_each(objectives, problem.form, low, high, start, tolerance, held)
    except ArithmeticError as failure:
        raise QualityError(f"no rule of kind {problem.kind} was found: {failure}") from None
    return np.array([solution.coefficients for solution in found])


def checked_coefficients(problem: Problem, c: np.ndarray) -> Coefficients:
    """The rule as a file holds it, which is checked in float32.

    Raises:
      QualityError: plain powers would lose accuracy.
    """
    fit = to_coefficients(problem, c)
    if problem.kind in ("polynomial", ENTROPY_AND_SIZE):
        lo, hi = problem.domain[:2]
        cells = problem.data.cells
        exact = problem.form.design @ c
        powers = [np.float32(p) for p in fit.only.coefficients]
        at = np.clip(cells.entropy, lo, hi).astype(np.float32), cells.log_n.astype(np.float32)
        rounded = horner(at[0], powers) if problem.kind == "polynomial" else surface(*at, powers)
        if not (np.abs(rounded - exact) <= EXPORT_TOLERANCE * np.maximum(exact, 1)).all():
            raise QualityError(
                f"the entropies {lo:.4g} to {hi:.4g} nats are too close together for powers of them"
            )
    return fit


def to_coefficients(problem: Problem, c: np.ndarray) -> Coefficients:
    """The rule in plain powers, highest first."""
    return Coefficients(problem.rule, (Entry(plain_coefficients(problem, c), problem.domain),))


def plain_coefficients(problem: Problem, c: np.ndarray) -> tuple[float, ...]:
    """The coefficients of a rule in plain terms, in the order of `maths/rule.py`."""
    if problem.kind == "log-size":
        return tuple(map(float, c))
    if problem.kind == ENTROPY_AND_SIZE:
        return tuple(map(float, plain_terms(c, problem.domain)))
    powers: tuple[float, ...] = (float(c[0]),)
    if problem.kind == "polynomial":
        powers = plain_powers(c, (problem.domain[0], problem.domain[1]))
    return (0.0,) * (N_POWERS - len(powers)) + powers
