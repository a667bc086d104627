"""Rules of a model's heads as few numbers for each head, which are 0 for the baseline.

The numbers are an array of a basis (a kind of rule) and a parameter sharing. At interpolation
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
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from calibrate.core.rule import (
    CONSTANT,
    KINDS,
    LOG_SIZE,
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
class Basis:
    """A kind of rule, centred at typical sizes."""

    kind: str  # one of KINDS
    center: float  # c, the log n of a typical query, nats
    largest: float  # the log n of the longest example, nats
    bounds: tuple[float, float] = (MIN_BETA, MAX_BETA)  # of beta

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of the kind, in the order of the rows: first 1, then powers of h alone."""
        return _order_terms(TERMS[self.kind])

    @property
    def by_entropy(self) -> bool:
        """True if beta depends on the entropy."""
        return "H" in VARIABLES[self.kind]

    @property
    def rule(self) -> RuleForm:
        """The rule of a coefficient file, with its bounds."""
        return RuleForm(0.0, *self.bounds, kind=self.kind)

    @property
    def domain(self) -> tuple[float, ...]:
        """The range of the entropy and log n of queries; the first query sees one token."""
        return (0.0, self.largest) * len(VARIABLES[self.kind])

    @property
    def full(self) -> "Basis":
        """The largest basis that contains this one and depends on the same variables.

        Derivatives by entropy cost more, and are only computed where they are needed. The bounds
        are the same for all kinds, since derivatives at 0 do not depend on them.
        """
        bases = [replace(self, kind=kind, bounds=(MIN_BETA, MAX_BETA)) for kind in KINDS]
        larger = [x for x in bases if x.contains(self) and x.by_entropy == self.by_entropy]
        return max(larger, key=lambda basis: len(basis.terms))

    def contains(self, basis: "Basis") -> bool:
        """True if this basis has all terms of another one."""
        return set(basis.terms) <= set(self.terms)

    def project_gradient(self, derivatives: np.ndarray, full: "Basis") -> np.ndarray:
        """Derivatives at 0 by this basis's numbers.

        Args:
          derivatives: (..., rows, columns) by the numbers of `full`.
        """
        return derivatives[..., [full.terms.index(term) for term in self.terms], :]

    def embed(self, basis: "Basis", numbers: np.ndarray) -> np.ndarray | None:
        """Converts numbers of another basis to this one; None if this one lacks some term."""
        if not self.contains(basis):
            return None
        embedded = np.zeros((len(self.terms), numbers.shape[1]))
        embedded[[self.terms.index(term) for term in basis.terms]] = numbers
        return embedded

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


def _order_terms(names: tuple[str, ...]) -> tuple[Term, ...]:
    """The powers in the terms of a kind: first 1 and powers of h alone, then as in a file."""
    terms = [exponents(name) for name in names]
    return (*sorted((i, j) for i, j in terms if not j), *((i, j) for i, j in terms if j))


def _expand_term(term: Term, center: float) -> list[tuple[Term, float]]:
    """Expands h^i l^j in powers of H and log n: their exponents, and the factor of each."""
    i, j = term
    entropy_factors = [math.comb(i, a) * (-1) ** (i - a) / (center / 2) ** a for a in range(i + 1)]
    size_factors = [math.comb(j, b) * (-center) ** (j - b) for b in range(j + 1)]
    return [
        ((a, b), x * y) for a, x in enumerate(entropy_factors) for b, y in enumerate(size_factors)
    ]


def typical_sizes(lengths: np.ndarray) -> tuple[float, float]:
    """`center` and `largest` of a basis for examples of these lengths in tokens."""
    return math.log(max(float(np.median(lengths)), 2.0)), math.log(float(lengths.max()))


@dataclass(frozen=True)
class RuleFamily:
    """All rules of a basis and a parameter sharing.

    The numbers of a rule are (rows, columns), with a row for each term of the basis, and a column
    for each layer or head, or one for all heads.
    """

    basis: Basis
    sharing: Sharing

    @property
    def kind(self) -> str:
        """The kind of rule."""
        return self.basis.kind

    @property
    def is_global(self) -> bool:
        """True if all heads share their numbers."""
        return self.sharing is Sharing.GLOBAL

    @property
    def starts_from_shared(self) -> bool:
        """True if a search is repeated from the rule of the kind that all heads share."""
        return self.kind in (CONSTANT, LOG_SIZE) and not self.is_global

    @property
    def label(self) -> str:
        """The kind of rule, and its parameter sharing."""
        return f"{self.kind}, {self.sharing}"

    @property
    def full(self) -> "RuleFamily":
        """The family with numbers for each head that contains this one."""
        return RuleFamily(self.basis.full, Sharing.PER_HEAD)

    def project_gradient(
        self, derivatives: np.ndarray, heads: Sequence[HeadId], full: "RuleFamily"
    ) -> np.ndarray:
        """Derivatives at 0 by this family's numbers.

        Args:
          derivatives: (..., rows, columns) by the numbers of `full`.
        """
        rows = self.basis.project_gradient(derivatives, full.basis)
        columns = np.array(self.sharing.columns(heads))
        projected = np.zeros((*rows.shape[:-1], columns.max() + 1))
        np.add.at(projected.T, columns, rows.T)
        return projected

    def zeros(self, heads: Sequence[HeadId]) -> np.ndarray:
        """The numbers of the baseline."""
        return np.zeros((len(self.basis.terms), max(self.sharing.columns(heads)) + 1))

    def baseline(self, heads: Sequence[HeadId]) -> "Parameters":
        """The baseline, where beta is 1."""
        return Parameters(self, self.zeros(heads))

    def embed(self, simpler: "Parameters") -> "Parameters | None":
        """Converts rules of a simpler family to this one; None if it does not contain them."""
        if simpler.family.sharing is not self.sharing:
            return None
        numbers = self.basis.embed(simpler.family.basis, simpler.numbers)
        return None if numbers is None else Parameters(self, numbers)


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
        family, basis, numbers = self.family, self.family.basis, self.numbers
        if not numbers.any():
            return None
        by_column = np.array(basis.coefficients(numbers), float).T
        if basis.kind == CONSTANT:
            by_column = np.clip(by_column, MIN_BETA, MAX_BETA)
        coefficients = [tuple(column) for column in by_column.tolist()]
        if family.is_global:
            return Fit(basis.rule, (Entry(coefficients[0], basis.domain),))
        named = set(self.heads_changed(heads))
        columns = family.sharing.columns(heads)
        entries = [
            Entry(coefficients[column], basis.domain, *head)
            for head, column in zip(heads, columns, strict=True)
            if head in named
        ]
        return Fit(basis.rule, tuple(entries))


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
