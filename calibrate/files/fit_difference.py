"""How two fits differ: the largest change of beta, and the fields of their files."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from calibrate.files.coefficient_file import dumps
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths.rule import beta_of

N_POINTS = 10_001
# Derived from the other fields, or different in any two files.
_NOT_COMPARED = re.compile(r"id|name|version|entries\[[0-9]+\]\.check")
_ABSENT = object()


class Change(NamedTuple):
    """The largest change of beta on a range of entropies, or of log n."""

    largest: float  # |beta_b - beta_a|
    at: float  # the entropy, or log n, of the largest change
    betas: tuple[float, float]  # (beta_a, beta_b) at that point
    range: tuple[float, float]


class HeadDifference(NamedTuple):
    """How beta differs between two entries for the same head."""

    layer: int | None
    head: int | None
    common: Change | None  # on the overlap of the domains; None if they do not overlap
    # From 0 to 1 above both domains: beyond, an entropy rule is constant; a log-size rule is
    # compared on sets up to e times as large as the largest of the domains.
    anywhere: Change


class Difference(NamedTuple):
    """How fit b differs from fit a."""

    # Those with an entry in both fits. Rules of different kinds have no common x: no entries.
    heads: list[HeadDifference]
    fields: list[tuple[str, Any, Any]]  # path in the file, value in a, value in b; None is absent


def compare(a: Coefficients, b: Coefficients) -> Difference:
    """The largest changes of beta, head by head, and the fields that differ.

    Beta is compared at 10,001 evenly spaced entropies, or log n, of each range.
    """
    heads = [
        _head_difference(a, entry, b, other)
        for entry in a.entries for other in b.entries
        if a.rule.kind == b.rule.kind
        and _meet(entry.layer, other.layer) and _meet(entry.head, other.head)
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


def _head_difference(
    a: Coefficients, entry: Entry, b: Coefficients, other: Entry
) -> HeadDifference:
    def change(lo: float, hi: float) -> Change:
        x = np.linspace(lo, hi, N_POINTS)
        before = beta_of(x, x, entry.coefficients, entry.domain, a.rule, np)
        after = beta_of(x, x, other.coefficients, other.domain, b.rule, np)
        most = int(np.abs(after - before).argmax())
        betas = float(before[most]), float(after[most])
        return Change(abs(betas[1] - betas[0]), float(x[most]), betas, (lo, hi))

    lows, highs = zip(entry.domain, other.domain, strict=True)
    lo, hi, past = max(lows), min(highs), max(highs) + 1
    common = change(lo, hi) if lo <= hi else None
    layer = entry.layer if other.layer is None else other.layer
    head = entry.head if other.head is None else other.head
    return HeadDifference(layer, head, common, change(0.0, past))


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
