"""How two fits differ: the largest change of beta, and the fields of their files."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from calibrate.files.coefficient_file import dumps
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths.rule import Rule, beta_of

N_POINTS = 101**2
# Derived from the other fields, or different in any two files.
_NOT_COMPARED = re.compile(r"id|name|version|entries\[[0-9]+\]\.check")
_ABSENT = object()

Range = tuple[float, float]


class Box(NamedTuple):
    """Ranges of what rules are functions of; None of what they do not look at."""

    entropy: Range | None
    log_n: Range | None

    @property
    def is_empty(self) -> bool:
        """Whether no row lies in it: its entropy is at most its log n."""
        low, high = self.entropy or (0.0, 0.0), self.log_n or (math.inf, math.inf)
        return low[0] > low[1] or high[0] > high[1] or low[0] > high[1]


class Point(NamedTuple):
    """A place in a box."""

    entropy: float | None
    log_n: float | None


class Change(NamedTuple):
    """The largest change of beta in a range of entropies, of log n, or of both."""

    largest: float  # |beta_b - beta_a|
    at: Point
    betas: tuple[float, float]  # (beta_a, beta_b) at that point
    range: Box


class EntryRule(NamedTuple):
    """The rule of one entry of a fit."""

    rule: Rule
    entry: Entry

    @property
    def domain(self) -> Box:
        """The entropies and log n that it was fitted on."""
        (lo, hi), (small, large) = self.entry.domain[:2], self.entry.domain[-2:]
        return Box(
            (lo, hi) if self.rule.by_entropy else None,
            (small, large) if self.rule.by_size else None,
        )

    def beta(self, H: Any, log_n: Any) -> np.ndarray:
        """beta at entropies and log n, arrays of one shape; None what it does not look at."""
        entry = self.entry
        return np.asarray(beta_of(H, log_n, entry.coefficients, entry.domain, self.rule, np))


class HeadDifference(NamedTuple):
    """How beta differs between two entries for the same head."""

    layer: int | None
    head: int | None
    common: Change | None  # on the overlap of the domains; None if they do not overlap
    # From 0 to 1 above both domains: beyond, beta does not depend on entropy; by log n, it is
    # compared on sets up to e times as large as the largest of the domains.
    anywhere: Change


class Difference(NamedTuple):
    """How fit b differs from fit a."""

    heads: list[HeadDifference]  # those with an entry in both fits
    fields: list[tuple[str, Any, Any]]  # path in the file, value in a, value in b; None is absent


def compare(a: Coefficients, b: Coefficients) -> Difference:
    """The largest changes of beta, head by head, and the fields that differ.

    Rules of any two kinds are compared, as functions of all that either looks at.
    """
    heads = [
        _head_difference(EntryRule(a.rule, entry), EntryRule(b.rule, other))
        for entry in a.entries for other in b.entries
        if _meet(entry.layer, other.layer) and _meet(entry.head, other.head)
    ]  # fmt: skip
    left, right = (dict(_leaves(json.loads(dumps(fit)), "")) for fit in (a, b))
    paths = [*left, *(path for path in right if path not in left)]
    fields = [
        (path, left.get(path), right.get(path))
        for path in paths  # 1, 1.0 and true are three values in JSON
        if repr(left.get(path, _ABSENT)) != repr(right.get(path, _ABSENT))
    ]
    return Difference(heads, fields)


def _meet(one: int | None, other: int | None) -> bool:
    return one is None or other is None or one == other


def _head_difference(a: EntryRule, b: EntryRule) -> HeadDifference:
    pairs = list(zip(a.domain, b.domain, strict=True))
    common, anywhere = Box(*map(_overlap, pairs)), Box(*map(_surroundings, pairs))
    layer = a.entry.layer if b.entry.layer is None else b.entry.layer
    head = a.entry.head if b.entry.head is None else b.entry.head
    in_common = None if common.is_empty else largest_change(a, b, common)
    return HeadDifference(layer, head, in_common, largest_change(a, b, anywhere))


def _overlap(ranges: tuple[Range | None, Range | None]) -> Range | None:
    given = [limits for limits in ranges if limits]
    return (max(lo for lo, _ in given), min(hi for _, hi in given)) if given else None


def _surroundings(ranges: tuple[Range | None, Range | None]) -> Range | None:
    given = [limits for limits in ranges if limits]
    return (0.0, max(hi for _, hi in given) + 1) if given else None


def largest_change(a: EntryRule, b: EntryRule, box: Box, n_points: int = N_POINTS) -> Change:
    """Where beta changes most in a box: at points of a grid, and of a finer one around the best.

    Args:
      n_points: of each grid, about.
    """
    coarse = _largest_on_grid(a, b, box, n_points)
    steps = math.isqrt(n_points) - 1 if box.entropy and box.log_n else n_points - 1
    near = Box(*(
        limits and _neighbourhood(limits, at, steps)
        for limits, at in zip(box, coarse.at, strict=True)
    ))  # fmt: skip
    fine = _largest_on_grid(a, b, near, n_points)
    return max(coarse, fine, key=lambda change: change.largest)._replace(range=box)


def _neighbourhood(limits: Range, at: float | None, steps: int) -> Range:
    """A step of the grid to both sides."""
    (lo, hi), middle = limits, at or 0.0
    step = (hi - lo) / steps
    return max(lo, middle - step), min(hi, middle + step)


def _largest_on_grid(a: EntryRule, b: EntryRule, box: Box, n_points: int) -> Change:
    grid = points_in(box, n_points)
    before, after = a.beta(*grid), b.beta(*grid)
    most = int(np.abs(after - before).argmax())
    betas = float(before[most]), float(after[most])
    at = Point(*(None if x is None else float(x[most]) for x in grid))
    return Change(abs(betas[1] - betas[0]), at, betas, box)


def points_in(box: Box, n_points: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """About so many entropies and log n of a box, evenly spaced, of rows that there can be.

    No row of n items has an entropy above log n.
    """
    if box.entropy is None or box.log_n is None:
        H, log_n = (None if limits is None else np.linspace(*limits, n_points) for limits in box)
        return H, log_n
    side = math.isqrt(n_points)
    (lo, hi), (small, large) = box.entropy, box.log_n
    log_n = np.linspace(max(small, lo), large, side)[:, None]
    H = lo + (np.minimum(hi, log_n) - lo) * np.linspace(0, 1, side)
    return H.ravel(), np.broadcast_to(log_n, H.shape).ravel()


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every value of a document that is not an object, with its path; entries one by one."""
    if _NOT_COMPARED.fullmatch(path):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif path == "entries":
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]")
    else:
        yield path, value
