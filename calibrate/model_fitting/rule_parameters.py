"""The numbers of a rule that are fitted through a model: few, and 0 where beta is 1.

With l = log n - c and h = H - c / 2, in nats, and c = log n of a typical query, beta is 1 plus

    "constant"          a
    "log-size"          a + k l
    "entropy-and-size"  a + k l + s h + t h l + u l^2 + v h^2

in each head, or in all heads alike. Each kind contains the one before it.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths.rule import ENTROPY_AND_SIZE, LOG_SIZE, Rule

CONSTANT = "constant"
N_NUMBERS = {CONSTANT: 1, LOG_SIZE: 2, ENTROPY_AND_SIZE: 6}
MIN_BETA, MAX_BETA = 0.25, 16.0  # of a fit through a model: some heads want to be more diffuse


@dataclass(frozen=True)
class Form:
    """What numbers stand for.

    Attributes:
      kind: CONSTANT, LOG_SIZE or ENTROPY_AND_SIZE.
      shared: whether all heads have the same numbers.
      center: c, nats: log n of a typical query.
      largest: log n of the longest example.
    """

    kind: str
    shared: bool
    center: float
    largest: float

    @property
    def n_numbers(self) -> int:
        """Of a head."""
        return N_NUMBERS[self.kind]

    @property
    def rule(self) -> Rule:
        """The kind of rule in a file, with its bounds."""
        if self.kind == ENTROPY_AND_SIZE:
            return Rule(0.0, MIN_BETA, MAX_BETA, kind=ENTROPY_AND_SIZE)
        return Rule.log_size(MIN_BETA, MAX_BETA)

    @property
    def domain(self) -> tuple[float, ...]:
        """Of the entropies and log n of queries, of which the first sees one token."""
        sizes = (0.0, self.largest)
        return sizes + sizes if self.kind == ENTROPY_AND_SIZE else sizes

    def coefficients(self, numbers: Any) -> Any:
        """Those of the file: arrays or tensors (n, heads) give (coefficients, heads)."""
        c, zero = self.center, numbers[0] * 0
        a, *others = numbers
        if self.kind == CONSTANT:
            return [zero, 1 + a]
        if self.kind == LOG_SIZE:
            (k,) = others
            return [k + zero, 1 + a - k * c]
        k, s, t, u, v = others
        h = c / 2
        level = 1 + a - k * c - s * h + t * h * c + u * c * c + v * h * h
        return [zero, zero, v + zero, s - t * c - 2 * v * h, level, t, u, k - t * h - 2 * u * c]

    def fit(self, numbers: np.ndarray, heads: list[tuple[int, int]]) -> Coefficients | None:
        """The rules of the heads whose beta is not 1; None where there are none."""
        columns = np.array(self.coefficients(numbers), float).T.tolist()
        if self.shared:
            entries = [Entry(tuple(columns[0]), self.domain)]
        else:
            entries = [
                Entry(tuple(of_head), self.domain, *name)
                for name, of_head, moved in zip(
                    heads, columns, np.any(numbers, axis=0), strict=True
                )
                if moved
            ]
        if not entries or not numbers.any():
            return None
        return Coefficients(self.rule, tuple(entries))


def typical(lengths: np.ndarray) -> tuple[float, float]:
    """`center` and `largest` for examples of these lengths, in tokens."""
    return math.log(float(np.median(lengths))), math.log(float(lengths.max()))
