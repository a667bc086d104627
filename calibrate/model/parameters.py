"""The numbers of the rules of a model's heads: an array of a basis and a parameter sharing.

At interpolation weight s a rule has s times its numbers: where they are linear, 1 + s (beta - 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from calibrate.core.parameter_sharing import Sharing
from calibrate.core.rule import LOG_SIZE
from calibrate.core.rule_kinds import CONSTANT
from calibrate.model.basis import MAX_BETA, MIN_BETA, SHARED_SLOPE, Basis
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry

HeadId = tuple[int, int]  # (layer, head)
MIN_FIRST_BETA = 0.05  # of 1 + a + k l at n = 1, where it is least, as k is not below 0
_N_COMMON = 2  # columns of a and k, which all heads have in common under a shared slope


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

    def rules(self, heads: Sequence[HeadId]) -> Coefficients | None:
        """The rules of the heads whose beta is not 1; None where there are none."""
        family, basis, numbers = self.family, self.family.basis, self.numbers
        if not numbers.any():
            return None
        of_columns = np.array(basis.coefficients(numbers), float).T
        if basis.kind == CONSTANT:
            of_columns = np.clip(of_columns, [0, MIN_BETA], [0, MAX_BETA])
        coefficients = [tuple(column) for column in of_columns.tolist()]
        if family.is_global:
            return Coefficients(basis.rule, (Entry(coefficients[0], basis.domain),))
        all_changed = numbers[:, family.is_common(numbers)].any()
        named = set(heads if all_changed else self.heads_changed(heads))
        columns = family.sharing.columns(heads)
        entries = [
            Entry(coefficients[column], basis.domain, *head)
            for head, column in zip(heads, columns, strict=True)
            if head in named
        ]
        return Coefficients(basis.rule, tuple(entries))
