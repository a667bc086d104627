"""Bases of the rules that are fitted through a model: few numbers, which are 0 where beta is 1.

With l = log n - c and h = H - c / 2, in nats, and c = log n of a typical query, beta is

    "constant"            1 + a
    "log-size"            1 + a + k l
    "commitment"          1 + a + k (l - h)
    "entropy-and-size"    1 + a + k l + s h + t h l + u l^2 + v h^2

Each contains those before it, but commitment, log n - H, not log-size. And, as engines run it,

    "log-size-one-ratio"  (1 + m) (1 + a + k l)

where a and k are of all heads, and m may be of each layer or head: m = 0 is what most of them have
in common.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calibrate.core.rule import ENTROPY_AND_SIZE, LOG_SIZE, Rule
from calibrate.core.rule_kinds import CONSTANT

COMMITMENT = "commitment"
SHARED_SLOPE = "log-size-one-ratio"
N_NUMBERS = {CONSTANT: 1, LOG_SIZE: 2, COMMITMENT: 2, ENTROPY_AND_SIZE: 6, SHARED_SLOPE: 1}  # rows
# Bounds of a fit through a model: some heads gain by a beta below 1.
MIN_BETA = 0.25
MAX_BETA = 16.0
# Bounds that a shared slope never reaches at any n: engines have none.
_NO_BOUNDS = (2.0**-10, 2.0**20)


@dataclass(frozen=True)
class Basis:
    """A kind of rule, and the sizes at which its numbers count."""

    kind: str  # a key of N_NUMBERS
    center: float  # c, nats: log n of a typical query
    largest: float  # log n of the longest example

    @property
    def rule(self) -> Rule:
        """The kind of rule in a file, with its bounds."""
        if self.kind in (COMMITMENT, ENTROPY_AND_SIZE):
            return Rule(0.0, MIN_BETA, MAX_BETA, kind=ENTROPY_AND_SIZE)
        return Rule.log_size(*(_NO_BOUNDS if self.kind == SHARED_SLOPE else (MIN_BETA, MAX_BETA)))

    @property
    def domain(self) -> tuple[float, ...]:
        """Bounds of the entropies and log n of queries; the first query sees one token."""
        sizes = (0.0, self.largest)
        return sizes + sizes if self.rule.by_entropy else sizes

    @property
    def full(self) -> "Basis":
        """The largest basis that contains this one: by entropy, which is dearer, or not."""
        return replace(self, kind=ENTROPY_AND_SIZE if self.rule.by_entropy else LOG_SIZE)

    def project_gradient(self, derivatives: np.ndarray) -> np.ndarray:
        """Derivatives at 0 by the numbers of `full`, (..., rows, columns), by this basis's."""
        rows = derivatives[..., : N_NUMBERS[self.kind], :].copy()
        if self.kind == COMMITMENT:
            rows[..., 1, :] -= derivatives[..., 2, :]
        return rows

    def embed(self, basis: "Basis", numbers: np.ndarray) -> np.ndarray | None:
        """Numbers of a basis that this one contains, in this one; None if it is not contained."""
        kinds = {basis.kind, self.kind}
        if SHARED_SLOPE in kinds or {COMMITMENT, LOG_SIZE} <= kinds:
            return None
        embedded = np.zeros((N_NUMBERS[self.kind], numbers.shape[1]))
        embedded[: len(numbers)] = numbers
        if basis.kind == COMMITMENT and self.kind == ENTROPY_AND_SIZE:
            embedded[2] = -numbers[1]
        return embedded

    def coefficients(self, numbers: Any) -> Any:
        """The file's coefficients: rows, arrays or tensors, give (coefficients, columns)."""
        c = self.center
        a, *others = numbers
        if self.kind == CONSTANT:
            return [a * 0, 1 + a]
        if self.kind == SHARED_SLOPE:
            own, a, k = a[:-2] if len(a) > 2 else a[:1] * 0, a[-2:-1], a[-1:]
            return [(1 + own) * k, (1 + own) * (1 + a - k * c)]
        if self.kind == LOG_SIZE:
            (k,) = others
            return [k, 1 + a - k * c]
        if self.kind == COMMITMENT:
            (k,) = others
            others = [k, -k, *[a * 0] * 3]
        k, s, t, u, v = others
        h = c / 2
        level = 1 + a - k * c - s * h + t * h * c + u * c * c + v * h * h
        return [a * 0, a * 0, v, s - t * c - 2 * v * h, level, t, u, k - t * h - 2 * u * c]

    def meets_no_bound(self, numbers: np.ndarray) -> bool:
        """True if a rule of one column, not of entropy, has no bound up to `largest`."""
        kappa, b = self.coefficients(numbers)
        ends = np.array([b, b + kappa * self.largest])
        return bool(((self.rule.min_beta <= ends) & (ends <= self.rule.max_beta)).all())


def typical_sizes(lengths: np.ndarray) -> tuple[float, float]:
    """`center` and `largest` for examples of these lengths, in tokens."""
    return math.log(float(np.median(lengths))), math.log(float(lengths.max()))
