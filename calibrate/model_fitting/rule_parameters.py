"""The numbers of a rule that are fitted through a model: few, and 0 where beta is 1.

With l = log n - c and h = H - c / 2, in nats, and c = log n of a typical query, beta is

    "constant"            1 + a
    "log-size"            1 + a + k l
    "entropy-and-size"    1 + a + k l + s h + t h l + u l^2 + v h^2

in each head, or in all heads alike; each contains the one before it. And, as engines run it,

    "log-size-one-ratio"  (1 + m) (1 + a + k l)

where m is of each head, and a and k are of all: m = 0 is what most heads have in common.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths.rule import ENTROPY_AND_SIZE, LOG_SIZE, Rule

CONSTANT = "constant"
ONE_RATIO = "log-size-one-ratio"
N_NUMBERS = {CONSTANT: 1, LOG_SIZE: 2, ENTROPY_AND_SIZE: 6, ONE_RATIO: 1}  # rows
MIN_BETA, MAX_BETA = 0.25, 16.0  # of a fit through a model: some heads want to be more diffuse
LEAST_FIRST = 0.05  # of 1 + a + k l at n = 1, where it is least, as k is not below 0
# Bounds that the numbers of ONE_RATIO never reach at any n: engines have none.
_NO_BOUNDS = (2.0**-10, 2.0**20)


@dataclass(frozen=True)
class Form:
    """What numbers stand for.

    They are an array (rows, heads), or (rows, 1) if shared; of ONE_RATIO (1, heads + 2), or (1, 2)
    if shared, whose last columns are a and k.

    Attributes:
      kind: CONSTANT, LOG_SIZE, ENTROPY_AND_SIZE or ONE_RATIO.
      shared: whether all heads have the same numbers.
      center: c, nats: log n of a typical query.
      largest: log n of the longest example.
    """

    kind: str
    shared: bool
    center: float
    largest: float

    @property
    def exports(self) -> bool:
        """Whether engines run the rule as it is: one kappa / b for all heads, and no bounds."""
        return self.kind in (CONSTANT, ONE_RATIO)

    @property
    def rule(self) -> Rule:
        """The kind of rule in a file, with its bounds."""
        if self.kind == ENTROPY_AND_SIZE:
            return Rule(0.0, MIN_BETA, MAX_BETA, kind=ENTROPY_AND_SIZE)
        return Rule.log_size(*(_NO_BOUNDS if self.kind == ONE_RATIO else (MIN_BETA, MAX_BETA)))

    @property
    def domain(self) -> tuple[float, ...]:
        """Of the entropies and log n of queries, of which the first sees one token."""
        sizes = (0.0, self.largest)
        return sizes + sizes if self.kind == ENTROPY_AND_SIZE else sizes

    def zeros(self, n_heads: int) -> np.ndarray:
        """The numbers of plain softmax."""
        columns = 2 * (self.kind == ONE_RATIO) + (not self.shared) * n_heads
        return np.zeros((N_NUMBERS[self.kind], max(1, columns)))

    def is_common(self, numbers: np.ndarray) -> np.ndarray:
        """Which columns are of all heads, (columns,) bool."""
        n_common = 2 if self.kind == ONE_RATIO else int(self.shared)
        is_common: np.ndarray = np.arange(numbers.shape[1]) >= numbers.shape[1] - n_common
        return is_common

    def changed(self, numbers: np.ndarray) -> np.ndarray:
        """The heads that have numbers of their own which are not 0."""
        return np.flatnonzero(numbers.any(axis=0) & ~self.is_common(numbers))

    def within(self, numbers: np.ndarray) -> np.ndarray:
        """The numbers, or near ones for which ONE_RATIO is positive and rises with n."""
        if self.kind != ONE_RATIO:
            return numbers
        near: np.ndarray = np.clip(numbers, MIN_BETA - 1, MAX_BETA - 1)
        near[0, -1] = np.clip(numbers[0, -1], 0, (1 + near[0, -2] - LEAST_FIRST) / self.center)
        return near

    def holding(self, form: "Form", numbers: np.ndarray, n_heads: int) -> np.ndarray | None:
        """The numbers that give every head the same rule as those of a simpler form; None if none.

        Of another kind than ONE_RATIO, a simpler form is of as many heads.
        """
        found = self.zeros(n_heads)
        if self.kind != ONE_RATIO:
            if form.shared != self.shared or form.kind == ONE_RATIO:
                return None
            found[: len(numbers)] = numbers
            return found
        if form.shared and form._meets_no_bound(numbers):
            found[0, -2:][: numbers.size] = numbers.ravel()
        elif form.kind == CONSTANT and not self.shared:
            found[0, :n_heads] = numbers[0]
        else:
            return None
        return found if np.array_equal(found, self.within(found)) else None

    def _meets_no_bound(self, numbers: np.ndarray) -> bool:
        """Whether a shared rule that is not of entropy is within its bounds up to `largest`."""
        kappa, b = self.coefficients(numbers)
        ends = np.array([b, b + kappa * self.largest])
        return bool(((self.rule.min_beta <= ends) & (ends <= self.rule.max_beta)).all())

    def coefficients(self, numbers: Any) -> Any:
        """Those of the file: rows, arrays or tensors, give (coefficients, heads or 1)."""
        c, zero = self.center, numbers[0][:1] * 0
        a, *others = numbers
        if self.kind == CONSTANT:
            return [a * 0, 1 + a]
        if self.kind == ONE_RATIO:
            own, a, k = 1 + (zero if self.shared else a[:-2]), a[-2:-1], a[-1:]
            return [own * k, own * (1 + a - k * c)]
        if self.kind == LOG_SIZE:
            (k,) = others
            return [k, 1 + a - k * c]
        k, s, t, u, v = others
        h = c / 2
        level = 1 + a - k * c - s * h + t * h * c + u * c * c + v * h * h
        return [a * 0, a * 0, v, s - t * c - 2 * v * h, level, t, u, k - t * h - 2 * u * c]

    def fit(self, numbers: np.ndarray, heads: list[tuple[int, int]]) -> Coefficients | None:
        """The rules of the heads whose beta is not 1; None where there are none."""
        if not numbers.any():
            return None
        columns = np.array(self.coefficients(numbers), float).T
        if self.kind == CONSTANT:
            columns = np.clip(columns, [0, MIN_BETA], [0, MAX_BETA])
        if self.shared:
            entries = [Entry(tuple(columns[0].tolist()), self.domain)]
        else:
            in_common = self.is_common(numbers)
            named = range(len(heads)) if numbers[:, in_common].any() else self.changed(numbers)
            entries = [Entry(tuple(columns[i].tolist()), self.domain, *heads[i]) for i in named]
        return Coefficients(self.rule, tuple(entries))


def typical(lengths: np.ndarray) -> tuple[float, float]:
    """`center` and `largest` for examples of these lengths, in tokens."""
    return math.log(float(np.median(lengths))), math.log(float(lengths.max()))
