"""How two fits differ: the largest change of beta, and the fields of their files."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from calibrate.files.coefficient_file import dumps
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths.rule import beta_of_entropy

N_POINTS = 10_001
# They follow from the other fields, or differ between any two files.
_NOT_COMPARED = ("id", "name", "version", "check")


class Change(NamedTuple):
    """The largest change of beta between two entries for the same head."""

    layer: int | None
    head: int | None
    domain: tuple[float, float] | None  # what both domains cover, nats; None if nothing
    largest: float  # |beta_b - beta_a|; NaN without a common domain
    entropy: float  # where it is, nats
    betas: tuple[float, float]  # (beta_a, beta_b) there


class Difference(NamedTuple):
    """How fit b differs from fit a."""

    changes: list[Change]  # of the heads that both have
    fields: list[tuple[str, Any, Any]]  # path in the file, value in a, value in b; None is absent


def compare(a: Coefficients, b: Coefficients) -> Difference:
    """The largest change of beta over the common domain, head by head, and the fields that differ.

    Beta is compared at 10,001 evenly spaced entropies of each common domain.
    """
    others = {(entry.layer, entry.head): entry for entry in b.entries}
    pairs = [
        (entry, others[entry.layer, entry.head]) for entry in a.entries
        if (entry.layer, entry.head) in others
    ]  # fmt: skip
    changes = [_change(a, entry, b, other) for entry, other in pairs]
    left, right = (dict(_leaves(json.loads(dumps(fit)), "")) for fit in (a, b))
    paths = [*left, *(path for path in right if path not in left)]
    fields = [
        (path, left.get(path), right.get(path))
        for path in paths if left.get(path) != right.get(path)
    ]  # fmt: skip
    return Difference(changes, fields)


def _change(a: Coefficients, entry: Entry, b: Coefficients, other: Entry) -> Change:
    lo = max(entry.domain[0], other.domain[0])
    hi = min(entry.domain[1], other.domain[1])
    if lo > hi:
        nan = float("nan")
        return Change(entry.layer, entry.head, None, nan, nan, (nan, nan))
    H = np.linspace(lo, hi, N_POINTS)
    before = beta_of_entropy(H, entry.coefficients, entry.domain, a.rule, np)
    after = beta_of_entropy(H, other.coefficients, other.domain, b.rule, np)
    most = int(np.abs(after - before).argmax())
    betas = float(before[most]), float(after[most])
    return Change(
        entry.layer, entry.head, (lo, hi), abs(betas[1] - betas[0]), float(H[most]), betas
    )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every value of a document that is no object, with its path; entries one by one."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in _NOT_COMPARED:
                yield from _leaves(item, f"{path}.{key}" if path else key)
    elif path == "entries":
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]")
    else:
        yield path, value
