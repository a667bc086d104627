"""Constrained Newton: local maxima of an objective of the coefficients of a form of rules.

Newton's method, with an active set, maximises within the linear constraints of the form. Where
scores are bounded below, which are concave constraints, sequential quadratic programming does.

SciPy's solvers of the same problem reach the same value: of 1,200 planted rows, SLSQP took 2 to 18
times as long by kind and left beta 1e-8 to 4e-7 away, and trust-constr 14 to 330 times as long.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from calibrate.core.rule_kinds import Form
from calibrate.solver.likelihood_profile import Profile

ROUGH_TOLERANCE = 1e-3  # of the objective: largest optimality gap of a solution that is not exact
ATTEMPTS = 3  # of the solver
# Predicted gains of Newton's last step, for the two tolerances.
LAST_STEP = 1e-13
ROUGH_STEP = 1e-9
MIXING_TOLERANCE = 1e-6  # of the weight of the optimum in a rule on the segment to it
MAX_STEPS = 200
# Curvature below a share of the largest, and below a number, counts as these.
FLAT = 1e-10
FLATTEST = 1e-12
RISE = 0.1  # of the first-order gain, that a step has to gain (Armijo)
MIN_STEP = 1e-6  # as a fraction of the best step of the parabola


# Coefficients (m, k) -> values (m,), slopes (m, k) and second derivatives (m, k, k).
Derivatives = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]


class Constraint(NamedTuple):
    """Lower bounds of sums of scores, such as at the sizes that a model was trained on."""

    profile: Profile  # of the rows that are in a sum
    where: np.ndarray  # their places among all rows
    weight: np.ndarray  # (k, rows in a sum)
    least: np.ndarray  # (k,) bounds: beta = 1, or the bound next to it, has more

    def of_rows(self, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows,) beta -> (k,) sums, and their slopes in each row's beta, (k, rows)."""
        value, slope, _ = self.profile.derivatives(beta[self.where])
        slopes = np.zeros((len(self.weight), len(beta)))
        slopes[:, self.where] = self.weight * slope
        return self.weight @ value, slopes


class Objective(NamedTuple):
    """The objective of a fit: the sum over rows of weight times log p_t(beta), or another score.

    A profile with series of several objectives has values and derivatives of each.
    """

    profile: Profile
    weight: np.ndarray  # (rows,)

    @property
    def concave(self) -> bool:
        """True if it is concave in (rows,) beta; else it may have several local maxima."""
        return self.profile.concave

    def values(self, beta: np.ndarray) -> np.ndarray:
        """(..., rows) beta -> (...)"""
        return np.asarray(self.profile.log_p(beta) @ self.weight)

    def of_rows(self, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(..., rows) beta -> value, and its first and second derivative in each row's beta."""
        value, slope, curvature = self.profile.derivatives(beta)
        return np.asarray(value @ self.weight), self.weight * slope, self.weight * curvature

    def of_constants(self, betas: np.ndarray) -> np.ndarray:
        """(rows, betas), each row's part of the value at each of some betas."""
        return np.asarray(self.weight[:, None] * self.profile.log_p_at_each(betas))


# Coefficients -> the slack of each bounded score, (k,), and its slopes, (k, ...).
Slack = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class FormConstraint(NamedTuple):
    """A constraint on the coefficients of a form, in place of each row's beta."""

    constraint: Constraint
    form: Form
    low: float
    high: float

    def slack(self, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slack of each bounded sum at (k,) coefficients, and its slopes; see `Slack`."""
        beta = np.clip(self.form.design @ c, self.low, self.high)
        value, slope = self.constraint.of_rows(beta)
        return value - self.constraint.least, slope @ self.form.design


def last_feasible(plain: np.ndarray, c: np.ndarray, slack: Slack) -> np.ndarray:
    """The last feasible rule on the segment from the baseline to c.

    The least slack is concave along it. Without a tolerance it is 0 at the baseline too, a root
    that is not the last one if the slack grows from there.
    """
    from scipy.optimize import brentq

    def least_slack(weight: float) -> float:
        return float(slack(plain + weight * (c - plain))[0].min())

    if least_slack(1.0) >= 0:
        return c
    inside, outside = 0.0, 1.0
    if least_slack(inside) <= 0:
        inside = 0.5
        while least_slack(inside) <= 0:
            inside, outside = inside / 2, inside
            if inside < MIXING_TOLERANCE:
                return plain
    weight = float(brentq(least_slack, inside, outside, xtol=MIXING_TOLERANCE)) - MIXING_TOLERANCE
    return np.asarray(plain + max(0.0, weight) * (c - plain))


class Optimum(NamedTuple):
    """A solution of the solver."""

    c: np.ndarray
    value: float
    gap: float  # the optimality gap, by the tangent at c; NaN: not computed
    converged: bool  # the gap is small enough


class Search(NamedTuple):
    """An objective as a function of the coefficients of a form, (..., k)."""

    objective: Objective
    form: Form
    low: float
    high: float
    tolerance: float | None

    def values(self, c: np.ndarray) -> np.ndarray:
        return self.objective.values(self._betas(c))

    def at(self, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Value, slope and second derivatives."""
        value, slope, curvature = self.objective.of_rows(self._betas(c))
        design = self.form.design
        return value, slope @ design, (design.T * curvature[..., None, :]) @ design

    def maximise(self, starts: np.ndarray, slack: Slack | None = None) -> list[Optimum]:
        """The local maxima that starts lead to, (m, k): of m objectives, or all of one."""
        if slack is not None:
            plain = np.clip(1.0, self.low, self.high) * self.form.ones
            return [
                self._maximise_constrained(slack, last_feasible(plain, c, slack)) for c in starts
            ]
        step = ROUGH_STEP if self.tolerance is None else LAST_STEP
        optima, values, gaps = newton(self.at, *self.form.sides(), starts, step)
        most = self._max_gap(values)
        unsure = (gaps > most) | (self.tolerance is not None)
        if self.objective.concave and unsure.any():
            slopes = self.at(optima)[1]
            for i in np.flatnonzero(unsure):
                gaps[i] = optimality_gap(self.form, slopes[i], optima[i], None)
        return list(map(Optimum, optima, values.tolist(), gaps.tolist(), gaps <= most))

    def _maximise_constrained(self, slack: Slack, start: np.ndarray) -> Optimum:
        """A local maximum by sequential quadratic programming, where scores are bounded below."""
        from scipy.optimize import minimize

        def loss(c: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope, _ = self.at(c)
            return -float(value), -slope

        def value_of_slack(c: np.ndarray) -> np.ndarray:
            value, _ = slack(c)
            return value

        def slopes_of_slack(c: np.ndarray) -> np.ndarray:
            _, slopes = slack(c)
            return slopes

        sides, bounds = self.form.sides()
        constraints: list[dict[str, Any]] = [
            {"type": "ineq", "fun": lambda c: sides @ c - bounds, "jac": lambda c: sides},
            {"type": "ineq", "fun": value_of_slack, "jac": slopes_of_slack},
        ]
        rough = self.tolerance is None
        for _ in range(ATTEMPTS):  # it may stop early, and then goes on from where it stopped
            limits = {"ftol": 1e-9 if rough else 1e-14, "maxiter": 500}
            result = minimize(
                loss, start, jac=True, method="SLSQP", constraints=constraints, options=limits
            )
            start = last_feasible(start, result.x, slack)
            value, slope, _ = self.at(start)
            # At the optimum it may find no step that rounding does not spoil, and call it failure.
            accepted = rough and result.success
            gap = np.nan if accepted else optimality_gap(self.form, slope, start, slack)
            converged = not gap > self._max_gap(value)
            if converged:
                break
        return Optimum(start, float(value), gap, converged)

    def _betas(self, c: np.ndarray) -> np.ndarray:
        # The solver may step out of the constraints by a rounding; np.clip takes longer.
        return np.asarray(np.minimum(np.maximum(c @ self.form.design.T, self.low), self.high))

    def _max_gap(self, value: np.ndarray) -> np.ndarray | float:
        """The largest optimality gap that is accepted at an optimum with this value."""
        if self.tolerance is not None:
            return self.tolerance
        return np.asarray(ROUGH_TOLERANCE * np.maximum(1.0, np.abs(value)))


def optimality_gap(form: Form, gradient: np.ndarray, c: np.ndarray, slack: Slack | None) -> float:
    """Upper bound of the gain of a concave objective, by tangents of it and of its constraints."""
    from scipy.optimize import linprog

    if slack is None and form.matrix.shape == (len(c), len(c)):  # a parallelepiped
        slope, position = np.linalg.solve(form.matrix.T, gradient), form.matrix @ c
        gains = slope * (form.low - position), slope * (form.high - position)
        return float(np.maximum(*gains).sum())
    steepest = float(np.abs(gradient).max())
    if steepest == 0:
        return 0.0
    sides, bounds = form.sides()
    if slack is not None:
        spare, slopes = slack(c)
        sides, bounds = np.vstack([sides, slopes]), np.append(bounds, slopes @ c - spare)
    # Scaled, or a gradient near 0 drowns in tolerances; presolve fails on terms that differ by 1e6.
    result = linprog(
        -gradient / steepest, -sides, -bounds, bounds=(None, None), options={"presolve": False}
    )
    if not result.success:
        raise ArithmeticError("the optimality gap cannot be bounded")
    return float(gradient @ (result.x - c))


def newton(
    at: Derivatives, matrix: np.ndarray, least: np.ndarray, starts: np.ndarray, tolerance: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The local maxima that starts lead to, their values, and the predicted gains of last steps.

    All are maximised at once, each by itself. Each step is the best one of the parabola at the
    point, by least distance programming (Lawson and Hanson, Solving Least Squares Problems, chapter
    23). Where a function is not concave, its curvature counts as if it were: every step ascends.

    Args:
      at: the function to maximise.
      matrix, least: matrix @ coefficients >= least, (constraints, k) and (constraints,).
      starts: (m, k), within the constraints.
      tolerance: a step of this predicted gain or less is the last one, and taken unchecked.
    """
    c, (value, slope, curvature) = starts, at(starts)
    active, predicted = np.full(len(c), True), np.zeros(len(c))
    for _ in range(MAX_STEPS):
        step = np.zeros_like(c)
        shortfall = least - c[active] @ matrix.T
        step[active] = _best_steps(slope[active], curvature[active], matrix, shortfall)
        predicted = np.where(active, np.vecdot(slope, step), predicted)
        last = active & (predicted <= tolerance)
        c, value = c + last[:, None] * step, value + last * predicted / 2
        active = active & ~last
        if not active.any():
            break
        fraction = active.astype(float)
        while True:  # backtracking line search
            new_value, slope, curvature = at(c + fraction[:, None] * step)
            enough = new_value >= value + RISE * fraction * predicted
            too_far = active & ~enough & (fraction > MIN_STEP)
            if not too_far.any():
                break
            fraction[too_far] /= 4
        active = active & (new_value > value)  # rounding spoils every step of the others
        c, value = c + (active * fraction)[:, None] * step, np.where(active, new_value, value)
    return c, value, predicted


def _best_steps(
    slope: np.ndarray, curvature: np.ndarray, matrix: np.ndarray, shortfall: np.ndarray
) -> np.ndarray:
    """(m, k) d of largest slope @ d - d @ |curvature| @ d / 2, where matrix @ d >= shortfall."""
    eigenvalues, axes = np.linalg.eigh(curvature)
    eigenvalues = np.abs(eigenvalues)
    flat = np.maximum(FLAT * eigenvalues.max(axis=1), FLATTEST)
    whiten = axes / np.sqrt(np.maximum(eigenvalues, flat[:, None]))[:, None]
    # A step is whiten @ x, and of these slope @ whiten is the best.
    x = np.vecdot(whiten.mT, slope[:, None])
    sides = matrix @ whiten
    shortfall = shortfall - np.vecdot(sides, x[:, None])
    for i in np.flatnonzero((shortfall > 0).any(axis=1)):
        x[i] += _least_distance(sides[i], shortfall[i])
    steps: np.ndarray = np.vecdot(whiten, x[:, None])
    return steps


def _least_distance(sides: np.ndarray, shortfall: np.ndarray) -> np.ndarray:
    """(k,) the least y where sides @ y >= shortfall."""
    from scipy.optimize import nnls

    both, last = np.vstack([sides.T, shortfall]), np.append(np.zeros(sides.shape[1]), 1.0)
    rest = both @ nnls(both, last, maxiter=50 * len(shortfall))[0] - last
    y: np.ndarray = -rest[:-1] / rest[-1]
    return y
