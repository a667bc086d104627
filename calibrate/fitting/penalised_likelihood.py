"""The penalised likelihood of a rule, and its maximum, which is the smoothed fit.

    beta = clip(b0 (c_0 + sum over k >= 1 of c_k (x_k - mean of x_k)), min_beta, max_beta)
    minimise over c:  - weighted mean of log p(beta) + lambda * sum over k >= 1 of c_k^2

b0 is the constant of highest likelihood. The columns x_k are Legendre polynomials of the entropy H,
of log n, or of both, each scaled to [-1, 1]. lambda = 0 is plain maximum likelihood; with lambda =
infinity the rule is the constant b0. `fit_rule.py` chooses lambda.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.polynomial import Polynomial
from numpy.polynomial.legendre import leg2poly, legvander

from calibrate.core.rule import (
    CONSTANT,
    DEGREE,
    ENTROPY_AND_SIZE,
    LOG_SIZE,
    POLYNOMIAL,
    RuleForm,
    beta_of,
)
from calibrate.rows.likelihood_profile import Profile
from calibrate.rows.solve import SolvedInputs
from calibrate.store.coefficient_fields import MAX_ENTROPY

DOMAIN_QUANTILES = 0.005, 0.995  # of the rows' entropies and log n: the domain of a rule
MIN_RANGE = 1e-3  # nats: a variable that varies by less has no slope
# The columns of each kind, among: 1, P_1 .. P_4 of H, P_1 and P_2 of log n, H log n.
KIND_COLUMNS = {
    CONSTANT: [0],
    LOG_SIZE: [0, 5],
    POLYNOMIAL: [0, 1, 2, 3, 4],
    ENTROPY_AND_SIZE: [0, 1, 2, 3, 4, 5, 6, 7],
}
PENALTIES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0)  # the values of lambda that are tried
MAX_FLOAT32_ERROR = 0.01  # of beta on the domain, between plain powers and the Legendre form
GRID = 129  # points of each variable, at which this is checked
# Newton's method.
MAX_NEWTON_STEPS = 100
LEAST_GAIN = 1e-12  # nats, predicted of the last step
ARMIJO = 0.1  # a step must have this share of its predicted gain
MIN_LENGTH = 1e-6  # of a step, in times of Newton's
LEAST_CURVATURE = 1e-12  # in times of the largest
FIRST_SLOPES = (0.0, 0.3, -0.3)  # c_1 of the starts where the likelihood is not concave


class ScaledVariable(NamedTuple):
    """A variable v, clipped to [low, high] and scaled to x = slope v + shift in [-1, 1]."""

    low: float
    high: float

    @property
    def slope(self) -> float:
        """dx / dv."""
        return 2 / (self.high - self.low)

    @property
    def shift(self) -> float:
        """x at v = 0."""
        return -1 - self.slope * self.low

    def scale(self, values: np.ndarray) -> np.ndarray:
        """(rows,) x of (rows,) values."""
        return np.asarray(np.clip(values, self.low, self.high) * self.slope + self.shift)


def scale_to_quantiles(values: np.ndarray, weight: np.ndarray) -> ScaledVariable:
    """The scaling of a variable to its weighted quantiles, at least MIN_RANGE apart."""
    low, high = np.quantile(values, DOMAIN_QUANTILES, method="inverted_cdf", weights=weight)
    if high - low < MIN_RANGE:
        middle = min(max((low + high) / 2, MIN_RANGE), MAX_ENTROPY - MIN_RANGE)
        low, high = middle - MIN_RANGE / 2, middle + MIN_RANGE / 2
    return ScaledVariable(float(low), float(high))


class Design(NamedTuple):
    """The columns of the regression for a set of rows; each kind of rule uses some of them."""

    entropy: ScaledVariable
    log_n: ScaledVariable
    means: np.ndarray  # (8,) weighted means of the columns; 0 of the first, which is 1

    def columns(self, entropy: np.ndarray, log_n: np.ndarray) -> np.ndarray:
        """(rows, 8) columns at (rows,) entropies and log n, centred; see KIND_COLUMNS."""
        x, y = self.entropy.scale(entropy), self.log_n.scale(log_n)
        columns = np.column_stack([legvander(x, DEGREE), legvander(y, 2)[:, 1:], x * y])
        return np.asarray(columns - self.means)

    def domain(self, form: RuleForm) -> tuple[float, ...]:
        """[lo, hi] of entropy, of log n, or of both, as a coefficient file has it."""
        entropies = (self.entropy.low, self.entropy.high) if form.by_entropy else ()
        sizes = (self.log_n.low, self.log_n.high) if form.by_size else ()
        return (*entropies, *sizes)

    def plain_coefficients(self, kind: str, c: np.ndarray) -> tuple[float, ...]:
        """The coefficients of TERMS, in their order, of (columns of the kind,) coefficients c."""
        level = c[0] - self.means[KIND_COLUMNS[kind]] @ c
        if kind == CONSTANT:
            terms = [level]
        elif kind == LOG_SIZE:
            terms = [c[1] * self.log_n.slope, level + c[1] * self.log_n.shift]
        else:
            terms = self._powers_of_entropy(np.array([level, *c[1 : 1 + DEGREE]]))
            if kind == ENTROPY_AND_SIZE:
                terms = self._add_size(terms, *c[1 + DEGREE :])
        return tuple(map(float, terms))

    def _powers_of_entropy(self, legendre: np.ndarray) -> list[float]:
        """Coefficients of H^4 to 1 of a Legendre series in the scaled entropy."""
        inner = Polynomial([self.entropy.shift, self.entropy.slope])
        powers = Polynomial(leg2poly(legendre))(inner).coef
        return [*np.pad(powers, (0, DEGREE + 1 - len(powers)))[::-1]]

    def _add_size(self, powers: list[float], c5: float, c6: float, c7: float) -> list[float]:
        """Coefficients of H^4 to 1, H L, L^2 and L, where x = a H + d and y = e L + f.

        The columns of size are P_1(y) = y, P_2(y) = (3 y^2 - 1) / 2 and x y.
        """
        a, d = self.entropy.slope, self.entropy.shift
        e, f = self.log_n.slope, self.log_n.shift
        *higher, of_h, level = powers
        of_h += c7 * a * f
        level += c5 * f + c6 * (1.5 * f**2 - 0.5) + c7 * d * f
        of_l = c5 * e + 3 * c6 * e * f + c7 * d * e
        return [*higher, of_h, level, c7 * a * e, 1.5 * c6 * e**2, of_l]


def make_design(solved: SolvedInputs) -> Design:
    """The design whose ranges and means are those of some rows."""
    log_n = np.log(solved.n)
    variables = (
        scale_to_quantiles(solved.entropy, solved.weight),
        scale_to_quantiles(log_n, solved.weight),
    )
    columns = Design(*variables, np.zeros(8)).columns(solved.entropy, log_n)
    means = solved.weight @ columns / solved.weight.sum()
    means[0] = 0.0
    return Design(*variables, means)


def is_exact_in_float32(
    design: Design, form: RuleForm, terms: tuple[float, ...], c: np.ndarray
) -> bool:
    """True if the plain powers of a file give the beta of the columns within 1 % in float32.

    A narrow domain far from 0 makes the powers cancel.

    Args:
      design, form: of the fit.
      terms: the coefficients of the file.
      c: (columns of the kind,) the same rule in the columns.
    """
    axes = [np.linspace(v.low, v.high, GRID) for v in (design.entropy, design.log_n)]
    entropy, log_n = (points.ravel() for points in np.meshgrid(*axes))
    exact = design.columns(entropy, log_n)[:, KIND_COLUMNS[form.kind]] @ c
    exact = np.clip(exact, form.min_beta, form.max_beta)
    in_float32 = beta_of(
        entropy.astype(np.float32),
        log_n.astype(np.float32),
        tuple(map(np.float32, terms)),
        tuple(map(np.float32, design.domain(form))),
        form._replace(min_entropy=0.0),
        np,
    )
    return bool((np.abs(in_float32 - exact) <= MAX_FLOAT32_ERROR * exact).all())


class Point(NamedTuple):
    """Coefficients, with the mean NLL of the rows there and its derivatives."""

    c: np.ndarray  # (k,)
    nll: float
    gradient: np.ndarray  # (k,)
    hessian: np.ndarray  # (k, k)

    def loss(self, curvatures: np.ndarray) -> float:
        """The mean NLL plus the penalty, of (k,) `penalty_curvatures`."""
        return float(curvatures @ self.c**2 / 2 + self.nll)


def penalty_curvatures(k: int, lambda_: float) -> np.ndarray:
    """(k,) second derivatives of lambda sum c_k^2: 2 lambda, and 0 of the level c_0."""
    return np.where(np.arange(k) == 0, 0.0, 2 * lambda_)


class Likelihood(NamedTuple):
    """The likelihood of rows as a function of the coefficients of one kind of rule."""

    profile: Profile
    share: np.ndarray  # (rows,) of the weight
    columns: np.ndarray  # (rows, k), the first of ones
    constant: float  # b0
    bounds: tuple[float, float]  # of beta

    def evaluate(self, c: np.ndarray) -> Point:
        """The mean NLL at coefficients (k,), with its gradient and Hessian."""
        unclipped = self.constant * (self.columns @ c)
        low, high = self.bounds
        log_p, slope, curvature = self.profile.derivatives(np.clip(unclipped, low, high))
        weight = self.share * ((unclipped > low) & (unclipped < high)) * self.constant
        gradient = -((weight * slope) @ self.columns)
        weighted = self.columns * (weight * self.constant * curvature)[:, None]
        return Point(c, -float(self.share @ log_p), gradient, -(self.columns.T @ weighted))

    def minimise(self, point: Point, lambda_: float) -> Point:
        """A local minimum of the penalised NLL, from a start, by Newton's method.

        Negative eigenvalues of the Hessian count by their size, which makes each step a descent;
        steps that gain too little are halved. With SciPy's trust-exact in its place a whole fit
        takes 1.4 (10,000 rows) to 2.4 times (600 rows) as long, for the same coefficients.
        """
        curvatures = penalty_curvatures(len(point.c), lambda_)
        for _ in range(MAX_NEWTON_STEPS):
            loss, gradient = point.loss(curvatures), curvatures * point.c + point.gradient
            sizes, axes = np.linalg.eigh(np.diag(curvatures) + point.hessian)
            sizes = np.abs(sizes)
            sizes = np.maximum(sizes, LEAST_CURVATURE * sizes.max(initial=LEAST_CURVATURE))
            step = -axes @ ((axes.T @ gradient) / sizes)
            gain, length = -float(gradient @ step), 1.0
            if gain < LEAST_GAIN:
                break
            after = self.evaluate(point.c + step)
            while after.loss(curvatures) > loss - ARMIJO * length * gain and length > MIN_LENGTH:
                length /= 2
                after = self.evaluate(point.c + length * step)
            if after.loss(curvatures) >= loss:
                break
            point = after
        return point

    def solve(self, lambdas: Sequence[float]) -> dict[float, Point]:
        """The minimum at each lambda; each starts at that of the next larger lambda.

        Several right items make the likelihood not concave: then there are three more starts.
        """
        k = self.columns.shape[1]
        level = np.eye(k)[0]
        point, others, solutions = self.evaluate(level), [], {}
        if not self.profile.concave and k > 1:
            others = [self.evaluate(level + slope * np.eye(k)[1]) for slope in FIRST_SLOPES]
        for lambda_ in sorted(lambdas, reverse=True):
            curvatures = penalty_curvatures(k, lambda_)
            point = self.minimise(point, lambda_)
            for start in others:
                other = self.minimise(start, lambda_)
                point = other if other.loss(curvatures) < point.loss(curvatures) else point
            solutions[lambda_] = point
        return solutions


def make_likelihood(
    solved: SolvedInputs, columns: np.ndarray, constant: float, bounds: tuple[float, float]
) -> Likelihood:
    """The likelihood of rows with columns (rows, k) of a design."""
    return Likelihood(
        solved.profile, solved.weight / solved.weight.sum(), columns, constant, bounds
    )


def degrees_of_freedom(point: Point, lambda_: float) -> float:
    """The effective degrees of freedom at a minimum: the trace of (A + 2 lambda D)^-1 A.

    A is the Hessian of the mean NLL, D the identity without c_0.
    """
    penalised = point.hessian + np.diag(penalty_curvatures(len(point.c), lambda_))
    return float(np.trace(np.linalg.pinv(penalised, rcond=1e-12) @ point.hessian))


def fit_constant_beta(solved: SolvedInputs, bounds: tuple[float, float]) -> float:
    """The constant beta of highest likelihood, within bounds.

    If every row is ranked correctly, the likelihood has no maximum. beta is then log(N + 1) / m,
    with N the sum of the weights and m the median margin of the target: the optimum of N + 1 pairs
    of items m apart, one of which is ranked wrong.
    """
    if not solved.misranked.any():
        is_finite = np.isfinite(solved.margin)
        margins, weight = solved.margin[is_finite], solved.weight[is_finite]
        if len(margins) and weight.any():
            m = float(np.quantile(margins, 0.5, method="inverted_cdf", weights=weight))
            if m > 0:
                return float(np.clip(math.log(solved.weight.sum() + 1) / m, *bounds))
    return _maximise_log_p(solved.profile.weighted_sum(solved.weight / solved.weight.sum()), bounds)


def _maximise_log_p(profile: Profile, bounds: tuple[float, float]) -> float:
    """The beta of the highest log p of a profile of one row: the best node, then Brent's method."""
    from scipy.optimize import minimize_scalar

    betas = np.unique(np.clip(profile.nodes(), *bounds))
    log_p = profile.log_p_at_each(betas)
    best = int(np.argmax(log_p))
    low, high = np.log(betas[[max(best - 1, 0), min(best + 1, len(betas) - 1)]])
    optimum = minimize_scalar(
        lambda log_beta: -profile.log_p(np.exp([log_beta]))[0],
        bounds=(low, high),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return float(np.exp(optimum.x)) if -optimum.fun > log_p[best] else float(betas[best])
