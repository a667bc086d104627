"""Close-up: a few held-out sets of every size, item by item, for figures and estimates."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.files.coefficients import Coefficients
from calibrate.heads import Head
from calibrate.maths import solver
from calibrate.maths.bounds import coefficient_bounds, dispersal_size
from calibrate.maths.reference import entropy, softmax
from calibrate.maths.rule import beta_of_entropy
from calibrate.pipeline.fit import Rows
from calibrate.pipeline.units import Unit, attended_pieces

STREAM = "closeup"
N_LARGEST = 16


class Closeup(NamedTuple):
    """Some sets of one size, good rows only."""

    size: int
    logits: np.ndarray  # (rows, n) float64
    target: np.ndarray  # (rows,)
    entropy: np.ndarray  # (rows,) nats
    largest: np.ndarray  # (rows, up to 16) items with the largest keys, the target last
    spread_bound: np.ndarray | None  # (rows,) of the logits, by the head's weights

    def beta(self, fit: Coefficients | None) -> np.ndarray:
        """(rows,) inverse temperature under a fit, or under plain softmax."""
        if fit is None:
            return np.ones_like(self.entropy)
        entry = fit.only
        return beta_of_entropy(self.entropy, entry.coefficients, entry.domain, fit.rule, np)

    def coefficients(self, fit: Coefficients | None) -> np.ndarray:
        """(rows, n) attention coefficients under a fit."""
        return softmax(self.logits, beta=self.beta(fit)[:, None])

    def target_coefficient(self, fit: Coefficients | None) -> np.ndarray:
        """(rows,) what the target gets."""
        return np.take_along_axis(self.coefficients(fit), self.target[:, None], axis=1)[:, 0]


def look_closely(head: Head, sizes: Sequence[int], sets: int, seed: int) -> list[Closeup]:
    """Runs the head over a few sets of each size, drawn from a stream that no fit has seen."""
    return [_look(head, size, sets, seed) for size in sorted(set(sizes))]


def _look(head: Head, size: int, sets: int, seed: int) -> Closeup:
    pieces = list(_rows_of(head, Unit(size, 0, 0, sets), seed))
    logits, target, keys, *bound = (np.concatenate(column) for column in zip(*pieces, strict=True))
    at_target = np.take_along_axis(logits, target[:, None], axis=1)[:, 0]
    good = np.isfinite(at_target) & (logits.max(axis=1) < np.inf) & ~np.isnan(logits).any(axis=1)
    logits, target = logits[good], target[good]
    largest = _largest(keys[good], target)
    return Closeup(
        size, logits, target, entropy(logits), largest, bound[0][good] if bound else None
    )


def _rows_of(head: Head, unit: Unit, seed: int) -> Iterator[tuple[np.ndarray, ...]]:
    """(logits, target, keys, and where the head can tell the bound of the spread), by pieces."""
    bound = getattr(head, "spread_bound", None)
    for _, batch, attended in attended_pieces(head, STREAM, seed, unit):
        logits = np.asarray(attended.logits, float)
        keys = np.asarray(getattr(batch, "priority", logits), float)
        row = (logits, np.asarray(batch.target), keys)
        yield (*row, np.asarray(bound(batch))) if bound else row


def _largest(keys: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The items with the largest keys, largest last; the target is the very last."""
    keys = keys.copy()
    np.put_along_axis(keys, target[:, None], np.inf, axis=1)
    return np.argsort(keys, axis=1)[:, -N_LARGEST:]


def misranked_rows(closeups: Sequence[Closeup]) -> Rows:
    """The misranked sets, solved: what a fit of theirs would be made of."""
    columns: list[tuple[np.ndarray, ...]] = []
    for closeup in closeups:
        at_target = np.take_along_axis(closeup.logits, closeup.target[:, None], axis=1)
        rows = closeup.logits.max(axis=1) > at_target[:, 0]
        solved = solver.optimal_beta(closeup.logits[rows].astype(np.float32), closeup.target[rows])
        size = np.full(rows.sum(), closeup.size, np.int32)
        columns.append((closeup.entropy[rows], solved.beta, solved.status, size))
    return Rows(*(np.concatenate(column) for column in zip(*columns, strict=True)))


class Reach(NamedTuple):
    """How sharp a head can be and is, at one set size."""

    size: int
    spread: float  # largest of the rows: largest logit less smallest
    spread_bound: float | None  # the same by Proposition 3.1
    highest: float  # largest coefficient of any row
    highest_bound: float  # the same by Lemma 2.1, from the rows' spread and unmasked items
    target: float  # median coefficient of the target


def reach(closeups: Sequence[Closeup]) -> list[Reach]:
    """Bounds and what is observed, by set size, under plain softmax."""
    found = []
    for closeup in closeups:
        finite = np.where(np.isfinite(closeup.logits), closeup.logits, np.nan)
        spread = np.nanmax(finite, axis=1) - np.nanmin(finite, axis=1)
        n_items = np.isfinite(closeup.logits).sum(axis=1)
        bound = closeup.spread_bound
        found.append(
            Reach(
                size=closeup.size,
                spread=float(spread.max()),
                spread_bound=None if bound is None else float(bound.max()),
                highest=float(closeup.coefficients(None).max()),
                highest_bound=float(coefficient_bounds(spread, n_items)[1].max()),
                target=float(np.median(closeup.target_coefficient(None))),
            )
        )
    return found


def estimated_dispersal(closeups: Sequence[Closeup], eps: float = 0.5) -> float:
    """The size from which on the target gets less than eps in half of the sets.

    Estimated from the longest sets: the longer they are, the better.
    """
    largest = max(closeups, key=lambda closeup: closeup.size)
    return float(np.median(dispersal_size(largest.logits, largest.target, eps)))


def measured_dispersal(closeups: Sequence[Closeup], eps: float = 0.5) -> float | None:
    """The same as it is seen, between two sizes that bracket it; None if none do."""
    medians = [float(np.median(closeup.target_coefficient(None))) for closeup in closeups]
    for i in range(len(closeups) - 1):
        before, after = medians[i], medians[i + 1]
        if before >= eps > after:
            share = (before - eps) / (before - after)
            low, high = np.log([closeups[i].size, closeups[i + 1].size])
            return float(np.exp(low + share * (high - low)))
    return None


class Share(NamedTuple):
    """What becomes of the rows of one size under a fit; shares add up to 1."""

    size: int
    gated: float  # H at or below min_entropy: beta is 1
    below: float  # H below the domain
    inside: float
    above: float  # H above the domain


def shares(closeups: Sequence[Closeup], fit: Coefficients) -> list[Share]:
    """How many rows a fit's guards touch, by set size."""
    lo, hi = fit.only.domain
    result = []
    for closeup in closeups:
        H = closeup.entropy
        gated = fit.rule.min_entropy >= H
        parts = (gated, ~gated & (lo > H), ~gated & (lo <= H) & (hi >= H), ~gated & (hi < H))
        result.append(Share(closeup.size, *(float(part.mean()) for part in parts)))
    return result
