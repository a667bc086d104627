"""Score logits on disk: how probable fits make the targets, head by head and size by size."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from calibrate.collecting.collect import examine
from calibrate.collecting.work_units import Unit, plan_units
from calibrate.errors import CalibrateError, QualityError
from calibrate.evaluation.baselines import paper
from calibrate.files.coefficients import Coefficients, identity
from calibrate.files.collection import COUNTS, refuse_bad_rows
from calibrate.fitting.rule_fitting import ENOUGH_ROWS
from calibrate.fitting.solved_rows import head_label, known_index
from calibrate.heads.logits_files import MOST_HEADS, Arrays, LoggedRows
from calibrate.maths.likelihood_profile import log_p
from calibrate.maths.rule import Rule, beta_of

# Of every row under every rule: log p of the target, or of the total mass of several; p itself;
# and both less those of plain softmax on the same row.
MEASURES = ("log_p", "p", "log_p_gain", "p_gain")
LEAST_ALIKE = 1.5  # rows that count alike: where weights leave fewer, nothing says their spread


class Moments(NamedTuple):
    """Rows in cells: of each cell what its weighted mean and the error of that mean are made of."""

    rows: np.ndarray  # (cells,)
    weight: np.ndarray  # (cells,): its sum
    squared: np.ndarray  # (cells,): the sum of its squares
    mean: np.ndarray  # (cells, ...)
    centre: np.ndarray  # (cells, ...): the mean by the squares of the weights
    squares: np.ndarray  # (cells, ...): squared deviations from that, by the same

    @classmethod
    def of(
        cls, values: np.ndarray, cell: np.ndarray, n_cells: int, weight: np.ndarray | None = None
    ) -> "Moments":
        """Of values (rows, ...), each row in its cell, and all alike if there is no weight."""
        own = np.ones(len(cell)) if weight is None else weight.astype(float)
        square = own**2
        flat = values.reshape(len(values), math.prod(values.shape[1:]))

        def total(by: np.ndarray, flat: np.ndarray) -> np.ndarray:
            columns = [np.bincount(cell, by * column, n_cells) for column in flat.T]
            return np.stack(columns, axis=1)

        in_cell, squared = (np.bincount(cell, by, n_cells) for by in (own, square))
        mean = total(own, flat) / _or_one(in_cell)[:, None]
        centre = total(square, flat) / _or_one(squared)[:, None]
        squares = total(square, (flat - centre[cell]) ** 2)
        shaped = (x.reshape(n_cells, *values.shape[1:]) for x in (mean, centre, squares))
        return cls(np.bincount(cell, minlength=n_cells), in_cell, squared, *shaped)

    def merge(self, other: "Moments") -> "Moments":
        """Of the rows of both, cell by cell."""
        return Moments(*map(np.stack, zip(self, other, strict=True))).pool()

    def pool(self) -> "Moments":
        """Of the rows of all cells; no large sums cancel (Chan, Golub and LeVeque)."""
        if len(self.rows) == 1:
            return Moments(*(x[0] for x in self))
        mean, _ = _joined(self.weight, self.mean)
        centre, between = _joined(self.squared, self.centre)
        rows, weight, squared, squares = (
            x.sum(axis=0) for x in (self.rows, self.weight, self.squared, self.squares)
        )
        return Moments(rows, weight, squared, mean, centre, squares + between)


def _joined(weight: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean of all along the first axis, and the squares of what is between them."""
    own = _across(weight, mean.ndim)
    joint = np.sum(own / _or_one(own.sum(axis=0)) * mean, axis=0)
    return joint, np.sum(own * (mean - joint) ** 2, axis=0)


def _across(of_cells: np.ndarray, ndim: int) -> np.ndarray:
    """With as many axes as the values of the cells have."""
    return of_cells.reshape(of_cells.shape + (1,) * (ndim - of_cells.ndim))


def _or_one(weight: np.ndarray) -> np.ndarray:
    """What to divide by: of no weight, anything."""
    return np.where(weight > 0, weight, 1.0)


class Estimate(NamedTuple):
    """Means over rows, and their standard errors.

    NaN where no row has any weight; errors also where a single one has all of it, or nearly.
    """

    rows: int
    mean: np.ndarray  # (rules, MEASURES)
    error: np.ndarray

    def of(self, rule: int, measure: str) -> tuple[float, float]:
        """(mean, standard error) of one measure under one rule."""
        i = MEASURES.index(measure)
        return float(self.mean[rule, i]), float(self.error[rule, i])


class LogitScores(NamedTuple):
    """Every rule on every head and set size of some logits."""

    name: str  # of the logits
    fingerprint: str
    rules: list[str]  # "plain", "paper", and the fits
    fits: list[Coefficients]  # those rules
    heads: list[tuple[int | None, int | None]]  # (layer, head), None where nobody says
    sizes: list[int]
    by_size: list[Moments]  # of each size: cells are heads, values (rules, MEASURES)
    counts: list[dict[str, int]]  # of each size: its rows, and the bad ones by reason

    @property
    def weighed(self) -> bool:
        """Whether rows count by weights, and not alike."""
        return any((found.weight != found.rows).any() for found in self.by_size)

    def estimate(self, size: int | None = None, head: int | None = None) -> Estimate:
        """Of one set size, one head (their places in the lists), both, or all there is.

        Rows of one size count by their weight, whatever their head. Sizes count alike, but for
        those of fewer than 100 rows, whatever they weigh. Errors take all rows to be independent.
        """
        cells = self.by_size if size is None else [self.by_size[size]]
        picked = slice(None) if head is None else slice(head, head + 1)
        pooled = [Moments(*(x[picked] for x in cell)).pool() for cell in cells]
        return _sizes_alike(Moments(*map(np.stack, zip(*pooled, strict=True))))

    def names(self, rule: int, head: int) -> bool:
        """Whether a rule has something to say of a head; else it stays as it is."""
        return rule > 0 and self.fits[rule].entry_of(*self.heads[head]) is not None

    def ranked(self, rule: int) -> list[int]:
        """The heads that a rule names, the largest gain first, and then the others."""

        def place(head: int) -> tuple[bool, float]:
            gain, _ = self.estimate(head=head).of(rule, "log_p_gain")
            return not self.names(rule, head), -gain if np.isfinite(gain) else np.inf

        return sorted(range(len(self.heads)), key=place)

    def held_out(self, rule: int) -> bool:
        """Whether the fit was made of anything but these very rows, as far as it says."""
        return self.fits[rule].fingerprint != self.fingerprint

    def head_label(self, head: int) -> str:
        """What to call a head: of logits that do not say, their name."""
        return head_label(*self.heads[head]) or self.name


def _sizes_alike(sizes: Moments) -> Estimate:
    """The mean over set sizes, those of few rows counting less; see `LogitScores.estimate`."""
    n_rows, some = int(sizes.rows.sum()), sizes.weight > 0
    if not some.any():
        nothing = np.full(sizes.mean.shape[1:], np.nan)
        return Estimate(n_rows, nothing, nothing)
    rows, weight, squared = (_across(x[some], sizes.mean.ndim) for x in sizes[:3])
    means, centre, squares = (x[some] for x in sizes[3:])
    share = np.minimum(rows, ENOUGH_ROWS)
    share = share / share.sum()
    mean = np.sum(share * means, axis=0)
    # So many rows that count alike would say as much.
    alike = weight**2 / squared
    alone = alike < LEAST_ALIKE
    # sum w^2 (x - mean)^2 / (sum w)^2: how far a row lies from the mean may go with its weight.
    variance = (squares + squared * (centre - means) ** 2) / weight**2
    variance = variance * alike / np.where(alone, 1, alike - 1)
    # A row that is alone in its size does not say how far others would be from it.
    variance = np.where(alone, (means - mean) ** 2, variance)
    error = np.sqrt(np.sum(share**2 * variance, axis=0))
    if alone.all() and len(alone) == 1:
        error = np.full_like(error, np.nan)
    return Estimate(n_rows, mean, error)


class _ByHead(NamedTuple):
    """A fit as arrays: one column per head."""

    rule: Rule
    numbers: np.ndarray  # (coefficients + 2, heads): the coefficients, and the domain
    named: np.ndarray  # (heads,) bool

    def beta(self, of_head: np.ndarray, H: np.ndarray, log_n: np.ndarray) -> np.ndarray:
        """(rows,) beta of rows of these heads."""
        *powers, lo, hi = self.numbers[:, of_head]
        beta = beta_of(H, log_n, powers, (lo, hi), self.rule, np)
        return np.where(self.named[of_head], beta, 1.0)


def score_logits(
    arrays: Arrays,
    fits: Mapping[str, Coefficients],
    report: Callable[[Unit], None] = lambda unit: None,
) -> LogitScores:
    """Scores plain softmax, the paper's numbers, and fits, on rows on disk.

    Each head is scored by the fit's own entry for it, and with beta = 1 where it has none. A piece
    of the rows is in memory at a time. Bad rows (NaN, +inf, a masked target) are counted and left
    out.

    Args:
      arrays: the rows; other ones than the fits are made of.
      fits: by name, with an entry for all heads alike, or one for each.
      report: called after each piece.
    Raises:
      CalibrateError: a fit is for heads that are not these, or the rows do not say whose they are.
      QualityError: there are no rows of any weight, or more than 1 % of all are bad.
    Warns:
      UserWarning: a fit was made of these very rows.
    """
    for name, fit in fits.items():
        _check_heads(name, fit, arrays)
        if fit.fingerprint == arrays.fingerprint:
            warnings.warn(
                f"{name} was made of these very rows ({arrays.name}): they are not held out",
                stacklevel=2,
            )
    rules = {"plain": identity(), "paper": paper(), **fits}
    by_head = [_by_head(fit, arrays) for fit in rules.values()]
    by_size, counts = [], []
    for size in arrays.sizes:
        found, count = _score_size(arrays, size, by_head, report)
        by_size.append(found)
        counts.append({"size": size} | dict(zip(COUNTS, count.tolist(), strict=True)))
    refuse_bad_rows({"sizes": counts})
    if not any(found.weight.any() for found in by_size):
        raise QualityError(f"{arrays.name} has no row of any weight to score; give some")
    return LogitScores(
        arrays.name, arrays.fingerprint, list(rules), list(rules.values()),
        _heads(arrays), arrays.sizes, by_size, counts,
    )  # fmt: skip


def _check_heads(name: str, fit: Coefficients, arrays: Arrays) -> None:
    """A fit for other heads would leave every row as it is, without a word."""
    heads = _heads(arrays)
    for axis in ("layer", "head"):
        told = any(getattr(entry, axis) is not None for entry in fit.entries)
        if told and any(pair[axis == "head"] is None for pair in heads):
            raise CalibrateError(
                f"{name} has an entry per {axis}, and {arrays.name} does not say which {axis} its "
                f"rows are of; give an array {axis!r} (rows,)"
            )
    if heads and all(fit.entry_of(*head) is None for head in heads):
        raise CalibrateError(
            f"{name} names none of the {len(heads)} heads that the rows of {arrays.name} are of "
            f"(the first is {head_label(*heads[0])}); give a fit of this model"
        )


def _heads(arrays: Arrays) -> list[tuple[int | None, int | None]]:
    return [(known_index(layer), known_index(head)) for layer, head in arrays.heads]


def _by_head(fit: Coefficients, arrays: Arrays) -> _ByHead:
    entries = [fit.entry_of(*head) for head in _heads(arrays)]
    some = fit.entries[0]  # where there is none, any numbers do
    numbers = [(*entry.coefficients, *entry.domain) for entry in (x or some for x in entries)]
    named = np.array([entry is not None for entry in entries], bool)
    return _ByHead(fit.rule, np.array(numbers).T, named)


def _score_size(
    arrays: Arrays, size: int, by_head: list[_ByHead], report: Callable[[Unit], None]
) -> tuple[Moments, np.ndarray]:
    """The rows of one size: what they score, and the counts of COUNTS."""
    found: Moments | None = None
    count = np.zeros(len(COUNTS), np.int64)
    for unit in plan_units(size, arrays.count(size)):
        rows = arrays.rows(unit.size, unit.first, unit.sets)
        good, _, H, seen = map(np.asarray, examine(rows.logits, rows.target))
        rows = LoggedRows(*(x[good] for x in rows))
        values, of_head = _measure(rows, H[good], arrays, by_head)
        piece = Moments.of(values, of_head, len(arrays.heads), rows.weight)
        found = piece if found is None else found.merge(piece)
        count += seen
        report(unit)
    assert found is not None
    return found, count


def _measure(
    rows: LoggedRows, H: np.ndarray, arrays: Arrays, by_head: list[_ByHead]
) -> tuple[np.ndarray, np.ndarray]:
    """(rows, rules, MEASURES), and which of the heads each row is of."""
    of_head = np.searchsorted(
        _code(np.array(arrays.heads)), _code(np.stack([rows.layer, rows.head], axis=1))
    )
    log_n = np.log((rows.logits > -np.inf).sum(axis=1))
    betas = np.stack([rule.beta(of_head, H.astype(float), log_n) for rule in by_head], axis=1)
    found = log_p(rows.logits, rows.target, betas).astype(float)
    p = np.exp(found)
    return np.stack([found, p, found - found[:, :1], p - p[:, :1]], axis=2), of_head


def _code(heads: np.ndarray) -> np.ndarray:
    """(heads, 2) -> one number for each, in the same order."""
    layer, head = heads.astype(np.int64).T + 1
    return layer * (MOST_HEADS + 1) + head
