"""Climbing an objective to its peaks, as a function of the coefficients of a form of rules.

The coefficients stay within the constraints of the form, and may have to keep held scores: concave
constraints, for which the climb is by sequential quadratic programming instead of Newton's method.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from calibrate.maths import newton
from calibrate.maths.likelihood_profile import Profile
from calibrate.maths.rule_forms import Form

ROUGH_TOLERANCE = 1e-3  # of the objective: the largest gap where a solution need not be exact
ATTEMPTS = 3  # of the solver
LAST_STEP, ROUGH_STEP = 1e-13, 1e-9  # what Newton's last step promises, as the tolerances
SHARE = 1e-6  # of beta - 1, to which the farthest or least sharp rule is found


class Held(NamedTuple):
    """Scores that a rule must keep, such as at the sizes that a model was trained on."""

    of_rows: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # beta -> (k,), (k, rows) slopes
    least: np.ndarray  # (k,): beta = 1, or the bound next to it, has more


class Objective(NamedTuple):
    """What rules are fitted for: the sum over rows of weight times log p_t(beta), or another score.

    Of a profile with series of several objectives, values and derivatives are those of each.
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
Keep = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def of_coefficients(held: Held, form: Form, low: float, high: float) -> Keep:
    """What must be kept, by the coefficients of a form in place of each row's beta."""

    def keep(c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, slope = held.of_rows(np.clip(form.design @ c, low, high))
        return value - held.least, slope @ form.design

    return keep


def _towards(plain: np.ndarray, c: np.ndarray, keep: Keep) -> np.ndarray:
    """The farthest rule on the straight way from plain softmax to c that keeps what is held."""
    from scipy.optimize import brentq

    def spare(share: float) -> float:
        return float(keep(plain + share * (c - plain))[0].min())

    if spare(1.0) >= 0:
        return c
    share = float(brentq(spare, 0.0, 1.0, xtol=SHARE)) - SHARE
    farthest: np.ndarray = plain + max(0.0, share) * (c - plain)
    return farthest


class Peak(NamedTuple):
    """Where the solver stopped."""

    c: np.ndarray
    value: float
    gap: float  # what the tangent at c gains at most; NaN: not computed
    short: str  # why it is not a peak; "" if it is


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

    def climb(self, starts: np.ndarray, keep: Keep | None = None) -> list[Peak]:
        """The peaks that starts lead to, (m, k): of m objectives, or all of one."""
        if keep is not None:
            plain = np.clip(1.0, self.low, self.high) * self.form.ones
            return [self._climb_within(keep, _towards(plain, c, keep)) for c in starts]
        step = ROUGH_STEP if self.tolerance is None else LAST_STEP
        tops, values, gaps = newton.climb(self.at, *self.form.sides(), starts, step)
        most = self._largest_gap(values)
        unsure = (gaps > most) | (self.tolerance is not None)
        if self.objective.concave and unsure.any():
            slopes = self.at(tops)[1]
            for i in np.flatnonzero(unsure):
                gaps[i] = largest_gain(self.form, slopes[i], tops[i], None)
        found = zip(tops, values.tolist(), gaps.tolist(), gaps <= most, strict=True)
        return [Peak(c, value, gap, "" if ok else _short_by(gap)) for c, value, gap, ok in found]

    def _climb_within(self, keep: Keep, start: np.ndarray) -> Peak:
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
            gap = np.nan if accepted else largest_gain(self.form, slope, start, keep)
            if not gap > self._largest_gap(value):
                return Peak(start, float(value), gap, "")
        return Peak(start, float(value), gap, f"{_short_by(gap)}: {result.message}")

    def _betas(self, c: np.ndarray) -> np.ndarray:
        # The solver may step out of the constraints by a rounding; np.clip takes longer.
        within: np.ndarray = np.minimum(np.maximum(c @ self.form.design.T, self.low), self.high)
        return within

    def _largest_gap(self, value: np.ndarray) -> np.ndarray | float:
        """That is accepted of a peak with this value."""
        if self.tolerance is not None:
            return self.tolerance
        return np.asarray(ROUGH_TOLERANCE * np.maximum(1.0, np.abs(value)))


def _short_by(gap: float) -> str:
    return f"the rule found may be short of the best by {gap:.3g}"


def largest_gain(form: Form, gradient: np.ndarray, c: np.ndarray, keep: Keep | None) -> float:
    """What a concave objective can gain at most: by its tangent, anywhere in the constraints.

    The tangents of concave constraints leave more room than these do.
    """
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
    result = linprog(
        -gradient / steepest,  # or a gradient near 0 drowns in the programme's tolerances
        A_ub=-sides,
        b_ub=-bounds,
        bounds=(None, None),
        options={"presolve": False},  # it fails on objectives whose terms differ by 1e6
    )
    if not result.success:
        raise ArithmeticError("the search cannot tell how near it is to the best")
    return float(gradient @ (result.x - c))
