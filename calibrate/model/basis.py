"""Bases of the rules that are fitted through a model: few numbers, which are 0 where beta is 1.

With l = log n - c and h = 2 H / c - 1, in nats, and c = log n of a typical query, beta is 1 and a
sum of numbers times the terms of the kind of rule (`core/rule_kinds.py`), in h and l in place of H
and log n:

    "constant"            1
    "log-size"            1, l
    "polynomial"          1, h, h^2, h^3, h^4
    "entropy-and-size"    1, h, h^2, h^3, h^4, h l, l^2, l

And, as engines run it,

    "log-size-one-ratio"  (1 + m) (1 + a + k l)

where a and k are of all heads, and m may be of each layer or head: m = 0 is what most of them have
in common.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from calibrate.core.rule import TERMS, Rule, exponents
from calibrate.core.rule_kinds import ENTROPY, KINDS

SHARED_SLOPE = "log-size-one-ratio"
Term = tuple[int, int]  # powers of h and of l
# Bounds of a fit through a model: some heads gain by a beta below 1.
MIN_BETA = 0.25
MAX_BETA = 16.0
# Of a step from the baseline, whose rules by entropy are least known where entropies are rare.
TRUST_REGION = (0.5, 2.0)
# Bounds that a shared slope never reaches at any n: engines have none.
_NO_BOUNDS = (2.0**-10, 2.0**20)


@dataclass(frozen=True)
class Basis:
    """A kind of rule, and the sizes at which its numbers count."""

    kind: str  # a key of KINDS, or SHARED_SLOPE
    center: float  # c, nats: log n of a typical query
    largest: float  # log n of the longest example
    bounds: tuple[float, float] = (MIN_BETA, MAX_BETA)  # of beta

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of the kind, each with a row of numbers; that of a shared slope is not linear.

        1 is the first, and then come powers of h alone.
        """
        return _terms_of(KINDS[self.kind].terms) if self.kind in KINDS else ((0, 0),)

    @property
    def by_entropy(self) -> bool:
        """True if beta is a function of entropy, among others."""
        return self.kind in KINDS and ENTROPY in KINDS[self.kind].needs

    @property
    def rule(self) -> Rule:
        """The kind of rule in a file, with its bounds."""
        if self.by_entropy:
            return Rule(0.0, *self.bounds, kind=KINDS[self.kind].file_kind)
        # A constant is a line in log n, too: engines run it, and no entropy is computed for it.
        return Rule.log_size(*(_NO_BOUNDS if self.kind == SHARED_SLOPE else self.bounds))

    @property
    def domain(self) -> tuple[float, ...]:
        """Bounds of the entropies and log n of queries; the first query sees one token."""
        sizes = (0.0, self.largest)
        return sizes + sizes if self.rule.depends_on_both else sizes

    @property
    def full(self) -> "Basis":
        """The largest basis that contains this one: by entropy, which is dearer, or not.

        It has the same bounds for all kinds: derivatives at 0 do not depend on them.
        """
        bases = [replace(self, kind=kind, bounds=(MIN_BETA, MAX_BETA)) for kind in KINDS]
        larger = [x for x in bases if x.contains(self) and x.by_entropy == self.by_entropy]
        return max(larger, key=lambda basis: len(basis.terms))

    def contains(self, basis: "Basis") -> bool:
        """True if it has all terms of another basis."""
        return set(basis.terms) <= set(self.terms)

    def project_gradient(self, derivatives: np.ndarray, full: "Basis") -> np.ndarray:
        """Derivatives at 0 by the numbers of `full`, (..., rows, columns), by this basis's."""
        return derivatives[..., [full.terms.index(term) for term in self.terms], :]

    def embed(self, basis: "Basis", numbers: np.ndarray) -> np.ndarray | None:
        """Numbers of a basis that this one contains, in this one; None if it is not contained."""
        if SHARED_SLOPE in (basis.kind, self.kind) or not self.contains(basis):
            return None
        embedded = np.zeros((len(self.terms), numbers.shape[1]))
        embedded[[self.terms.index(term) for term in basis.terms]] = numbers
        return embedded

    def coefficients(self, numbers: Any) -> Any:
        """The file's coefficients: rows, arrays or tensors, give (coefficients, columns)."""
        c = self.center
        if self.kind == SHARED_SLOPE:
            row = numbers[0]
            own, a, k = row[:-2] if len(row) > 2 else row[:1] * 0, row[-2:-1], row[-1:]
            return [(1 + own) * k, (1 + own) * (1 + a - k * c)]
        level, *others = numbers
        by_exponents = {exponents(term): level * 0 for term in TERMS[self.rule.kind]}
        for term, number in zip(self.terms, [1 + level, *others], strict=True):
            for plain, factor in _expanded(term, c):
                by_exponents[plain] = by_exponents[plain] + factor * number
        return list(by_exponents.values())

    def meets_no_bound(self, numbers: np.ndarray) -> bool:
        """True if a rule of one column, not of entropy, has no bound up to `largest`."""
        kappa, b = self.coefficients(numbers)
        ends = np.array([b, b + kappa * self.largest])
        return bool(((self.rule.min_beta <= ends) & (ends <= self.rule.max_beta)).all())


def _terms_of(names: tuple[str, ...]) -> tuple[Term, ...]:
    """The powers in the terms of a kind: those of h alone first, from 1 on, then as in a file."""
    terms = [exponents(name) for name in names]
    return (*sorted((i, j) for i, j in terms if not j), *((i, j) for i, j in terms if j))


@lru_cache(maxsize=64)
def _expanded(term: Term, center: float) -> list[tuple[Term, float]]:
    """h^i l^j as a sum of powers of H and log n: their exponents, and the factor of each."""
    i, j = term
    of_entropy = [math.comb(i, a) * (-1) ** (i - a) / (center / 2) ** a for a in range(i + 1)]
    of_size = [math.comb(j, b) * (-center) ** (j - b) for b in range(j + 1)]
    return [((a, b), x * y) for a, x in enumerate(of_entropy) for b, y in enumerate(of_size)]


def typical_sizes(lengths: np.ndarray) -> tuple[float, float]:
    """`center` and `largest` for examples of these lengths, in tokens."""
    return math.log(max(float(np.median(lengths)), 2.0)), math.log(float(lengths.max()))
