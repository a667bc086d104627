"""The numbers of a rule that are fitted through a model: few, and 0 where beta is 1.

With l = log n - c and h = H - c / 2, in nats, and c = log n of a typical query, beta is

    "constant"            1 + a
    "log-size"            1 + a + k l
    "commitment"          1 + a + k (l - h)
    "entropy-and-size"    1 + a + k l + s h + t h l + u l^2 + v h^2

with parameters that are global, per layer or per head; each contains those before it, but
commitment, log n - H, not log-size. And, as engines run it,

    "log-size-one-ratio"  (1 + m) (1 + a + k l)

where m is of each layer or head, and a and k are of all: m = 0 is what most of them have in common.

At interpolation weight s a rule has s times these numbers: where they are linear,
1 + s (beta - 1).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.core.rule import ENTROPY_AND_SIZE, LOG_SIZE, Rule
from calibrate.export.plan import GLOBAL, PER_HEAD, PER_LAYER
from calibrate.store.coefficients import Coefficients, Entry

Head = tuple[int, int]  # (layer, head)
CONSTANT = "constant"
COMMITMENT = "commitment"
SHARED_SLOPE = "log-size-one-ratio"
N_NUMBERS = {CONSTANT: 1, LOG_SIZE: 2, COMMITMENT: 2, ENTROPY_AND_SIZE: 6, SHARED_SLOPE: 1}  # rows
# Bounds of a fit through a model: some heads gain by a beta below 1.
MIN_BETA = 0.25
MAX_BETA = 16.0
MIN_FIRST_BETA = 0.05  # of 1 + a + k l at n = 1, where it is least, as k is not below 0
# Bounds that the numbers of ONE_RATIO never reach at any n: engines have none.
_NO_BOUNDS = (2.0**-10, 2.0**20)


@dataclass(frozen=True)
class Form:
    """The basis and parameter sharing of a rule, which give numbers their meaning.

    They are an array (rows, columns), with a column for each layer or head, or one if all are
    alike. The last two columns of ONE_RATIO are a and k instead.
    """

    kind: str  # a key of N_NUMBERS
    sharing: str  # GLOBAL, PER_LAYER or PER_HEAD
    center: float  # c, nats: log n of a typical query
    largest: float  # log n of the longest example

    @property
    def label(self) -> str:
        """The kind of rule, and its parameter sharing."""
        return f"{self.kind}, {self.sharing}"

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
    def full_basis(self) -> "Form":
        """The form of each head that contains this one: by entropy, which is dearer, or not."""
        kind = ENTROPY_AND_SIZE if self.rule.by_entropy else LOG_SIZE
        return Form(kind, PER_HEAD, self.center, self.largest)

    def project_gradient(self, derivatives: np.ndarray, heads: Sequence[Head]) -> np.ndarray:
        """Derivatives at 0 by the numbers of `full_basis`, (..., rows, columns), by this form's."""
        rows = derivatives[..., : N_NUMBERS[self.kind], :].copy()
        if self.kind == COMMITMENT:
            rows[..., 1, :] -= derivatives[..., 2, :]
        columns = np.array(self.columns(heads))
        projected = np.zeros((*rows.shape[:-1], columns.max() + 1))
        np.add.at(projected.T, columns, rows.T)
        return projected

    def columns(self, heads: Sequence[Head]) -> list[int]:
        """The column of each head's own numbers."""
        if self.sharing == PER_LAYER:
            layers = sorted({layer for layer, _ in heads})
            return [layers.index(layer) for layer, _ in heads]
        return [i * (self.sharing == PER_HEAD) for i in range(len(heads))]

    def zeros(self, heads: Sequence[Head]) -> np.ndarray:
        """The numbers of the baseline."""
        n_own = max(self.columns(heads)) + 1
        if self.kind == SHARED_SLOPE:
            n_own = 2 + (self.sharing != GLOBAL) * n_own
        return np.zeros((N_NUMBERS[self.kind], n_own))

    def is_common(self, numbers: np.ndarray) -> np.ndarray:
        """(columns,) bool: True at columns that all heads share."""
        n_common = 2 if self.kind == SHARED_SLOPE else int(self.sharing == GLOBAL)
        is_common: np.ndarray = np.arange(numbers.shape[1]) >= numbers.shape[1] - n_common
        return is_common

    def changed(self, numbers: np.ndarray) -> np.ndarray:
        """The columns of layers or heads that are not 0."""
        return np.flatnonzero(numbers.any(axis=0) & ~self.is_common(numbers))

    def heads_changed(self, numbers: np.ndarray, heads: Sequence[Head]) -> list[Head]:
        """The heads that have numbers of their own, or of their layer or all, which are not 0."""
        if self.sharing == GLOBAL:
            return list(heads) if numbers.any() else []
        changed = set(self.changed(numbers).tolist())
        pairs = zip(heads, self.columns(heads), strict=True)
        return [head for head, column in pairs if column in changed]

    def clip_to_feasible(self, numbers: np.ndarray) -> np.ndarray:
        """The numbers, or near ones for which ONE_RATIO is positive and rises with n."""
        if self.kind != SHARED_SLOPE:
            return numbers
        near: np.ndarray = np.clip(numbers, MIN_BETA - 1, MAX_BETA - 1)
        near[0, -1] = np.clip(numbers[0, -1], 0, (1 + near[0, -2] - MIN_FIRST_BETA) / self.center)
        return near

    def embed(self, form: "Form", numbers: np.ndarray, heads: Sequence[Head]) -> np.ndarray | None:
        """The numbers that give every head the rule of a simpler form's; None if none do."""
        embedded = self.zeros(heads)
        if self.kind != SHARED_SLOPE:
            if form.sharing != self.sharing or form.kind == SHARED_SLOPE:
                return None
            if COMMITMENT in (form.kind, self.kind) and LOG_SIZE in (form.kind, self.kind):
                return None
            embedded[: len(numbers)] = numbers
            if form.kind == COMMITMENT and self.kind == ENTROPY_AND_SIZE:
                embedded[2] = -numbers[1]
            return embedded
        if form.sharing == GLOBAL and form._meets_no_bound(numbers):
            embedded[0, -2:][: numbers.size] = numbers.ravel()
        elif form.kind == CONSTANT and form.sharing == self.sharing:
            embedded[0, :-2] = numbers[0]
        else:
            return None
        return embedded if np.array_equal(embedded, self.clip_to_feasible(embedded)) else None

    def _meets_no_bound(self, numbers: np.ndarray) -> bool:
        """True if a rule that all heads share, not of entropy, has no bound up to `largest`."""
        kappa, b = self.coefficients(numbers)
        ends = np.array([b, b + kappa * self.largest])
        return bool(((self.rule.min_beta <= ends) & (ends <= self.rule.max_beta)).all())

    def coefficients(self, numbers: Any) -> Any:
        """The file's coefficients: rows, arrays or tensors, give (coefficients, columns)."""
        c, zero = self.center, numbers[0][:1] * 0
        a, *others = numbers
        if self.kind == CONSTANT:
            return [a * 0, 1 + a]
        if self.kind == SHARED_SLOPE:
            own, a, k = 1 + (zero if self.sharing == GLOBAL else a[:-2]), a[-2:-1], a[-1:]
            return [own * k, own * (1 + a - k * c)]
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

    def fit(self, numbers: np.ndarray, heads: Sequence[Head]) -> Coefficients | None:
        """The rules of the heads whose beta is not 1; None where there are none."""
        if not numbers.any():
            return None
        of_columns = np.array(self.coefficients(numbers), float).T
        if self.kind == CONSTANT:
            of_columns = np.clip(of_columns, [0, MIN_BETA], [0, MAX_BETA])
        rules = [tuple(rule) for rule in of_columns.tolist()]
        if self.sharing == GLOBAL:
            return Coefficients(self.rule, (Entry(rules[0], self.domain),))
        all_changed = numbers[:, self.is_common(numbers)].any()
        named = set(heads if all_changed else self.heads_changed(numbers, heads))
        of_heads = zip(heads, self.columns(heads), strict=True)
        entries = [Entry(rules[i], self.domain, *head) for head, i in of_heads if head in named]
        return Coefficients(self.rule, tuple(entries))


def typical(lengths: np.ndarray) -> tuple[float, float]:
    """`center` and `largest` for examples of these lengths, in tokens."""
    return math.log(float(np.median(lengths))), math.log(float(lengths.max()))
