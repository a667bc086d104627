"""Maximum likelihood: the rule of a given form under which targets are most probable.

Where beta is within its bounds, the mean of log p_t(beta) is concave in the coefficients of a form,
and what it must keep at some rows is a concave constraint. So there is one best value of each form,
and a linear programme bounds what a solution can still gain. With sets of targets log p_T(beta) is
not concave, nor is the mean of p_t^q: these are climbed from several starts, and no gap is claimed.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from calibrate.maths import newton
from calibrate.maths.likelihood_profile import Profile
from calibrate.maths.rule_forms import Form

TOLERANCE = 1e-5  # what a solution may still be short of the best: of a likelihood nats
ROUGH_TOLERANCE = 1e-3  # the same, of the objective, where a solution need not be exact
N_CONSTANTS = 33  # betas that are tried to begin with
ATTEMPTS = 3  # of the solver
NEAR = 0.98  # of beta - 1: rules that are sharper than this share of the best are as sharp
LAST_STEP, ROUGH_STEP = 1e-13, 1e-9  # what Newton's last step promises, as the tolerances
SHARE = 1e-6  # of beta - 1, to which the least sharp rule is found


class Held(NamedTuple):
    """Scores that a rule must keep, such as at the sizes that a model was trained on."""

    of_rows: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # beta -> (k,), (k, rows) slopes
    least: np.ndarray  # (k,): beta = low has more


class Solution(NamedTuple):
    """The best rule of a form."""

    coefficients: np.ndarray  # (k,)
    value: float  # of the objective: of a likelihood nats
    gap: float  # the best rule of the form gains at most this much more; NaN: nobody knows


class Objective(NamedTuple):
    """What a rule is fitted for: a sum over rows, larger where better."""

    values: Callable[[np.ndarray], np.ndarray]  # (..., rows) beta -> (...)
    # (rows,) beta -> value, and its first and second derivative in each row's beta
    of_rows: Callable[[np.ndarray], tuple[float, np.ndarray, np.ndarray]]
    of_constants: Callable[[np.ndarray], np.ndarray]  # betas -> (rows, betas), each row's part
    concave: bool  # in (rows,) beta; if not, it may have several peaks

    def __call__(self, beta: np.ndarray) -> tuple[float, np.ndarray]:
        """The value at one beta of each row, and its slope in each row's beta."""
        return self.of_rows(beta)[:2]


def likelihood(profile: Profile, weight: np.ndarray) -> Objective:
    """(rows,) beta -> sum of weight log p_t(beta), and its slope in each row's beta."""

    def values(beta: np.ndarray) -> np.ndarray:
        return np.asarray(profile.log_p(beta) @ weight)

    def of_rows(beta: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        value, slope, bend = profile.derivatives(beta)
        return float(weight @ value), weight * slope, weight * bend

    def of_constants(betas: np.ndarray) -> np.ndarray:
        return np.asarray(weight[:, None] * profile.log_p_at_each(betas))

    return Objective(values, of_rows, of_constants, profile.concave)


def maximise(
    objective: Objective,
    form: Form,
    low: float,
    high: float,
    start: np.ndarray | None = None,
    tolerance: float | None = TOLERANCE,
    held: Held | None = None,
) -> Solution:
    """The least sharp rule of a form, within TOLERANCE of the largest objective that was found.

    Less sharp is on the straight way from the rule found to beta = low: where the data do not tell
    one beta from another, beta is the least of them. A concave objective is climbed from one start;
    any other also from the peaks among constants and from a rule that follows each row's best
    constant, and the highest peak is kept: nothing bounds what a rule in between could gain.

    Args:
      objective: of (rows,) beta within the bounds.
      form: of the rule.
      low, high: bounds of beta.
      start: an earlier solution. Others are then climbed from only if they are better than what it
        leads to. None: from the best constant.
      tolerance: the largest gap to accept. None: the solution is less exact, and its gap is
        computed only if the solver reports failure.
      held: scores that the rule must keep, concave in beta.
    Raises:
      ArithmeticError: the gap exceeds the tolerance, or cannot be bounded.
    """

    def betas(c: np.ndarray) -> np.ndarray:
        # The solver may step out of the constraints by a rounding.
        # Quicker than np.clip.
        within: np.ndarray = np.minimum(np.maximum(form.design @ c, low), high)
        return within

    def value(c: np.ndarray) -> float:
        return float(objective.values(betas(c)))

    def at(c: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        score, slope, bend = objective.of_rows(betas(c))
        return score, slope @ form.design, (form.design.T * bend) @ form.design

    keep = None if held is None else _of_coefficients(held, form, low, high)
    plain = low * form.ones

    def climb(start: np.ndarray) -> _Peak:
        if keep is None:
            return _climb(at, form, start, tolerance, objective.concave)
        return _climb_within(at, form, keep, _towards(plain, start, keep), tolerance)

    found = [] if start is None else [climb(start)]
    if not (found and objective.concave):
        least = found[0].value if found else -np.inf
        others = [c for c in _starts(objective, form, low, high) if value(c) > least]
        found += [climb(c) for c in others]
    peaks = [peak for peak in found if not peak.short]
    if not peaks:
        raise ArithmeticError(found[0].short)
    peak = max(peaks, key=lambda peak: peak.value)
    most = peak.value + (np.nan_to_num(peak.gap) if objective.concave else 0.0)
    way = form.design @ peak.c - low

    def spare(share: np.ndarray) -> np.ndarray:
        at_shares = np.clip(low + np.multiply.outer(share, way), low, high)
        return objective.values(at_shares) - most + TOLERANCE

    c = plain + _least_share(spare, objective.concave) * (peak.c - plain)
    reached = value(c)
    return Solution(c, reached, most - reached if objective.concave else np.nan)


# Coefficients -> by how much each held score is kept, (k,), and the slopes of that, (k, ...).
_Keep = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def _of_coefficients(held: Held, form: Form, low: float, high: float) -> _Keep:
    def keep(c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, slope = held.of_rows(np.clip(form.design @ c, low, high))
        return value - held.least, slope @ form.design

    return keep


def _towards(plain: np.ndarray, c: np.ndarray, keep: _Keep) -> np.ndarray:
    """The farthest rule on the straight way from plain softmax to c that keeps what is held."""
    from scipy.optimize import brentq

    def spare(share: float) -> float:
        return float(keep(plain + share * (c - plain))[0].min())

    if spare(1.0) >= 0:
        return c
    share = float(brentq(spare, 0.0, 1.0, xtol=SHARE)) - SHARE
    farthest: np.ndarray = plain + max(0.0, share) * (c - plain)
    return farthest


class _Peak(NamedTuple):
    """Where the solver stopped."""

    c: np.ndarray
    value: float
    gap: float  # what the tangent at c gains at most; NaN: not computed
    short: str  # why it is not a peak; "" if it is


def _climb(
    at: newton.Function, form: Form, start: np.ndarray, tolerance: float | None, concave: bool
) -> _Peak:
    """By Newton's method."""
    sides = np.concatenate([form.matrix, -form.matrix])
    bounds = np.concatenate([form.low, -form.high])
    least = ROUGH_STEP if tolerance is None else LAST_STEP
    c, value, gain = newton.climb(at, sides, bounds, start, least)
    gap, most = gain, ROUGH_TOLERANCE * max(1.0, abs(value)) if tolerance is None else tolerance
    if concave and (tolerance is not None or gain > most):
        gap = _largest_gain(form, at(c)[1], c, None)
    short = "" if gap <= most else f"the rule found may be short of the best by {gap:.3g}"
    return _Peak(c, value, gap, short)


def _climb_within(
    at: newton.Function, form: Form, keep: _Keep, start: np.ndarray, tolerance: float | None
) -> _Peak:
    """By sequential quadratic programming, where scores are held."""
    from scipy.optimize import minimize

    def loss(c: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope, _ = at(c)
        return -value, -slope

    sides = np.concatenate([form.matrix, -form.matrix])
    bounds = np.concatenate([form.low, -form.high])
    constraints: list[dict[str, Any]] = [
        {"type": "ineq", "fun": lambda c: sides @ c - bounds, "jac": lambda c: sides},
        {"type": "ineq", "fun": lambda c: keep(c)[0], "jac": lambda c: keep(c)[1]},
    ]
    for _ in range(ATTEMPTS):  # the solver may stop early, and then goes on from where it stopped
        result = minimize(
            loss, start, jac=True, method="SLSQP", constraints=constraints,
            options={"ftol": 1e-9 if tolerance is None else 1e-14, "maxiter": 500},
        )  # fmt: skip
        start = _towards(start, result.x, keep)
        value, slope, _ = at(start)
        # At the optimum it may find no step that rounding does not spoil, and call it failure.
        accepted = tolerance is None and result.success
        gap = np.nan if accepted else _largest_gain(form, slope, start, keep)
        most = ROUGH_TOLERANCE * max(1.0, abs(value)) if tolerance is None else tolerance
        if not gap > most:
            return _Peak(start, value, gap, "")
    short = f"the rule found may be short of the best by {gap:.3g}: {result.message}"
    return _Peak(start, value, gap, short)


def _starts(objective: Objective, form: Form, low: float, high: float) -> list[np.ndarray]:
    """Coefficients to climb from: of a concave objective one rule, else several."""
    betas = np.geomspace(low, high, N_CONSTANTS)
    table = objective.of_constants(betas)
    total = table.sum(axis=0)
    if objective.concave:
        return [betas[np.argmax(total >= total.max() - TOLERANCE)] * form.ones]
    constants = [betas[i] * form.ones for i in _peaks(total)]
    # Rows that gain little by their best constant have as little say in a rule that follows them.
    say = np.sqrt(np.ptp(table, axis=1))
    aim = betas[table.argmax(axis=1)]
    middle = math.sqrt(low * high) * form.ones
    way = np.linalg.lstsq(say[:, None] * form.design, say * aim)[0] - middle
    room = np.concatenate([form.high - form.matrix @ middle, form.matrix @ middle - form.low])
    rise = np.concatenate([form.matrix @ way, -form.matrix @ way])
    steps = room[rise > 0] / rise[rise > 0]
    return [*constants, middle + min([1.0, *steps]) * way]


def _peaks(values: np.ndarray) -> list[int]:
    """Where values are highest, and at other peaks beyond a dip; the highest first."""
    peaks: list[int] = []
    beside = np.pad(values, 1, constant_values=-np.inf)
    tops = np.flatnonzero((values >= beside[:-2]) & (values >= beside[2:]))
    for i in tops[np.argsort(-values[tops], kind="stable")]:
        dips = (values[min(i, j) : max(i, j) + 1].min() for j in peaks)
        if all(dip < values[i] - ROUGH_TOLERANCE for dip in dips):
            peaks.append(int(i))
    return peaks


def _least_share(spare: Callable[[np.ndarray], np.ndarray], concave: bool) -> float:
    """The first share of the straight way from beta = low to a rule that has something to spare."""
    from scipy.optimize import brentq

    shares = np.array([0.0, NEAR]) if concave else np.linspace(0, NEAR, N_CONSTANTS)
    enough = np.flatnonzero(spare(shares) >= 0)
    if not len(enough):
        return 1.0
    first = int(enough[0])
    if first == 0:
        return 0.0
    root = float(brentq(spare, shares[first - 1], shares[first], xtol=SHARE))
    return float(min(root + SHARE, shares[first]))  # the root may fall short


def _largest_gain(form: Form, gradient: np.ndarray, c: np.ndarray, keep: _Keep | None) -> float:
    """What a concave objective can gain at most: by its tangent, anywhere in the constraints.

    The tangents of concave constraints leave more room than these do.
    """
    from scipy.optimize import linprog

    steepest = float(np.abs(gradient).max())
    if steepest == 0:
        return 0.0
    sides, most = [form.matrix, -form.matrix], [form.high, -form.low]
    if keep is not None:
        spare, slopes = keep(c)
        sides.append(-slopes)
        most.append(spare - slopes @ c)
    result = linprog(
        -gradient / steepest,  # or a gradient near 0 drowns in the programme's tolerances
        A_ub=np.concatenate(sides),
        b_ub=np.concatenate(most),
        bounds=(None, None),
        options={"presolve": False},  # it fails on objectives whose terms differ by 1e6
    )
    if not result.success:
        raise ArithmeticError(f"cannot bound what the best rule gains: {result.message}")
    return float(gradient @ (result.x - c))
