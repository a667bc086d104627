"""Forms of rules: beta as a linear function of coefficients, within linear constraints.

A form is a design: beta = design @ coefficients, row by row. Bounds of beta, and whatever else a
form asks for, are linear constraints on the coefficients. Polynomials are in Bernstein form: well
conditioned, and bounded by their coefficients.
"""

from functools import lru_cache
from math import comb
from typing import NamedTuple

import numpy as np

DEGREE = 4
ELEVATED_TO = 24
Domain = tuple[float, ...]  # [lo, hi] of entropy, of log n, or of both


class Form(NamedTuple):
    """beta = design @ coefficients, where low <= matrix @ coefficients <= high.

    Arrays: design (rows, k); matrix (constraints, k); low, high (constraints,). The coefficients of
    a constant beta are that beta times `ones`.
    """

    design: np.ndarray
    matrix: np.ndarray
    low: np.ndarray
    high: np.ndarray
    ones: np.ndarray  # (k,)

    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        """The constraints as sides @ coefficients >= bounds."""
        sides = np.concatenate([self.matrix, -self.matrix])
        return sides, np.concatenate([self.low, -self.high])


def constant_form(rows: int, low: float, high: float) -> Form:
    """beta = c."""
    one = np.ones((1, 1))
    return Form(np.ones((rows, 1)), one, np.array([low]), np.array([high]), one[0])


def log_size_form(log_n: np.ndarray, low: float, high: float) -> Form:
    """beta = kappa log n + b, within the bounds at every size of the rows."""
    design = np.column_stack([log_n, np.ones(len(log_n))])
    matrix = np.array([[log_n.min(), 1.0], [log_n.max(), 1.0]])
    return Form(design, matrix, np.full(2, low), np.full(2, high), np.array([0.0, 1.0]))


def polynomial_form(entropy: np.ndarray, domain: Domain, low: float, high: float) -> Form:
    """beta = a polynomial of entropy in Bernstein form, within the bounds on all of its domain.

    The bounds hold for its coefficients of degree 24: enough, and nearly necessary.
    """
    matrix = elevation(DEGREE, ELEVATED_TO)
    bounds = np.full(len(matrix), low), np.full(len(matrix), high)
    return Form(basis(_unit(entropy, domain), DEGREE), matrix, *bounds, np.ones(DEGREE + 1))


def entropy_and_size_form(
    entropy: np.ndarray, log_n: np.ndarray, domain: Domain, low: float, high: float
) -> Form:
    """beta = a polynomial of entropy + terms of H log n, (log n)^2 and log n.

    Entropy and log n are scaled to [0, 1] on the domain, and the polynomial is in Bernstein form.
    The bounds hold at every row.
    """
    h, size = _unit(entropy, domain[:2]), _unit(log_n, domain[2:])
    design = np.column_stack([basis(h, DEGREE), h * size, size**2, size])
    ones = np.concatenate([np.ones(DEGREE + 1), np.zeros(3)])
    return Form(design, design, np.full(len(design), low), np.full(len(design), high), ones)


def _unit(x: np.ndarray, domain: Domain) -> np.ndarray:
    lo, hi = domain
    return np.asarray((np.clip(x, lo, hi) - lo) / (hi - lo))


def plain_terms(c: np.ndarray, domain: Domain) -> tuple[float, ...]:
    """Coefficients of `entropy_and_size_form` -> those of the terms of H and log n themselves."""
    (lo, hi), (small, large) = domain[:2], domain[2:]
    width, height = hi - lo, large - small
    both, square, line = c[DEGREE + 1 :] / (width * height, height**2, height)
    *powers, linear, constant = plain_powers(c[: DEGREE + 1], (lo, hi))
    linear -= small * both
    constant += lo * small * both + small**2 * square - small * line
    return *powers, linear, constant, both, square, line - lo * both - 2 * small * square


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
    shares = [
        [comb(degree, j) * comb(to - degree, i - j) / comb(to, i) if j <= i else 0.0
         for j in range(degree + 1)] for i in range(to + 1)
    ]  # fmt: skip
    return np.array(shares)


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
