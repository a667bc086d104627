"""Climbing an objective to its peaks, as a function of the coefficients of a form of rules.

The climb is by Newton's method within the linear constraints of the form; where held scores have
to be kept too, which are concave constraints, it is by sequential quadratic programming.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from calibrate.maths.likelihood_profile import Profile
from calibrate.maths.rule_forms import Form

ROUGH_TOLERANCE = 1e-3  # of the objective: the largest gap where a solution need not be exact
ATTEMPTS = 3  # of the solver
LAST_STEP, ROUGH_STEP = 1e-13, 1e-9  # what Newton's last step promises, as the tolerances
SHARE = 1e-6  # of beta - 1, to which the farthest or least sharp rule is found
MAX_STEPS = 200
FLAT, FLATTEST = 1e-10, 1e-12  # curvature below this share of the largest, and this, counts as it
RISE = 0.1  # of what the parabola promises at first, that a step has to gain
SHORTEST = 1e-6  # share of a step


class Constraint(NamedTuple):
    """Scores that a rule must keep, such as at the sizes that a model was trained on."""

    of_rows: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # beta -> (k,), (k, rows) slopes
    least: np.ndarray  # (k,): beta = 1, or the bound next to it, has more


class Objective(NamedTuple):
    """The objective of a fit: the sum over rows of weight times log p_t(beta), or another score.

    A profile with series of several objectives has values and derivatives of each.
    """

    profile: Profile
    weight: np.ndarray  # (rows,)

    @property
    def concave(self) -> bool:
        """In (rows,) beta; if not, it may have several peaks."""
        return self.profile.concave

    def values(self, beta: np.ndarray) -> np.ndarray:
        """(..., rows) beta -> (...)"""
        return np.asarray(self.profile.log_p(beta) @ self.weight)

    def of_rows(self, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(..., rows) beta -> value, and its first and second derivative in each row's beta."""
        value, slope, bend = self.profile.derivatives(beta)
        return np.asarray(value @ self.weight), self.weight * slope, self.weight * bend

    def of_constants(self, betas: np.ndarray) -> np.ndarray:
        """(rows, betas), each row's part of the value at each of some betas."""
        return np.asarray(self.weight[:, None] * self.profile.log_p_at_each(betas))


# Coefficients -> by how much each held score is kept, (k,), and the slopes of that, (k, ...).
Slack = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def constraint_of_coefficients(held: Constraint, form: Form, low: float, high: float) -> Slack:
    """The slack of a constraint, by the coefficients of a form in place of each row's beta."""

    def keep(c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, slope = held.of_rows(np.clip(form.design @ c, low, high))
        return value - held.least, slope @ form.design

    return keep


def _towards(plain: np.ndarray, c: np.ndarray, keep: Slack) -> np.ndarray:
    """The farthest rule on the straight way from plain softmax to c that keeps what is held."""
    from scipy.optimize import brentq

    def spare(share: float) -> float:
        return float(keep(plain + share * (c - plain))[0].min())

    if spare(1.0) >= 0:
        return c
    share = float(brentq(spare, 0.0, 1.0, xtol=SHARE)) - SHARE
    return np.asarray(plain + max(0.0, share) * (c - plain))


class Optimum(NamedTuple):
    """A solution of the solver."""

    c: np.ndarray
    value: float
    gap: float  # what the tangent at c gains at most; NaN: not computed
    found: bool  # whether the gap is small enough


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
        value, slope, bend = self.objective.of_rows(self._betas(c))
        design = self.form.design
        return value, slope @ design, (design.T * bend[..., None, :]) @ design

    def maximise(self, starts: np.ndarray, keep: Slack | None = None) -> list[Optimum]:
        """The peaks that starts lead to, (m, k): of m objectives, or all of one."""
        if keep is not None:
            plain = np.clip(1.0, self.low, self.high) * self.form.ones
            return [self._maximise_constrained(keep, _towards(plain, c, keep)) for c in starts]
        step = ROUGH_STEP if self.tolerance is None else LAST_STEP
        tops, values, gaps = newton(self.at, *self.form.sides(), starts, step)
        most = self._max_gap(values)
        unsure = (gaps > most) | (self.tolerance is not None)
        if self.objective.concave and unsure.any():
            slopes = self.at(tops)[1]
            for i in np.flatnonzero(unsure):
                gaps[i] = optimality_gap(self.form, slopes[i], tops[i], None)
        return list(map(Optimum, tops, values.tolist(), gaps.tolist(), gaps <= most))

    def _maximise_constrained(self, keep: Slack, start: np.ndarray) -> Optimum:
        """By sequential quadratic programming, where scores are held."""
        from scipy.optimize import minimize

        def loss(c: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope, _ = self.at(c)
            return -float(value), -slope

        sides, bounds = self.form.sides()
        constraints: list[dict[str, Any]] = [
            {"type": "ineq", "fun": lambda c: sides @ c - bounds, "jac": lambda c: sides},
            {"type": "ineq", "fun": lambda c: keep(c)[0], "jac": lambda c: keep(c)[1]},
        ]
        rough = self.tolerance is None
        for _ in range(ATTEMPTS):  # it may stop early, and then goes on from where it stopped
            result = minimize(
                loss, start, jac=True, method="SLSQP", constraints=constraints,
                options={"ftol": 1e-9 if rough else 1e-14, "maxiter": 500},
            )  # fmt: skip
            start = _towards(start, result.x, keep)
            value, slope, _ = self.at(start)
            # At the optimum it may find no step that rounding does not spoil, and call it failure.
            accepted = rough and result.success
            gap = np.nan if accepted else optimality_gap(self.form, slope, start, keep)
            found = not gap > self._max_gap(value)
            if found:
                break
        return Optimum(start, float(value), gap, found)

    def _betas(self, c: np.ndarray) -> np.ndarray:
        # The solver may step out of the constraints by a rounding; np.clip takes longer.
        return np.asarray(np.minimum(np.maximum(c @ self.form.design.T, self.low), self.high))

    def _max_gap(self, value: np.ndarray) -> np.ndarray | float:
        """The largest optimality gap that is accepted at an optimum with this value."""
        if self.tolerance is not None:
            return self.tolerance
        return np.asarray(ROUGH_TOLERANCE * np.maximum(1.0, np.abs(value)))


def optimality_gap(form: Form, gradient: np.ndarray, c: np.ndarray, keep: Slack | None) -> float:
    """Upper bound of the gain of a concave objective, by tangents of it and of its constraints."""
    from scipy.optimize import linprog

    if keep is None and form.matrix.shape == (len(c), len(c)):  # a parallelepiped
        along, at = np.linalg.solve(form.matrix.T, gradient), form.matrix @ c
        return float(np.maximum(along * (form.low - at), along * (form.high - at)).sum())
    steepest = float(np.abs(gradient).max())
    if steepest == 0:
        return 0.0
    sides, bounds = form.sides()
    if keep is not None:
        spare, slopes = keep(c)
        sides, bounds = np.vstack([sides, slopes]), np.append(bounds, slopes @ c - spare)
    # Scaled, or a gradient near 0 drowns in tolerances; presolve fails on terms that differ by 1e6.
    result = linprog(
        -gradient / steepest, -sides, -bounds, bounds=(None, None), options={"presolve": False}
    )
    if not result.success:
        raise ArithmeticError("the search cannot tell how near it is to the best")
    return float(gradient @ (result.x - c))


def newton(
    at: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]],
    matrix: np.ndarray, least: np.ndarray, starts: np.ndarray, tolerance: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """The tops that steps from starts lead to, their values, and what the last steps promised.

    All are climbed at once, each by itself. Each step is the best one of the parabola at the point,
    by least distance programming (Lawson and Hanson, Solving Least Squares Problems, chapter 23).
    Where a function is not concave, its curvature counts as if it were: every step leads up.

    Args:
      at: coefficients (m, k) -> values (m,), slopes (m, k) and second derivatives (m, k, k).
      matrix, least: matrix @ coefficients >= least, (constraints, k) and (constraints,).
      starts: (m, k), within the constraints.
      tolerance: a step that promises this or less is the last one, and taken without a look.
    """
    c, (value, slope, bend) = starts, at(starts)
    going, promise = np.full(len(c), True), np.zeros(len(c))
    for _ in range(MAX_STEPS):
        step = np.zeros_like(c)
        step[going] = _best_steps(slope[going], bend[going], matrix, least - c[going] @ matrix.T)
        promise = np.where(going, np.vecdot(slope, step), promise)
        last = going & (promise <= tolerance)
        c, value = c + last[:, None] * step, value + last * promise / 2
        going = going & ~last
        if not going.any():
            break
        share = going.astype(float)
        new = at(c + share[:, None] * step)
        while (far := going & ~(new[0] >= value + RISE * share * promise)
               & (share > SHORTEST)).any():  # fmt: skip
            share[far] /= 4
            new = at(c + share[:, None] * step)
        going = going & (new[0] > value)  # rounding spoils every step of the others
        c, value = c + (going * share)[:, None] * step, np.where(going, new[0], value)
        slope, bend = new[1:]
    return c, value, promise


def _best_steps(
    slope: np.ndarray, bend: np.ndarray, matrix: np.ndarray, least: np.ndarray
) -> np.ndarray:
    """(m, k): the d of largest slope @ d - d @ |bend| @ d / 2 where matrix @ d >= least."""
    curvature, axes = np.linalg.eigh(bend)
    curvature = np.abs(curvature)
    flat = np.maximum(FLAT * curvature.max(axis=1), FLATTEST)
    whiten = axes / np.sqrt(np.maximum(curvature, flat[:, None]))[:, None]
    # A step is whiten @ x, and of these slope @ whiten is the best.
    x = np.vecdot(whiten.mT, slope[:, None])
    sides = matrix @ whiten
    short = least - np.vecdot(sides, x[:, None])
    for i in np.flatnonzero((short > 0).any(axis=1)):
        x[i] += _least_distance(sides[i], short[i])
    steps: np.ndarray = np.vecdot(whiten, x[:, None])
    return steps


def _least_distance(sides: np.ndarray, short: np.ndarray) -> np.ndarray:
    """(k,) the least y where sides @ y >= short."""
    from scipy.optimize import nnls

    both, last = np.vstack([sides.T, short]), np.append(np.zeros(sides.shape[1]), 1.0)
    rest = both @ nnls(both, last, maxiter=50 * len(short))[0] - last
    y: np.ndarray = -rest[:-1] / rest[-1]
    return y
