"""Candidates: the kinds of rule that a head may need, each fitted to the same rows.

Rows are dealt into blocks, alike in their sizes. A fit to any weights of the blocks is a fit to a
fold, a resample or a share of the rows; the likelihood of all of them comes from one table, in
which rows that get the same beta are added up.
"""

import math
from typing import NamedTuple

import numpy as np

from calibrate.errors import QualityError
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.fitting.solved_rows import Rows
from calibrate.maths import solver
from calibrate.maths.bernstein import basis, plain_powers
from calibrate.maths.likelihood import (
    DEGREE,
    TOLERANCE,
    Form,
    Objective,
    closeness,
    constant_form,
    likelihood,
    log_size_form,
    maximise,
    polynomial_form,
)
from calibrate.maths.likelihood_profile import N_NODES, Profile
from calibrate.maths.rule import Rule, horner

KINDS = ("constant", "log-size", "polynomial")  # simplest first
OBJECTIVES = ("likelihood", "beta", "theta")
ROWS = ("all", "misranked")
WEIGHTS = ("sizes", "rows")
MIN_ROWS = 100
RANK_TOLERANCE = 1e-9  # of the largest singular value of the design
DOMAIN_PERCENTILES = (0.5, 99.5)
N_BLOCKS = 100
N_CELLS = 512  # of the domain: within one, entropies differ by less than any curve shows
NO_ENTROPY = 1e-6  # nats: less is noise of float32
ENOUGH_ROWS = 100  # of a size: with fewer it counts less
MOST_DISTANCES = 50_000  # rows: objectives that cannot be pooled take a sample
EXPORT_TOLERANCE = 0.01  # of beta, as the runtime works it out in float32
ADVICE = "collect more sets, or larger ones, which the head misranks more often (sizes 16..16384)"


class Options(NamedTuple):
    """How a rule is fitted."""

    objective: str = "likelihood"  # or least distance from the optimal "beta" or "theta"
    rows: str | None = None  # "all" or "misranked"; None: those that there are
    weigh: str = "sizes"  # what counts alike: set sizes, or single "rows"
    monotone: bool = False  # beta never falls as the entropy, or the size, rises
    gate: float = 0.0  # nats: at and below it a rule of entropy leaves softmax as it is


class Sample(NamedTuple):
    """Rows as one kind of rule sees them."""

    kind: str
    form: Form  # of the cells
    objectives: "Table | Distances"
    domain: tuple[float, float]  # entropies, or logarithms of sizes
    rule: Rule

    @property
    def condition(self) -> float:
        """Condition number of the design: how much more some coefficients are known than others."""
        weight = self.objectives.weight.sum(axis=0)
        singular = np.linalg.svd(np.sqrt(weight)[:, None] * self.form.design, compute_uv=False)
        full = len(singular) == self.form.design.shape[1] and singular[-1] > 0
        return float(singular[0] / singular[-1]) if full else np.inf


class Table(NamedTuple):
    """Likelihood profiles, added up by block and cell: a cell's rows all get one beta."""

    series: np.ndarray  # (blocks, cells, N_NODES)
    weight: np.ndarray  # (blocks, cells)
    profile: Profile  # of no rows

    def under(self, of_block: np.ndarray) -> Objective:
        """The objective of (cells,) beta, with a weight for each block."""
        series = np.tensordot(of_block, self.series, 1)
        cells = self.profile._replace(series=series / (of_block @ self.weight.sum(axis=1)))
        return likelihood(cells, np.ones(len(series)))


class Distances(NamedTuple):
    """Optimal betas, row by row: every row is a cell."""

    optimum: np.ndarray  # (rows,) within the bounds
    row_weight: np.ndarray  # (rows,)
    block: np.ndarray  # (rows,)
    of_theta: bool

    @property
    def weight(self) -> np.ndarray:
        return self.row_weight[None]

    def under(self, of_block: np.ndarray) -> Objective:
        """The objective of (rows,) beta, with a weight for each block."""
        weight = self.row_weight * of_block[self.block]
        return closeness(self.optimum, weight / weight.sum(), self.of_theta)


def deal(rows: Rows) -> np.ndarray:
    """(rows,) block of each row: at random, and as many of each size in every block.

    Sizes are chosen, and so alike in resamples; how many rows are misranked is chance.
    """
    shuffled = np.random.default_rng(0).permutation(len(rows.size))
    by_size = shuffled[np.argsort(rows.size[shuffled], kind="stable")]
    block = np.empty(len(rows.size), np.int64)
    block[by_size] = np.arange(len(by_size)) % N_BLOCKS
    return block


def usable(rows: Rows, kind: str, options: Options) -> np.ndarray:
    """(rows,) bool: the rows that a fit looks at. Where a rule is off, a row says nothing of it."""
    chosen = rows.status != solver.UNSOLVED
    if kind != "log-size":
        chosen &= rows.entropy > options.gate
    return chosen & rows.misranked if options.rows == "misranked" else chosen


def refuse_few(count: int, which: str) -> None:
    """Raises QualityError if a fit has too few rows."""
    if count < MIN_ROWS:
        raise QualityError(
            f"{count} {which} rows, fewer than the {MIN_ROWS} that a fit needs; {ADVICE}"
        )


def draw(rows: Rows, block: np.ndarray, kind: str, options: Options) -> Sample:
    """The rows that a rule of this kind is fitted to.

    Raises:
      QualityError: fewer than 100, rows that do not determine such a rule, or a gate that it lacks.
    """
    if kind == "log-size" and options.gate > 0:
        raise QualityError("a rule by size looks at no entropy, and so has no gate")
    chosen = usable(rows, kind, options)
    rows, block = rows.take(chosen), block[chosen]
    refuse_few(len(block), "usable misranked" if options.rows == "misranked" else "usable")
    x = np.log(rows.items) if kind == "log-size" else rows.entropy
    domain = _domain(x, kind)
    weight = row_weights(rows, options)
    if options.objective == "likelihood":
        at, cell = _cells(x, kind, domain)
        objectives: Table | Distances = _table(rows, block, cell, len(at), weight)
    else:
        optimum = np.clip(rows.beta, rows.profile.low, rows.profile.high)
        some = np.random.default_rng(0).permutation(len(x))[:MOST_DISTANCES]
        at, of_theta = x[some], options.objective == "theta"
        objectives = Distances(optimum[some], weight[some], block[some], of_theta)
    form = _form(at, kind, domain, options)
    rule = Rule.log_size() if kind == "log-size" else Rule(min_entropy=options.gate)
    sample = Sample(kind, form, objectives, domain, rule)
    if not sample.condition < 1 / RANK_TOLERANCE:
        raise QualityError(f"the rows do not determine a rule of kind {kind}; {ADVICE}")
    return sample


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


def _cells(x: np.ndarray, kind: str, domain: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """(what the rule sees in each cell, the cell of each row); no cell is empty."""
    if kind == "log-size" and len(found := np.unique(x)) <= N_CELLS:
        return found, np.searchsorted(found, x)
    lo, hi = domain
    n_cells = 1 if kind == "constant" else N_CELLS
    place = np.clip((x - lo) / (hi - lo), 0, 1)
    _, cell = np.unique(np.minimum((place * n_cells).astype(int), n_cells - 1), return_inverse=True)
    return lo + (hi - lo) * np.bincount(cell, place) / np.bincount(cell), cell


def row_weights(rows: Rows, options: Options) -> np.ndarray:
    """(rows,) adding up to 1: sizes alike, but for those with few rows; or rows alike.

    Either times the weights that the rows came with.
    """
    own = rows.weight if rows.weight.any() else np.ones(len(rows.size))
    if options.weigh == "rows":
        return own / own.sum(dtype=float)
    _, place, count = np.unique(rows.size, return_inverse=True, return_counts=True)
    weight = (np.minimum(count, ENOUGH_ROWS) / count)[place] * own
    return weight / weight.sum()


def _table(
    rows: Rows, block: np.ndarray, cell: np.ndarray, n_cells: int, weight: np.ndarray
) -> Table:
    place = block * n_cells + cell
    pooled = rows.profile.pool(place, weight, N_BLOCKS * n_cells).series
    return Table(
        pooled.reshape(N_BLOCKS, n_cells, N_NODES),
        np.bincount(place, weight, N_BLOCKS * n_cells).reshape(N_BLOCKS, n_cells),
        rows.profile.take(np.empty(0, int)),
    )


def _form(at: np.ndarray, kind: str, domain: tuple[float, float], options: Options) -> Form:
    low, high = Rule().min_beta, Rule().max_beta
    if kind == "constant":
        return constant_form(len(at), low, high)
    if kind == "log-size":
        return log_size_form(at, low, high, options.monotone)
    return polynomial_form(at, domain, low, high, monotone=options.monotone)


def solve(
    sample: Sample, of_block: np.ndarray | None = None, start: np.ndarray | None = None
) -> np.ndarray:
    """The coefficients of the best rule of its form, (k,), in the form's own basis.

    Args:
      of_block: (N_BLOCKS,) weights, None where all count once.
      start: of an earlier solution: this one is then for a resample, and worked out less exactly.
    Raises:
      QualityError: the solver failed.
    """
    objectives = sample.objectives
    exactly = start is None and isinstance(objectives, Table)
    if start is None and isinstance(objectives, Distances):
        start = sample.form.ones * np.median(objectives.optimum)
    objective = objectives.under(np.ones(N_BLOCKS) if of_block is None else of_block)
    tolerance = TOLERANCE if exactly else None
    low, high = Rule().min_beta, Rule().max_beta
    try:
        return maximise(objective, sample.form, low, high, start, tolerance).coefficients
    except ArithmeticError as failure:
        raise QualityError(
            f"no rule of kind {sample.kind} was found: {failure}; {ADVICE}"
        ) from None


def export(sample: Sample, c: np.ndarray) -> Coefficients:
    """The rule as a file holds it, checked.

    Raises:
      QualityError: plain powers would lose accuracy.
    """
    if sample.kind == "polynomial":
        t = np.linspace(0, 1, 65)
        lo, hi = sample.domain
        powers = [np.float32(p) for p in powers_of(sample, c)]
        found = horner((lo + t * (hi - lo)).astype(np.float32), powers)
        exact = basis(t, len(c) - 1) @ c
        if not (np.abs(found - exact) <= EXPORT_TOLERANCE * exact).all():
            raise QualityError(
                f"the entropies {lo:.4g} to {hi:.4g} nats are too close together for a polynomial "
                "in plain powers"
            )
    return as_rule(sample, c)


def as_rule(sample: Sample, c: np.ndarray) -> Coefficients:
    """The rule in plain powers, highest first."""
    return Coefficients(sample.rule, (Entry(powers_of(sample, c), sample.domain),))


def powers_of(sample: Sample, c: np.ndarray) -> tuple[float, ...]:
    """The coefficients of a rule in plain powers, highest first."""
    if sample.kind == "log-size":
        return tuple(map(float, c))
    padded = plain_powers(c, sample.domain) if sample.kind == "polynomial" else (float(c[0]),)
    return (0.0,) * (DEGREE + 1 - len(padded)) + padded


def fit_rule(rows: Rows, kind: str, options: Options | None = None) -> Coefficients:
    """The best rule of a kind for these rows."""
    sample = draw(rows, deal(rows), kind, options or Options())
    return export(sample, solve(sample))
