"""Designs: the columns of a rule's regression, and its coefficients in plain powers.

    beta = clip(b0 (c_0 + sum over k >= 1 of c_k (x_k - mean of x_k)), min, max)

x_k are Legendre polynomials of H, of log n, or of both, each scaled to [-1, 1].
"""

from dataclasses import dataclass

import numpy as np
from numpy.polynomial import Polynomial
from numpy.polynomial.legendre import leg2poly, legvander

from calibrate.core.rule import CONSTANT, DEGREE, ENTROPY_AND_SIZE, LOG_SIZE, POLYNOMIAL, Rule
from calibrate.store.entry import MAX_ENTROPY

QUANTILES = 0.005, 0.995  # of the inputs' entropies and log n: the domain of a rule
MIN_RANGE = 1e-3  # nats: of a smaller range no slope is fitted


@dataclass(frozen=True)
class Scale:
    """A variable, clipped to [low, high] and scaled to [-1, 1]: x = slope v + shift."""

    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray, weight: np.ndarray) -> "Scale":
        """The range between two weighted quantiles; at least MIN_RANGE wide."""
        low, high = np.quantile(values, QUANTILES, method="inverted_cdf", weights=weight)
        if high - low < MIN_RANGE:
            middle = min(max((low + high) / 2, MIN_RANGE), MAX_ENTROPY - MIN_RANGE)
            low, high = middle - MIN_RANGE / 2, middle + MIN_RANGE / 2
        return cls(float(low), float(high))

    @property
    def slope(self) -> float:
        """d x / d v."""
        return 2 / (self.high - self.low)

    @property
    def shift(self) -> float:
        """x at v = 0."""
        return -1 - self.slope * self.low

    def scaled(self, values: np.ndarray) -> np.ndarray:
        """(rows,) values clipped to the range and scaled to [-1, 1]."""
        return np.asarray(np.clip(values, self.low, self.high) * self.slope + self.shift)


@dataclass(frozen=True)
class Design:
    """The columns of a kind of rule, with ranges and means of some inputs.

    Attributes:
      kind: of rule.
      entropy, log_n: the ranges of H and of log n.
      means: (columns,) weighted means of the columns.
    """

    kind: str
    entropy: Scale
    log_n: Scale
    means: np.ndarray

    @classmethod
    def of(cls, kind: str, entropy: np.ndarray, log_n: np.ndarray, weight: np.ndarray) -> "Design":
        """The design of a kind for inputs with these entropies and log n, (rows,)."""
        scales = Scale.of(entropy, weight), Scale.of(log_n, weight)
        columns = _columns(kind, *scales, entropy, log_n)
        return cls(kind, *scales, weight @ columns / weight.sum())

    def columns(self, entropy: np.ndarray, log_n: np.ndarray) -> np.ndarray:
        """(rows, 1 + columns): a column of ones, and the centred columns of the kind."""
        columns = _columns(self.kind, self.entropy, self.log_n, entropy, log_n) - self.means
        return np.column_stack([np.ones(len(columns)), columns])

    @property
    def domain(self) -> tuple[float, ...]:
        """[lo, hi] of entropy, of log n, or of both, as the kind has it in a file."""
        rule = Rule(kind=self.kind)
        entropies = (self.entropy.low, self.entropy.high) if rule.by_entropy else ()
        sizes = (self.log_n.low, self.log_n.high) if rule.by_size else ()
        return (*entropies, *sizes)

    def plain_coefficients(self, c: np.ndarray) -> tuple[float, ...]:
        """The coefficients of a file, in the order of TERMS, of (1 + columns,) coefficients."""
        level = c[0] - self.means @ c[1:]
        if self.kind == CONSTANT:
            terms = [level]
        elif self.kind == LOG_SIZE:
            slope, shift = self.log_n.slope, self.log_n.shift
            terms = [c[1] * slope, level + c[1] * shift]
        else:
            terms = self._powers_of_entropy(np.array([level, *c[1 : 1 + DEGREE]]))
            if self.kind == ENTROPY_AND_SIZE:
                terms = self._with_size(terms, *c[1 + DEGREE :])
        return tuple(map(float, terms))

    def _powers_of_entropy(self, legendre: np.ndarray) -> list[float]:
        """Coefficients of H^4 to 1 of a Legendre series in the scaled entropy."""
        inner = Polynomial([self.entropy.shift, self.entropy.slope])
        powers = Polynomial(leg2poly(legendre))(inner).coef
        return [*np.pad(powers, (0, DEGREE + 1 - len(powers)))[::-1]]

    def _with_size(
        self, powers: list[float], line: float, square: float, both: float
    ) -> list[float]:
        """Terms of entropy and size: H^4 to 1, H L, L^2, L; with x = aH + d and y = eL + f.

        The three added columns are P_1(y) = y, P_2(y) = (3 y^2 - 1) / 2 and x y.
        """
        a, d = self.entropy.slope, self.entropy.shift
        e, f = self.log_n.slope, self.log_n.shift
        *higher, first, level = powers
        first += both * a * f
        level += line * f + square * (1.5 * f**2 - 0.5) + both * d * f
        of_size = line * e + 3 * square * e * f + both * d * e
        return [*higher, first, level, both * a * e, 1.5 * square * e**2, of_size]


def _columns(
    kind: str, entropy_scale: Scale, size_scale: Scale, entropy: np.ndarray, log_n: np.ndarray
) -> np.ndarray:
    """(rows, columns) of a kind, not centred."""
    x, y = entropy_scale.scaled(entropy), size_scale.scaled(log_n)
    legendre = legvander(x, DEGREE)[:, 1:]
    sizes = legvander(y, 2)[:, 1:]
    return {
        CONSTANT: np.empty((len(x), 0)),
        LOG_SIZE: sizes[:, :1],
        POLYNOMIAL: legendre,
        ENTROPY_AND_SIZE: np.column_stack([legendre, sizes, x * y]),
    }[kind]
