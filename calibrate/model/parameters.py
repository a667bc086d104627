"""Rules of a model's heads as few numbers for each head, which are 0 for the baseline.

The numbers are an array of a family: a kind of rule and a parameter sharing. At interpolation
weight s, a rule has s times its numbers: if beta is linear in them, it is 1 + s (beta - 1).

Let c = log n of a typical query, l = log n - c and h = 2 H / c - 1, in nats. Then beta is 1 plus
the sum of the numbers times the terms of the kind (TERMS of `core/rule.py` with h and l in place of
H and log n):

    "constant"            1
    "log-size"            1, l
    "polynomial"          1, h, h^2, h^3, h^4
    "entropy-and-size"    1, h, h^2, h^3, h^4, h l, l^2, l
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from calibrate.core.rule import (
    CONSTANT,
    TERMS,
    VARIABLES,
    RuleForm,
    Sharing,
    exponents,
)
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

Term = tuple[int, int]  # powers of h and of l
HeadId = tuple[int, int]  # (layer, head)
# Bounds of beta. Some heads gain by a beta below 1.
MIN_BETA = 0.25
MAX_BETA = 16.0
# Bounds for a step from the baseline by entropy, which is uncertain at rare entropies.
TRUST_REGION = (0.5, 2.0)


@dataclass(frozen=True)
class RuleFamily:
    """All rules of a kind and a parameter sharing, centred at typical sizes.

    The numbers of a rule are (rows, columns), with a row for each term of the kind, and a column
    for each layer or head, or one for all heads.
    """

    kind: str  # one of KINDS
    sharing: Sharing
    center: float  # c, the log n of a typical query, nats
    largest: float  # the log n of the longest example, nats
    bounds: tuple[float, float] = (MIN_BETA, MAX_BETA)  # of beta

    @property
    def is_global(self) -> bool:
        """True if all heads share their numbers."""
        return self.sharing is Sharing.GLOBAL

    @property
    def label(self) -> str:
        """The kind of rule, and its parameter sharing."""
        return f"{self.kind}, {self.sharing}"

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of the kind, in the order of the rows: first 1, then powers of h alone."""
        terms = [exponents(name) for name in TERMS[self.kind]]
        return (*sorted((i, j) for i, j in terms if not j), *((i, j) for i, j in terms if j))

    @property
    def rule(self) -> RuleForm:
        """The rule of a coefficient file, with its bounds."""
        return RuleForm(0.0, *self.bounds, kind=self.kind)

    @property
    def domain(self) -> tuple[float, ...]:
        """The range of the entropy and log n of queries; the first query sees one token."""
        return (0.0, self.largest) * len(VARIABLES[self.kind])

    def coefficients(self, numbers: Any) -> Any:
        """The coefficients of a coefficient file, a list of (columns,).

        Args:
          numbers: rows, as arrays or tensors.
        """
        level, *others = numbers
        by_exponents = {exponents(term): level * 0 for term in TERMS[self.kind]}
        for term, number in zip(self.terms, [1 + level, *others], strict=True):
            for powers, factor in _expand_term(term, self.center):
                by_exponents[powers] = by_exponents[powers] + factor * number
        return list(by_exponents.values())

    def project_gradient(
        self, derivatives: np.ndarray, heads: Sequence[HeadId], full: "RuleFamily"
    ) -> np.ndarray:
        """Derivatives at 0 by this family's numbers.

        Args:
          derivatives: (..., rows, columns) by the numbers of `full`, one column for each head.
          full: a family with all terms of this one.
        """
        rows = derivatives[..., [full.terms.index(term) for term in self.terms], :]
        columns = np.array(self.sharing.columns(heads))
        projected = np.zeros((*rows.shape[:-1], columns.max() + 1))
        np.add.at(projected.T, columns, rows.T)
        return projected

    def zeros(self, heads: Sequence[HeadId]) -> np.ndarray:
        """The numbers of the baseline."""
        return np.zeros((len(self.terms), max(self.sharing.columns(heads)) + 1))

    def baseline(self, heads: Sequence[HeadId]) -> "Parameters":
        """The baseline, where beta is 1."""
        return Parameters(self, self.zeros(heads))

    def embed(self, simpler: "Parameters") -> "Parameters | None":
        """Converts rules of a simpler family to this one; None if it does not contain them."""
        family, numbers = simpler
        if family.sharing is not self.sharing or not set(family.terms) <= set(self.terms):
            return None
        embedded = np.zeros((len(self.terms), numbers.shape[1]))
        embedded[[self.terms.index(term) for term in family.terms]] = numbers
        return Parameters(self, embedded)


def _expand_term(term: Term, center: float) -> list[tuple[Term, float]]:
    """Expands h^i l^j in powers of H and log n: their exponents, and the factor of each."""
    i, j = term
    entropy_factors = [math.comb(i, a) * (-1) ** (i - a) / (center / 2) ** a for a in range(i + 1)]
    size_factors = [math.comb(j, b) * (-center) ** (j - b) for b in range(j + 1)]
    return [
        ((a, b), x * y) for a, x in enumerate(entropy_factors) for b, y in enumerate(size_factors)
    ]


def typical_sizes(lengths: np.ndarray) -> tuple[float, float]:
    """`center` and `largest` of a family for examples of these lengths in tokens."""
    return math.log(max(float(np.median(lengths)), 2.0)), math.log(float(lengths.max()))


class Parameters(NamedTuple):
    """The rules of a model's heads, as numbers of a family."""

    family: RuleFamily
    numbers: np.ndarray  # (rows, columns)

    def interpolated(self, weight: float) -> "Parameters":
        """The rules at an interpolation weight."""
        return self._replace(numbers=weight * self.numbers)

    def changed_columns(self) -> np.ndarray:
        """The columns whose numbers are not 0."""
        return np.flatnonzero(self.numbers.any(axis=0))

    def heads_changed(self, heads: Sequence[HeadId]) -> list[HeadId]:
        """The heads whose own numbers, or those of their layer or of all heads, are not 0."""
        if self.family.is_global:
            return list(heads) if self.numbers.any() else []
        changed = set(self.changed_columns().tolist())
        columns = self.family.sharing.columns(heads)
        return [head for head, column in zip(heads, columns, strict=True) if column in changed]

    def rules(self, heads: Sequence[HeadId]) -> Fit | None:
        """A fit with the rules of the heads whose beta is not 1; None if there are none."""
        family, numbers = self
        if not numbers.any():
            return None
        by_column = np.array(family.coefficients(numbers), float).T
        if family.kind == CONSTANT:
            by_column = np.clip(by_column, MIN_BETA, MAX_BETA)
        coefficients = [tuple(column) for column in by_column.tolist()]
        if family.is_global:
            return Fit(family.rule, (Entry(coefficients[0], family.domain),))
        named = set(self.heads_changed(heads))
        columns = family.sharing.columns(heads)
        entries = [
            Entry(coefficients[column], family.domain, *head)
            for head, column in zip(heads, columns, strict=True)
            if head in named
        ]
        return Fit(family.rule, tuple(entries))


def best_of_layers(merit: np.ndarray, heads: Sequence[HeadId], n_per_layer: int) -> np.ndarray:
    """(heads,) bool: True for the heads with the largest merit in their layers.

    Args:
      merit: (heads,).
      n_per_layer: heads of a layer.
    """
    layers, best = np.array([layer for layer, _ in heads]), np.zeros(len(heads), bool)
    for layer in np.unique(layers):
        in_layer = np.flatnonzero(layers == layer)
        best[in_layer[np.argsort(-merit[in_layer], kind="stable")[:n_per_layer]]] = True
    return best
