"""The rules that are fitted through a model: few numbers a head, which are 0 where beta is 1.

The numbers are an array of a basis and a parameter sharing. At interpolation weight s a rule has s
times its numbers: where they are linear, beta is 1 + s (beta - 1).

With l = log n - c and h = 2 H / c - 1, in nats, and c = log n of a typical query, beta is 1 plus a
sum of numbers times the terms of the kind of rule (TERMS of `core/rule.py`), in h and l in place of
H and log n:

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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from calibrate.core.parameter_sharing import Sharing
from calibrate.core.rule import (
    CONSTANT,
    KINDS,
    LOG_SIZE,
    TERMS,
    VARIABLES,
    Rule,
    exponents,
)
from calibrate.store.entry import Entry
from calibrate.store.fit import Fit

SHARED_SLOPE = "log-size-one-ratio"
Term = tuple[int, int]  # powers of h and of l
HeadId = tuple[int, int]  # (layer, head)
# Bounds of a fit through a model: some heads gain by a beta below 1.
MIN_BETA = 0.25
MAX_BETA = 16.0
# Of a step from the baseline, whose rules by entropy are least known where entropies are rare.
TRUST_REGION = (0.5, 2.0)
# Bounds that a shared slope never reaches at any n: engines have none.
_NO_BOUNDS = (2.0**-10, 2.0**20)
MIN_FIRST_BETA = 0.05  # of 1 + a + k l at n = 1, where it is least, as k is not below 0
_N_COMMON = 2  # columns of a and k, which all heads have in common under a shared slope


@dataclass(frozen=True)
class Basis:
    """A kind of rule, and the sizes at which its numbers count."""

    kind: str  # one of KINDS, or SHARED_SLOPE
    center: float  # c, nats: log n of a typical query
    largest: float  # log n of the longest example
    bounds: tuple[float, float] = (MIN_BETA, MAX_BETA)  # of beta

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of the kind, each with a row of numbers; that of a shared slope is not linear.

        1 is the first, and then come powers of h alone.
        """
        return _terms_of(TERMS[self.kind]) if self.kind in TERMS else ((0, 0),)

    @property
    def by_entropy(self) -> bool:
        """True if beta is a function of entropy, among others."""
        return "H" in VARIABLES.get(self.kind, ())

    @property
    def rule(self) -> Rule:
        """The kind of rule in a file, with its bounds."""
        if self.kind == SHARED_SLOPE:
            return Rule.log_size(*_NO_BOUNDS)
        return Rule(0.0, *self.bounds, kind=self.kind)

    @property
    def domain(self) -> tuple[float, ...]:
        """Bounds of the entropies and log n of queries; the first query sees one token."""
        return (0.0, self.largest) * len(VARIABLES[self.rule.kind])

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
        *slopes, b = self.coefficients(numbers)
        ends = np.array([b, b + sum(slopes) * self.largest])
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


@dataclass(frozen=True)
class RuleFamily:
    """All rules of a basis and a parameter sharing; an array of numbers names one.

    Numbers are (rows, columns): a row for each term of the basis, and a column for each layer or
    head, or one that all heads share. The last two columns of a shared slope are a and k instead.
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
    def may_begin_again(self) -> bool:
        """True if a search may begin a second time, at rules of the kind that all heads share."""
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
        """Derivatives at 0 by the numbers of `full`, (..., rows, columns), by this family's."""
        rows = self.basis.project_gradient(derivatives, full.basis)
        columns = np.array(self.sharing.columns(heads))
        projected = np.zeros((*rows.shape[:-1], columns.max() + 1))
        np.add.at(projected.T, columns, rows.T)
        return projected

    def zeros(self, heads: Sequence[HeadId]) -> np.ndarray:
        """The numbers of the baseline."""
        n_columns = max(self.sharing.columns(heads)) + 1
        if self.kind == SHARED_SLOPE:
            n_columns = _N_COMMON + (0 if self.is_global else n_columns)
        return np.zeros((len(self.basis.terms), n_columns))

    def baseline(self, heads: Sequence[HeadId]) -> "Parameters":
        """The baseline, where beta is 1."""
        return Parameters(self, self.zeros(heads))

    def is_common(self, numbers: np.ndarray) -> np.ndarray:
        """(columns,) bool: True at columns that all heads share."""
        n_common = _N_COMMON if self.kind == SHARED_SLOPE else int(self.is_global)
        is_common: np.ndarray = np.arange(numbers.shape[1]) >= numbers.shape[1] - n_common
        return is_common

    def best_of_layers(
        self, gained: np.ndarray, heads: Sequence[HeadId], n_per_layer: int
    ) -> np.ndarray:
        """(columns,) bool: True at the heads that gained most in their layers, n of each.

        Args:
          gained: (columns,) by each head; of a family with numbers for each head.
        """
        layers, best = np.array([layer for layer, _ in heads]), np.zeros(len(heads), bool)
        for layer in np.unique(layers):
            of_layer = np.flatnonzero(layers == layer)
            best[of_layer[np.argsort(-gained[of_layer], kind="stable")[:n_per_layer]]] = True
        return best

    def clip_to_feasible(self, numbers: np.ndarray) -> np.ndarray:
        """The numbers, or near ones for which a shared slope is positive and beta rises with n."""
        if self.kind != SHARED_SLOPE:
            return numbers
        near: np.ndarray = np.clip(numbers, MIN_BETA - 1, MAX_BETA - 1)
        largest_slope = (1 + near[0, -2] - MIN_FIRST_BETA) / self.basis.center
        near[0, -1] = np.clip(numbers[0, -1], 0, largest_slope)
        return near

    def embed(self, simpler: "Parameters", heads: Sequence[HeadId]) -> "Parameters | None":
        """The same rules of all heads as those of a simpler family; None if there are none."""
        family, numbers = simpler
        if self.kind != SHARED_SLOPE:
            same = None
            if family.sharing is self.sharing:
                same = self.basis.embed(family.basis, numbers)
            return None if same is None else Parameters(self, same)
        embedded = self.zeros(heads)
        if family.is_global and family.basis.meets_no_bound(numbers):
            embedded[0, -_N_COMMON:][: numbers.size] = numbers.ravel()
        elif family.kind == CONSTANT and family.sharing == self.sharing:
            embedded[0, :-_N_COMMON] = numbers[0]
        else:
            return None
        is_feasible = np.array_equal(embedded, self.clip_to_feasible(embedded))
        return Parameters(self, embedded) if is_feasible else None


class Parameters(NamedTuple):
    """Rules of the heads of a model, by their numbers."""

    family: RuleFamily
    numbers: np.ndarray  # (rows, columns)

    def interpolated(self, weight: float) -> "Parameters":
        """The rules at an interpolation weight."""
        return self._replace(numbers=self.family.clip_to_feasible(weight * self.numbers))

    def changed_columns(self) -> np.ndarray:
        """The columns of layers or heads that are not 0."""
        return np.flatnonzero(self.numbers.any(axis=0) & ~self.family.is_common(self.numbers))

    def heads_changed(self, heads: Sequence[HeadId]) -> list[HeadId]:
        """The heads that have numbers of their own, or of their layer or all, which are not 0."""
        if self.family.is_global:
            return list(heads) if self.numbers.any() else []
        changed = set(self.changed_columns().tolist())
        columns = self.family.sharing.columns(heads)
        return [head for head, column in zip(heads, columns, strict=True) if column in changed]

    def rules(self, heads: Sequence[HeadId]) -> Fit | None:
        """The rules of the heads whose beta is not 1; None where there are none."""
        family, basis, numbers = self.family, self.family.basis, self.numbers
        if not numbers.any():
            return None
        of_columns = np.array(basis.coefficients(numbers), float).T
        if basis.kind == CONSTANT:
            of_columns = np.clip(of_columns, MIN_BETA, MAX_BETA)
        coefficients = [tuple(column) for column in of_columns.tolist()]
        if family.is_global:
            return Fit(basis.rule, (Entry(coefficients[0], basis.domain),))
        all_changed = numbers[:, family.is_common(numbers)].any()
        named = set(heads if all_changed else self.heads_changed(heads))
        columns = family.sharing.columns(heads)
        entries = [
            Entry(coefficients[column], basis.domain, *head)
            for head, column in zip(heads, columns, strict=True)
            if head in named
        ]
        return Fit(basis.rule, tuple(entries))
