"""Comparison of a refit with the fit before: unchanged or not, and the largest change of beta."""

import math
from typing import Any, NamedTuple

import numpy as np

from calibrate.core.rule import Rule
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry

# A fit is unchanged if its beta differs by less than this over the domain.
SAME_BETA = 1e-6
N_POINTS = 101**2

HeadRule = tuple[Rule, Entry]
Range = tuple[float, float]  # lowest, highest
Box = tuple[Range | None, Range | None]  # entropies, log n; None if no rule looks at them


class BetaChange(NamedTuple):
    """The largest change of beta, and where it is."""

    largest: float  # |after - before|
    before: float
    after: float
    entropy: float | None  # nats
    log_n: float | None


def same_fit(newest: Coefficients, new: Coefficients) -> bool:
    """True if a refit is unchanged: the same source, and the same beta over the domain."""
    if newest.source != new.source or newest.rule != new.rule:
        return False
    if [(e.layer, e.head) for e in newest.entries] != [(e.layer, e.head) for e in new.entries]:
        return False
    for old, now in zip(newest.entries, new.entries, strict=True):
        head = new.rule, now
        change = largest_change((newest.rule, old), head, domain_of(*head))
        if not change.largest < SAME_BETA:
            return False
    return True


def domain_of(rule: Rule, entry: Entry) -> Box:
    """The entropies and log n that an entry was fitted on."""
    lo, hi, *_ = *_, small, large = entry.domain
    return (lo, hi) if rule.by_entropy else None, (small, large) if rule.by_size else None


def largest_change(a: HeadRule, b: HeadRule, box: Box) -> BetaChange:
    """The point of a box at which beta changes most, at N_POINTS of a grid."""
    H, log_n = _points_in(box)
    before, after = (entry.beta_at(H, log_n, rule) for rule, entry in (a, b))
    most = int(np.abs(after - before).argmax())
    x, y = float(before[most]), float(after[most])
    at = (None if points is None else float(points[most]) for points in (H, log_n))
    return BetaChange(abs(y - x), x, y, *at)


def _points_in(box: Box) -> tuple[Any, Any]:
    """N_POINTS entropies and log n, evenly spaced; no row of n items is above log n."""
    if box[0] is None or box[1] is None:
        H, log_n = (None if limits is None else np.linspace(*limits, N_POINTS) for limits in box)
        return H, log_n
    side = math.isqrt(N_POINTS)
    (lo, hi), (small, large) = box[0], box[1]
    log_n = np.linspace(max(small, lo), large, side)[:, None]
    H = lo + (np.minimum(hi, log_n) - lo) * np.linspace(0, 1, side)
    return H.ravel(), np.broadcast_to(log_n, H.shape).ravel()
