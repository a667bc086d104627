"""Example sets: a few held-out sets of every size, item by item, for figures and estimates."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.files.coefficients import Coefficients
from calibrate.maths.bounds import coefficient_bounds, dispersal_size
from calibrate.maths.masking import as_masks
from calibrate.maths.reference import entropy, softmax
from calibrate.maths.rule import beta_of
from calibrate.rows.heads import Head
from calibrate.rows.solved_rows import Rows, concatenate_rows, solve_rows
from calibrate.rows.work_units import Unit, attended_pieces

STREAM = "closeup"  # name of the random stream: another name draws other sets
N_LARGEST = 16
ROUNDING = 1e-9


class ExampleSets(NamedTuple):
    """Some sets of one size, good rows only."""

    size: int
    logits: np.ndarray  # (rows, n) float64
    target: np.ndarray  # (rows,)
    entropy: np.ndarray  # (rows,) nats
    largest: np.ndarray  # (rows, up to 16) items with the largest keys, the target last
    spread_bound: np.ndarray | None  # (rows,) bound of the logits' spread, from the weights

    @property
    def log_size(self) -> np.ndarray:
        """(rows,) log n of the unmasked items."""
        log_n: np.ndarray = np.log((self.logits > -np.inf).sum(axis=1))
        return log_n

    def rule_input(self, fit: Coefficients) -> np.ndarray:
        """(rows,) the argument of a fit's beta: H, or log n; of both, H."""
        return self.entropy if fit.rule.by_entropy else self.log_size

    def beta(self, fit: Coefficients | None) -> np.ndarray:
        """(rows,) inverse temperature under a fit, or under plain softmax."""
        if fit is None:
            return np.ones_like(self.entropy)
        entry = fit.only
        return np.asarray(
            beta_of(self.entropy, self.log_size, entry.coefficients, entry.domain, fit.rule, np)
        )

    def coefficients(self, fit: Coefficients | None) -> np.ndarray:
        """(rows, n) attention coefficients under a fit."""
        return softmax(self.logits, beta=self.beta(fit)[:, None])

    def target_coefficient(self, fit: Coefficients | None) -> np.ndarray:
        """(rows,) attention coefficient of the target."""
        return np.take_along_axis(self.coefficients(fit), self.target[:, None], axis=1)[:, 0]


def draw_examples(head: Head, sizes: Sequence[int], sets: int, seed: int) -> list[ExampleSets]:
    """Runs the head over a few sets of each size, from a stream that is used for nothing else."""
    return [_draw_size(head, size, sets, seed) for size in sorted(set(sizes))]


def _draw_size(head: Head, size: int, sets: int, seed: int) -> ExampleSets:
    pieces = list(_rows_of(head, Unit(size, 0, 0, sets), seed))
    logits, target, keys, *bound = (np.concatenate(column) for column in zip(*pieces, strict=True))
    at_target = np.take_along_axis(logits, target[:, None], axis=1)[:, 0]
    good = np.isfinite(at_target) & (logits.max(axis=1) < np.inf) & ~np.isnan(logits).any(axis=1)
    logits, target, keys = logits[good], target[good], keys[good].copy()
    np.put_along_axis(keys, target[:, None], np.inf, axis=1)
    largest = np.argsort(keys, axis=1)[:, -N_LARGEST:]
    return ExampleSets(
        size, logits, target, entropy(logits), largest, bound[0][good] if bound else None
    )


def _rows_of(head: Head, unit: Unit, seed: int) -> Iterator[tuple[np.ndarray, ...]]:
    """(logits, target, keys, and the spread's bound if the head has one), by pieces."""
    bound = getattr(head, "spread_bound", None)
    for _, batch, attended in attended_pieces(head, STREAM, seed, unit):
        logits = as_masks(np.asarray(attended.logits, float))
        keys = np.asarray(getattr(batch, "priority", logits), float)
        row = (logits, np.asarray(batch.target), keys)
        yield (*row, np.asarray(bound(batch))) if bound else row


def misranked_rows(examples: Sequence[ExampleSets]) -> Rows:
    """The misranked sets as solved rows, from which a fit could be made."""
    parts = []
    for sets in examples:
        logits = sets.logits.astype(np.float32)
        solved = solve_rows(logits, sets.target, sets.entropy, sets.size)
        parts.append(solved.take(solved.misranked))
    return concatenate_rows(parts)


class Reach(NamedTuple):
    """Measured sharpness of a head at one set size, and its bounds."""

    size: int
    spread: float  # largest of any row: its largest logit less its smallest
    spread_bound: float | None  # its bound by Proposition 3.1
    highest: float  # largest coefficient of any row
    highest_bound: float  # its bound by Lemma 2.1, from the rows' spread and unmasked items
    target: float  # median coefficient of the target


def reach(examples: Sequence[ExampleSets]) -> list[Reach]:
    """Measurements and bounds under plain softmax, by set size."""
    by_size = []
    for sets in examples:
        finite = np.where(np.isfinite(sets.logits), sets.logits, np.nan)
        spread = np.nanmax(finite, axis=1) - np.nanmin(finite, axis=1)
        n_items = np.isfinite(sets.logits).sum(axis=1)
        bound = sets.spread_bound
        by_size.append(
            Reach(
                size=sets.size,
                spread=float(spread.max()),
                spread_bound=None if bound is None else float(bound.max()),
                highest=float(sets.coefficients(None).max()),
                highest_bound=float(coefficient_bounds(spread, n_items)[1].max()),
                target=float(np.median(sets.target_coefficient(None))),
            )
        )
    return by_size


def estimated_dispersal(examples: Sequence[ExampleSets], eps: float = 0.5) -> float:
    """The size above which the target's coefficient is below eps in half of the sets.

    Estimated from the largest sets: the larger they are, the better.
    """
    largest = max(examples, key=lambda sets: sets.size)
    return float(np.median(dispersal_size(largest.logits, largest.target, eps)))


def measured_dispersal(examples: Sequence[ExampleSets], eps: float = 0.5) -> float | None:
    """The same, measured: interpolated between two sizes that bracket it, None if none do."""
    medians = [float(np.median(sets.target_coefficient(None))) for sets in examples]
    for i in range(len(examples) - 1):
        before, after = medians[i], medians[i + 1]
        if before >= eps > after:
            share = (before - eps) / (before - after)
            low, high = np.log([examples[i].size, examples[i + 1].size])
            return float(np.exp(low + share * (high - low)))
    return None


class Share(NamedTuple):
    """Where the rows of one size lie in the domain of a fit; shares add up to 1."""

    size: int
    gated: float  # H at or below min_entropy: beta is 1
    below: float  # H, or log n, below the domain
    inside: float
    above: float  # H, or log n, above the domain
    other_size: float = 0.0  # of a rule of entropy and size: n outside the domain, whatever H is


def shares(examples: Sequence[ExampleSets], fit: Coefficients) -> list[Share]:
    """Shares of rows at or below a fit's gate, and inside and outside its domain, by set size."""
    domain, rule = fit.only.domain, fit.rule
    by_size = []
    for sets in examples:
        below, above = _outside(sets.rule_input(fit), domain[:2])
        gated = (rule.min_entropy >= sets.entropy) & (rule.min_entropy > 0)
        other_size = np.zeros_like(gated)
        if rule.by_entropy and rule.by_size:
            other_size = ~gated & np.logical_or(*_outside(sets.log_size, domain[2:]))
        on = ~gated & ~other_size
        parts = (gated, on & below, on & ~below & ~above, on & above, other_size)
        by_size.append(Share(sets.size, *(float(part.mean()) for part in parts)))
    return by_size


def _outside(x: np.ndarray, domain: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """(rows,) bool each: below [lo, hi], and above.

    The ends of a domain of sizes are sizes of rows, up to the rounding of their logarithm.
    """
    lo, hi = domain
    return lo - x > ROUNDING, x - hi > ROUNDING
