"""Bases of the rules that are fitted through a model: few numbers, which are 0 where beta is 1.

With l = log n - c and h = 2 H / c - 1, in nats, and c = log n of a typical query, beta is 1 and a
sum of numbers times the terms of the kind:

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
from typing import Any

import numpy as np

from calibrate.core.rule import ENTROPY_AND_SIZE, ENTROPY_POLYNOMIAL, LOG_SIZE, N_POWERS, Rule
from calibrate.core.rule_kinds import CONSTANT, POLYNOMIAL

SHARED_SLOPE = "log-size-one-ratio"
_POWERS = ("1", "h", "h^2", "h^3", "h^4")
TERMS = {  # of each kind, a row of numbers each; those of a shared slope are not linear
    CONSTANT: ("1",),
    LOG_SIZE: ("1", "l"),
    POLYNOMIAL: _POWERS,
    ENTROPY_AND_SIZE: (*_POWERS, "h l", "l^2", "l"),
    SHARED_SLOPE: ("1",),
}
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

    kind: str  # a key of TERMS
    center: float  # c, nats: log n of a typical query
    largest: float  # log n of the longest example
    bounds: tuple[float, float] = (MIN_BETA, MAX_BETA)  # of beta

    @property
    def terms(self) -> tuple[str, ...]:
        """The terms of the kind; each has a row of numbers."""
        return TERMS[self.kind]

    @property
    def rule(self) -> Rule:
        """The kind of rule in a file, with its bounds."""
        if self.kind in (POLYNOMIAL, ENTROPY_AND_SIZE):
            kind = ENTROPY_POLYNOMIAL if self.kind == POLYNOMIAL else ENTROPY_AND_SIZE
            return Rule(0.0, *self.bounds, kind=kind)
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
        kind = ENTROPY_AND_SIZE if self.rule.by_entropy else LOG_SIZE
        return replace(self, kind=kind, bounds=(MIN_BETA, MAX_BETA))

    def project_gradient(self, derivatives: np.ndarray, full: "Basis") -> np.ndarray:
        """Derivatives at 0 by the numbers of `full`, (..., rows, columns), by this basis's."""
        return derivatives[..., [full.terms.index(term) for term in self.terms], :]

    def embed(self, basis: "Basis", numbers: np.ndarray) -> np.ndarray | None:
        """Numbers of a basis that this one contains, in this one; None if it is not contained."""
        if SHARED_SLOPE in (basis.kind, self.kind) or not set(basis.terms) <= set(self.terms):
            return None
        embedded = np.zeros((len(self.terms), numbers.shape[1]))
        embedded[[self.terms.index(term) for term in basis.terms]] = numbers
        return embedded

    def coefficients(self, numbers: Any) -> Any:
        """The file's coefficients: rows, arrays or tensors, give (coefficients, columns)."""
        c = self.center
        if self.kind == CONSTANT:
            return [numbers[0] * 0, 1 + numbers[0]]
        if self.kind == LOG_SIZE:
            a, k = numbers
            return [k, 1 + a - k * c]
        if self.kind == SHARED_SLOPE:
            row = numbers[0]
            own, a, k = row[:-2] if len(row) > 2 else row[:1] * 0, row[-2:-1], row[-1:]
            return [(1 + own) * k, (1 + own) * (1 + a - k * c)]
        powers = _in_powers_of_entropy([1 + numbers[0], *numbers[1:N_POWERS]], c / 2)
        if self.kind == POLYNOMIAL:
            return powers[::-1]
        t, u, k = numbers[N_POWERS:]
        level, slope, *higher = powers
        # h l = 2 H L / c - 2 H - L + c, l^2 = L^2 - 2 c L + c^2
        level = level + c * t + c * c * u - c * k
        slope = slope - 2 * t
        return [*higher[::-1], slope, level, 2 * t / c, u, k - t - 2 * c * u]

    def meets_no_bound(self, numbers: np.ndarray) -> bool:
        """True if a rule of one column, not of entropy, has no bound up to `largest`."""
        kappa, b = self.coefficients(numbers)
        ends = np.array([b, b + kappa * self.largest])
        return bool(((self.rule.min_beta <= ends) & (ends <= self.rule.max_beta)).all())


def _in_powers_of_entropy(numbers: list[Any], half: float) -> list[Any]:
    """The coefficients of H^0, H^1, ... of a sum of numbers times powers of h = H / half - 1."""
    return [
        sum(
            math.comb(i, j) * (-1) ** (i - j) * number for i, number in enumerate(numbers) if i >= j
        )
        / half**j
        for j in range(len(numbers))
    ]


def typical_sizes(lengths: np.ndarray) -> tuple[float, float]:
    """`center` and `largest` for examples of these lengths, in tokens."""
    return math.log(max(float(np.median(lengths)), 2.0)), math.log(float(lengths.max()))
