"""Bernstein polynomials: well conditioned on their domain, and bounded by their coefficients."""

from functools import lru_cache
from math import comb

import numpy as np


def unit(x: np.ndarray, domain: tuple[float, float]) -> np.ndarray:
    """(rows,) x clipped to the domain, which is scaled to [0, 1]."""
    lo, hi = domain
    return np.asarray((np.clip(x, lo, hi) - lo) / (hi - lo))


def basis(t: np.ndarray, degree: int) -> np.ndarray:
    """(rows, degree + 1): C(d, k) t^k (1 - t)^(d - k) for t in [0, 1]; each row adds up to 1."""
    k = np.arange(degree + 1)
    factors = np.array([comb(degree, i) for i in k], float)
    return factors * t[:, None] ** k * (1 - t[:, None]) ** (degree - k)


def elevation(degree: int, to: int) -> np.ndarray:
    """(to + 1, degree + 1): coefficients of the same polynomial written with a higher degree.

    A polynomial lies between its least and its greatest coefficient, which come closer to it the
    higher the degree that it is written with.
    """
    shares = np.zeros((to + 1, degree + 1))
    for i in range(to + 1):
        for j in range(min(i, degree) + 1):
            shares[i, j] = comb(degree, j) * comb(to - degree, i - j) / comb(to, i)
    return shares


def plain_powers(coefficients: np.ndarray, domain: tuple[float, float]) -> tuple[float, ...]:
    """Bernstein coefficients over a domain -> coefficients of powers of H, highest power first."""
    return tuple((coefficients @ _basis_powers(domain, len(coefficients) - 1)).tolist())


@lru_cache(maxsize=8)
def _basis_powers(domain: tuple[float, float], degree: int) -> np.ndarray:
    """(degree + 1, degree + 1): each polynomial of `basis` in powers of H, highest first."""
    lo, hi = domain
    t = np.polynomial.Polynomial([-lo / (hi - lo), 1 / (hi - lo)])
    terms = [comb(degree, k) * t**k * (1 - t) ** (degree - k) for k in range(degree + 1)]
    return np.array([term.coef[::-1] for term in terms])
