"""Polynomials in Bernstein form: well conditioned, and bounded by their coefficients."""

from math import comb

import numpy as np


def basis(t: np.ndarray, degree: int) -> np.ndarray:
    """(rows, degree + 1): C(d, k) t^k (1 - t)^(d - k) for t in [0, 1]; each row adds up to 1."""
    k = np.arange(degree + 1)
    factors = np.array([comb(degree, i) for i in k], float)
    return factors * t[:, None] ** k * (1 - t[:, None]) ** (degree - k)


def elevation(degree: int, to: int) -> np.ndarray:
    """(to + 1, degree + 1): coefficients of the same polynomial written with a higher degree.

    A polynomial lies between its least and its greatest coefficient, and rises if they do; the
    higher the degree that it is written with, the closer it comes to them.
    """
    matrix = np.zeros((to + 1, degree + 1))
    for i in range(to + 1):
        for j in range(max(0, i - to + degree), min(degree, i) + 1):
            matrix[i, j] = comb(degree, j) * comb(to - degree, i - j) / comb(to, i)
    return matrix


def plain_powers(coefficients: np.ndarray, domain: tuple[float, float]) -> tuple[float, ...]:
    """Bernstein coefficients over a domain -> coefficients of powers of H, highest power first."""
    lo, hi = domain
    degree = len(coefficients) - 1
    t = np.polynomial.Polynomial([-lo / (hi - lo), 1 / (hi - lo)])
    total = np.polynomial.Polynomial([0.0])
    for k, c in enumerate(coefficients):
        total = total + float(c) * comb(degree, k) * t**k * (1 - t) ** (degree - k)
    ascending = np.zeros(degree + 1)
    ascending[: len(total.coef)] = total.coef
    return tuple(float(c) for c in ascending[::-1])
