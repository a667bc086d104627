"""The paper's procedure: a polynomial p of degree 4 with p(H) close to the optimal beta of rows.

Optimal betas have outliers: a row whose target is nearly tied with the highest logit has one of
10^5, and a single such row of 4,626 turned least squares into a polynomial that fell to -339. So
betas are bounded by those that a rule may have before anything is fitted, and by default the sum of
squares is that of log p(H) - log beta, which is that of log theta too. That loss is the safe one,
not the best on each head: of 22 heads and arrays (scripts/studies/paper_procedure.py), squares of
p(H) - beta have the better held-out log-likelihood on 12, by 0.03 nats at most, and the worse on 8,
one of them, with near ties in a tenth of its rows, by 2.7 nats. On the other 21 they are 0.006 nats
worse in the mean.

Entropies cluster near log n, and between clusters a polynomial that is positive on every row may
still fall below 0: a grid of points over the domain has 1 % of the weight of the rows, at their
mean log beta.

Before the fit, entropies are limited to the domain, the 0.5 % to 99.5 % quantiles of the rows, as
the rule limits them: with bounded betas the loss "least-squares" is that of
`numpy.polyfit(numpy.clip(H, *domain), numpy.clip(beta, *bounds), 4)`.

A value of p below 1 is no error: the rule is max(p, 1).

Reference: Velickovic et al. 2024, section 3 and appendix A.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.polynomial import Legendre, Polynomial
from threadpoolctl import threadpool_limits

from calibrate.core.rule import N_POWERS, horner

DEGREE = N_POWERS - 1
DOMAIN_PERCENTILES = (0.5, 99.5)
MIN_WIDTH = 1e-3  # nats, of a domain: entropies that are closer together are as one
N_GRID = 200  # points of the domain
GRID_WEIGHT = 0.01  # of all of them, as a fraction of the rows'
EXPORT_TOLERANCE = 0.01  # of beta, as the runtime evaluates plain powers in float32
N_STEPS = 200
N_HALVINGS = 40
CONVERGED = 1e-13  # of the objective: a step that changes it by less is the last


class PolynomialFit(NamedTuple):
    """A polynomial, and how well it describes the rows that it was fitted to."""

    coefficients: tuple[float, ...]  # of H^4, H^3, H^2, H, 1
    domain: tuple[float, float]  # nats
    r_squared: float  # of log beta, as the rule applies it
    n_rows: int
    n_at_bound: int  # rows whose optimal beta was bounded


@dataclass(frozen=True)
class LogLeastSquares:
    """Squares of log p(H) - log beta: the paper's procedure, robust against outliers of beta."""

    def coefficients(self, design: "_Design", beta: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """(degree + 1,) those of p, by the columns of the design."""
        return fit_logarithm(design, beta, weight)


@dataclass(frozen=True)
class LeastSquares:
    """Squares of p(H) - beta: the paper's procedure."""

    def coefficients(self, design: "_Design", beta: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """(degree + 1,) those of p, by the columns of the design."""
        return fit_value(design, beta, weight)


LOG_LEAST_SQUARES = LogLeastSquares()
LEAST_SQUARES = LeastSquares()


def fit_powers(
    entropy: np.ndarray,
    beta: np.ndarray,
    weight: np.ndarray,
    bounds: tuple[float, float],
    loss: LogLeastSquares | LeastSquares = LOG_LEAST_SQUARES,
) -> PolynomialFit:
    """Fits p(H) to the optimal betas of rows; the degree is less than 4 where float32 asks for it.

    Args:
      entropy: (rows,) H in nats, of one row at least.
      beta: (rows,) optimal beta, finite and above 0.
      weight: (rows,) above 0.
      bounds: of beta, as the rule has them.
      loss: whose squares are minimised.
    """
    domain = _domain(entropy)
    inside, bounded = np.clip(entropy, *domain), np.clip(beta, *bounds)
    weight = weight / weight.sum()
    with threadpool_limits(1):  # sums of several threads differ in their last bits
        coefficients = _exportable(
            lambda degree: loss.coefficients(_Design.of(inside, domain, degree), bounded, weight),
            inside,
            domain,
        )
    r_squared = log_r_squared(np.clip(horner(inside, coefficients), *bounds), bounded, weight)
    n_at_bound = int(np.sum(bounded != beta))
    return PolynomialFit(coefficients, domain, r_squared, len(entropy), n_at_bound)


def log_r_squared(fitted: np.ndarray, beta: np.ndarray, weight: np.ndarray) -> float:
    """R^2 of log beta, (rows,) each: 1 - residual / variance; 0 where beta does not vary."""
    weight = weight / weight.sum()
    log_beta = np.log(beta)
    residual = np.log(fitted) - log_beta
    spread = float(weight @ (log_beta - weight @ log_beta) ** 2)
    return 1 - float(weight @ residual**2) / spread if spread > CONVERGED else 0.0


def _domain(entropy: np.ndarray) -> tuple[float, float]:
    """The central 99 % of the entropies, MIN_WIDTH wide at least."""
    lo, hi = (max(0.0, float(end)) for end in np.percentile(entropy, DOMAIN_PERCENTILES))
    return (lo, hi) if hi - lo >= MIN_WIDTH else (max(0.0, lo - MIN_WIDTH), hi + MIN_WIDTH)


class _Design(NamedTuple):
    """Legendre polynomials over the domain, at the rows and at the points of the grid."""

    rows: np.ndarray  # (rows, degree + 1)
    grid: np.ndarray  # (points, degree + 1)

    @classmethod
    def of(cls, entropy: np.ndarray, domain: tuple[float, float], degree: int) -> "_Design":
        lo, hi = domain
        t = (2 * entropy - lo - hi) / (hi - lo)
        vander = np.polynomial.legendre.legvander
        return cls(vander(t, degree), vander(np.linspace(-1, 1, N_GRID), degree))

    def with_grid(
        self, log_beta: np.ndarray, weight: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows and grid together: the design, log beta, and weights that add up to 1.01."""
        mean = np.full(N_GRID, weight @ log_beta)
        weight = np.r_[weight, np.full(N_GRID, GRID_WEIGHT / N_GRID)]
        return np.vstack([self.rows, self.grid]), np.r_[log_beta, mean], weight


def fit_value(design: _Design, beta: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Coefficients of p that minimise sum weight (p - beta)^2, by linear least squares."""
    root = np.sqrt(weight)
    coefficients = np.linalg.lstsq(root[:, None] * design.rows, root * beta)[0]
    return np.asarray(coefficients)


def fit_logarithm(design: _Design, beta: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Coefficients of p > 0 that minimise sum weight (log p - log beta)^2, by Gauss-Newton.

    It begins at the minimum of sum weight (theta p - log p), theta = 1 / beta, which is convex and
    has p > 0 on every row: gamma regression with the inverse link.
    """
    x, y, w = design.with_grid(np.log(beta), weight)
    theta = np.exp(-y)

    def gamma(p: np.ndarray) -> float:
        return float(w @ (theta * p - np.log(p)))

    def newton(p: np.ndarray) -> np.ndarray:
        return _solve(x, w / p**2, (1 / p - theta) * p**2)

    def squares(p: np.ndarray) -> float:
        return float(w @ (np.log(p) - y) ** 2)

    def gauss_newton(p: np.ndarray) -> np.ndarray:
        return _solve(x, w / p**2, (y - np.log(p)) * p)

    start = np.zeros(x.shape[1])
    start[0] = w.sum() / (w @ theta)
    return _descend(x, squares, gauss_newton, _descend(x, gamma, newton, start))


def _solve(x: np.ndarray, w: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The step s that minimises sum w (x s - target)^2."""
    return np.asarray(np.linalg.solve(x.T @ (w[:, None] * x), x.T @ (w * target)))


def _descend(
    x: np.ndarray,
    objective: Callable[[np.ndarray], float],
    step_at: Callable[[np.ndarray], np.ndarray],
    c: np.ndarray,
) -> np.ndarray:
    """Minimises an objective of p = x c > 0, by steps that are halved until they improve on it."""
    value = objective(x @ c)
    for _ in range(N_STEPS):
        step, before = step_at(x @ c), value
        for _ in range(N_HALVINGS):
            p = x @ (c + step)
            tried = objective(p) if p.min() > 0 else np.inf
            if tried < value:
                c, value = c + step, tried
                break
            step = step / 2
        if before - value <= CONVERGED * max(1.0, abs(value)):
            return c
    return c


def _exportable(
    fit: Callable[[int], np.ndarray], entropy: np.ndarray, domain: tuple[float, float]
) -> tuple[float, ...]:
    """Plain powers, highest first, of the highest degree that float32 evaluates accurately.

    On a narrow domain far from 0 the terms of a quartic are large and cancel.
    """
    points = np.r_[entropy, np.linspace(*domain, N_GRID)]
    for degree in range(DEGREE, 0, -1):
        exact = Legendre(fit(degree), domain)
        ascending = exact.convert(kind=Polynomial).coef
        powers = np.zeros(N_POWERS)
        powers[N_POWERS - len(ascending) :] = ascending[::-1]
        rounded = horner(points.astype(np.float32), [np.float32(c) for c in powers])
        value = exact(points)
        if np.all(np.abs(rounded - value) <= EXPORT_TOLERANCE * np.maximum(value, 1)):
            return tuple(powers.tolist())
    return (0.0,) * DEGREE + (float(fit(0)[0]),)
