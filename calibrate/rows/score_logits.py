"""Scores of logits on disk: the probability of targets under fits, by head and set size."""

import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from calibrate.errors import CalibrateError, QualityError
from calibrate.files.coefficients import Coefficients, identity
from calibrate.files.rows import COUNTS, refuse_bad_rows
from calibrate.maths.likelihood_profile import log_p
from calibrate.maths.rule import N_COEFFICIENTS, Rule, beta_of
from calibrate.rows import group_sums
from calibrate.rows.baselines import paper
from calibrate.rows.collect import examine
from calibrate.rows.group_sums import GroupSums
from calibrate.rows.logits_files import Arrays
from calibrate.rows.logits_rows import MOST_HEADS, LoggedRows
from calibrate.rows.moments import Moments, expand_axes
from calibrate.rows.solved_rows import head_label, known_index
from calibrate.rows.weighting import MIN_EFFECTIVE, size_shares, widened
from calibrate.rows.work_units import Unit, plan_units

# Of every row under every rule: log p of the target (of several, of their total), p, and the gains
# of both over plain softmax on the same row.
MEASURES = ("log_p", "p", "log_p_gain", "p_gain")


class Estimate(NamedTuple):
    """Means over rows, and their standard errors.

    Both are NaN where all weights are 0; errors also where one row, or one group, has almost all of
    the weight. Of few rows, or groups, they are as much wider as Student's t is.
    """

    rows: int
    mean: np.ndarray  # (rules, MEASURES)
    error: np.ndarray

    def of(self, rule: int, measure: str) -> tuple[float, float]:
        """(mean, standard error) of one measure under one rule."""
        i = MEASURES.index(measure)
        return float(self.mean[rule, i]), float(self.error[rule, i])


class LogitScores(NamedTuple):
    """Scores of every rule on every head and set size."""

    name: str  # of the logits
    fingerprint: str
    rules: list[str]  # "plain", "paper", and the fits
    fits: list[Coefficients]  # those rules
    heads: list[tuple[int | None, int | None]]  # (layer, head), None where unknown
    sizes: list[int]
    by_size: list[Moments]  # of each size: cells are heads, values (rules, MEASURES)
    counts: list[dict[str, int]]  # of each size: its rows, and the bad ones by reason
    n_groups: int = 0  # that the rows come from; 0 where unknown
    by_group: list[GroupSums] | None = None  # of each size, where groups are known

    @property
    def weighed(self) -> bool:
        """Whether rows have weights that are not all equal."""
        return any((moments.weight != moments.rows).any() for moments in self.by_size)

    def estimate(self, size: int | None = None, head: int | None = None) -> Estimate:
        """Means over the rows of one set size, one head (indices in the lists), both, or all.

        Rows of one size have their own weight, whatever their head. Sizes have equal weight, with
        fewer than 100 rows less. Errors assume that groups are independent, or else all rows.
        """
        sizes = slice(None) if size is None else slice(size, size + 1)
        heads = slice(None) if head is None else slice(head, head + 1)
        pooled = [Moments(*(x[heads] for x in cell)).pool() for cell in self.by_size[sizes]]
        moments = Moments(*map(np.stack, zip(*pooled, strict=True)))
        if self.by_group is None or not moments.weight.any():
            return _mean_over_sizes(moments)
        mean, error = group_sums.estimate(self.by_group[sizes], heads, moments.rows)
        return Estimate(int(moments.rows.sum()), mean, error)

    def names(self, rule: int, head: int) -> bool:
        """Whether a rule has an entry for a head; without one the head keeps plain softmax."""
        return rule > 0 and self.fits[rule].entry_of(*self.heads[head]) is not None

    def ranked(self, rule: int) -> list[int]:
        """The heads that a rule names, by falling gain, and then the others."""

        def sort_key(head: int) -> tuple[bool, float]:
            gain, _ = self.estimate(head=head).of(rule, "log_p_gain")
            return not self.names(rule, head), -gain if np.isfinite(gain) else np.inf

        return sorted(range(len(self.heads)), key=sort_key)

    def held_out(self, rule: int) -> bool:
        """Whether the fit was made of other rows, by the fingerprint in its file."""
        return self.fits[rule].fingerprint != self.fingerprint

    def head_label(self, head: int) -> str:
        """The name of a head; that of the logits if they name no heads."""
        return head_label(*self.heads[head]) or self.name


def _mean_over_sizes(sizes: Moments) -> Estimate:
    """The mean over set sizes; those with few rows have less weight."""
    n_rows, weighted = int(sizes.rows.sum()), sizes.weight > 0
    if not weighted.any():
        undefined = np.full(sizes.mean.shape[1:], np.nan)
        return Estimate(n_rows, undefined, undefined)
    weight, squared = (
        expand_axes(x[weighted], sizes.mean.ndim) for x in (sizes.weight, sizes.squared)
    )
    means, centre, squares = (x[weighted] for x in (sizes.mean, sizes.centre, sizes.squares))
    share = expand_axes(size_shares(sizes.rows, sizes.weight)[weighted], sizes.mean.ndim)
    mean = np.sum(share * means, axis=0)
    effective = weight**2 / squared  # this many rows of equal weight
    alone = effective < MIN_EFFECTIVE
    # sum w^2 (x - mean)^2 / (sum w)^2, as deviations may depend on the weight.
    variance = (squares + squared * (centre - means) ** 2) / weight**2
    variance = variance * effective / np.where(alone, 1, effective - 1)
    # The variance of a single row is estimated by its distance to the mean of all sizes.
    variance = np.where(alone, (means - mean) ** 2, variance)
    error = np.sqrt(np.sum(share**2 * variance, axis=0))
    return Estimate(n_rows, *widened(mean, error, 1 / np.sum(share**2 / effective, axis=0)))


class _ByHead(NamedTuple):
    """A fit as arrays: one column per head."""

    rule: Rule
    numbers: np.ndarray  # (numbers, heads): the coefficients, and the domain
    named: np.ndarray  # (heads,) bool

    def beta(self, of_head: np.ndarray, H: np.ndarray, log_n: np.ndarray) -> np.ndarray:
        """(rows,) beta of rows of the heads with these indices."""
        numbers, n_coefficients = list(self.numbers[:, of_head]), N_COEFFICIENTS[self.rule.kind]
        powers, domain = numbers[:n_coefficients], numbers[n_coefficients:]
        beta = beta_of(H, log_n, powers, domain, self.rule, np)
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
      arrays: the rows; fits should be made of others.
      fits: by name, with an entry for all heads, or one for each.
      report: called after each piece.
    Raises:
      CalibrateError: a fit for other heads, or rows that do not name their heads.
      QualityError: all weights are 0, or more than 1 % bad rows.
    Warns:
      UserWarning: a fit was made of these rows.
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
    by_size, by_group, counts = [], [], []
    for size in arrays.sizes:
        moments, sums, count = _score_size(arrays, size, by_head, report)
        by_size.append(moments)
        by_group.append(sums)
        counts.append({"size": size} | dict(zip(COUNTS, count.tolist(), strict=True)))
    refuse_bad_rows({"sizes": counts})
    if not any(moments.weight.any() for moments in by_size):
        raise QualityError(f"{arrays.name} has no row of any weight to score; give some")
    return LogitScores(
        arrays.name, arrays.fingerprint, list(rules), list(rules.values()),
        _heads(arrays), arrays.sizes, by_size, counts,
        len(arrays.groups), by_group if len(arrays.groups) else None,
    )  # fmt: skip


def _check_heads(name: str, fit: Coefficients, arrays: Arrays) -> None:
    """Raises CalibrateError for a fit for other heads, which would leave every row unchanged."""
    heads = _heads(arrays)
    for axis in ("layer", "head"):
        named = any(getattr(entry, axis) is not None for entry in fit.entries)
        if named and any(pair[axis == "head"] is None for pair in heads):
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
    filler = fit.entries[0]  # its numbers are not used where a head has no entry
    numbers = [(*entry.coefficients, *entry.domain) for entry in (x or filler for x in entries)]
    named = np.array([entry is not None for entry in entries], bool)
    return _ByHead(fit.rule, np.array(numbers).T, named)


def _score_size(
    arrays: Arrays, size: int, by_head: list[_ByHead], report: Callable[[Unit], None]
) -> tuple[Moments, GroupSums, np.ndarray]:
    """The moments of the rows of one size, their sums by group, and the counts named by COUNTS."""
    moments: Moments | None = None
    block = group_sums.blocks_of(arrays.groups)
    sums = GroupSums.of_none(len(arrays.heads), (len(by_head), len(MEASURES)))
    count = np.zeros(len(COUNTS), np.int64)
    for unit in plan_units(size, arrays.count(size)):
        rows = arrays.rows(unit.size, unit.first, unit.sets)
        good, _, H, counted = examine(rows.logits, rows.target)
        good &= rows.weight > 0  # others are not among the rows of their size
        rows = LoggedRows(*(x[good] for x in rows))
        values, of_head = _measure(rows, H[good], arrays, by_head)
        piece = Moments.of(values, of_head, len(arrays.heads), rows.weight)
        moments = piece if moments is None else moments.merge(piece)
        if len(block):
            of_row = block[np.searchsorted(arrays.groups, rows.group)]
            sums.add(values, of_row, of_head, rows.weight)
        count += counted
        report(unit)
    assert moments is not None
    return moments, sums, count


def _measure(
    rows: LoggedRows, H: np.ndarray, arrays: Arrays, by_head: list[_ByHead]
) -> tuple[np.ndarray, np.ndarray]:
    """(rows, rules, MEASURES), and (rows,) the index of each row's head."""
    of_head = np.searchsorted(
        _code(np.array(arrays.heads)), _code(np.stack([rows.layer, rows.head], axis=1))
    )
    log_n = np.log((rows.logits > -np.inf).sum(axis=1))
    betas = np.stack([rule.beta(of_head, H.astype(float), log_n) for rule in by_head], axis=1)
    log_probability = log_p(rows.logits, rows.target, betas).astype(float)
    p = np.exp(log_probability)
    gains = log_probability - log_probability[:, :1], p - p[:, :1]
    return np.stack([log_probability, p, *gains], axis=2), of_head


def _code(heads: np.ndarray) -> np.ndarray:
    """(heads, 2) -> one number for each, in the same order."""
    layer, head = heads.astype(np.int64).T + 1
    codes: np.ndarray = layer * (MOST_HEADS + 1) + head
    return codes
