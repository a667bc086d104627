"""Maximum likelihood: the rule of a given form under which targets are most probable.

A form is a design: beta = design @ coefficients, row by row. Where beta is within its bounds, the
mean of log p_t(beta) is concave in the coefficients; bounds, and whatever else a form asks for,
are linear constraints on them. So there is one best rule of each form, and a linear programme
bounds what a solution can still gain. Other objectives go through the same solver.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from calibrate.maths.bernstein import basis, elevation
from calibrate.maths.likelihood_profile import Profile

DEGREE = 4
ELEVATED_TO = 24
TOLERANCE = 1e-5  # what a solution may still be short of the best: of a likelihood nats
ROUGH_TOLERANCE = 1e-3  # the same, of the objective, where a solution need not be exact


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


class Solution(NamedTuple):
    """The best rule of a form."""

    coefficients: np.ndarray  # (k,)
    value: float  # of the objective: of a likelihood nats
    gap: float  # the best rule of the form gains at most this much more


def constant_form(rows: int, low: float, high: float) -> Form:
    """beta = c."""
    one = np.ones((1, 1))
    return Form(np.ones((rows, 1)), one, np.array([low]), np.array([high]), one[0])


def log_size_form(log_n: np.ndarray, low: float, high: float) -> Form:
    """beta = kappa log n + b, within the bounds at every size of the rows."""
    design = np.column_stack([log_n, np.ones(len(log_n))])
    matrix = np.array([[log_n.min(), 1.0], [log_n.max(), 1.0]])
    return Form(design, matrix, np.full(2, low), np.full(2, high), np.array([0.0, 1.0]))


def polynomial_form(
    entropy: np.ndarray,
    domain: tuple[float, float],
    low: float,
    high: float,
    degree: int = DEGREE,
) -> Form:
    """beta = a polynomial of entropy in Bernstein form, within the bounds on all of its domain.

    The bounds hold for its coefficients of degree 24: enough for the polynomial to keep them, and
    nearly necessary.
    """
    lo, hi = domain
    matrix = elevation(degree, ELEVATED_TO)
    t = (np.clip(entropy, lo, hi) - lo) / (hi - lo)
    bounds = np.full(len(matrix), low), np.full(len(matrix), high)
    return Form(basis(t, degree), matrix, *bounds, np.ones(degree + 1))


Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]


def likelihood(profile: Profile, weight: np.ndarray) -> Objective:
    """(rows,) beta -> sum of weight log p_t(beta), and its slope in each row's beta."""

    def objective(beta: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope, _ = profile.derivatives(beta)
        return float(weight @ value), weight * slope

    return objective


def closeness(optimum: np.ndarray, weight: np.ndarray, of_theta: bool) -> Objective:
    """(rows,) beta -> how close it is, or 1/beta, to that of each row, and its slope.

    The loss is squared near the optimum and grows as the distance far from it (pseudo-Huber), with
    the median distance from the median as its scale: rows far away pull no harder than others.
    """
    aim = 1 / optimum if of_theta else optimum
    scale = max(float(np.median(np.abs(aim - np.median(aim)))), 1e-3)

    def objective(beta: np.ndarray) -> tuple[float, np.ndarray]:
        distance = ((1 / beta if of_theta else beta) - aim) / scale
        root = np.sqrt(1 + distance**2)
        slope = -weight * distance / root / scale
        return -float(weight @ (root - 1)), slope * (-(beta**-2.0) if of_theta else 1)

    return objective


def maximise(
    objective: Objective,
    form: Form,
    low: float,
    high: float,
    start: np.ndarray | None = None,
    tolerance: float | None = TOLERANCE,
) -> Solution:
    """The coefficients for which the objective of beta = design @ coefficients is largest.

    Args:
      objective: of (rows,) beta within the bounds: its value, and its slope in each row's beta.
      form: of the rule.
      low, high: bounds of beta.
      start: coefficients to start from; None is a constant between the bounds.
      tolerance: the largest gap to accept, for likelihoods, which are concave. None: the solution
        is less exact, and its gap is computed only if the solver reports failure.
    Raises:
      ArithmeticError: the gap exceeds the tolerance, or cannot be bounded.
    """
    from scipy.optimize import minimize

    def loss(c: np.ndarray) -> tuple[float, np.ndarray]:
        # The solver may step out of the constraints by a rounding.
        value, slope = objective(np.clip(form.design @ c, low, high))
        return -value, -(form.design.T @ slope)

    sides = (1.0, form.low), (-1.0, form.high)
    constraints = [
        {
            "type": "ineq",
            "fun": lambda c, sign=sign, bound=bound: sign * (form.matrix @ c - bound),
            "jac": lambda c, sign=sign: sign * form.matrix,
        }
        for sign, bound in sides
    ]
    start = form.ones * np.sqrt(low * high) if start is None else start
    result = minimize(
        loss, start, jac=True, method="SLSQP", constraints=constraints,
        options={"ftol": 1e-9 if tolerance is None else 1e-14, "maxiter": 500},
    )  # fmt: skip
    lost, gradient = loss(result.x)
    # At the optimum the solver may find no step that rounding does not spoil, and call it failure.
    accepted = tolerance is None and result.success
    gap = np.nan if accepted else _largest_gain(form, -gradient, result.x)
    if gap > (ROUGH_TOLERANCE * max(1.0, abs(lost)) if tolerance is None else tolerance):
        raise ArithmeticError(
            f"the rule found may be short of the best by {gap:.3g}: {result.message}"
        )
    return Solution(result.x, -lost, gap)


def _largest_gain(form: Form, gradient: np.ndarray, c: np.ndarray) -> float:
    """What a concave objective can gain at most: by its tangent, anywhere in the constraints."""
    from scipy.optimize import linprog

    steepest = float(np.abs(gradient).max())
    if steepest == 0:
        return 0.0
    result = linprog(
        -gradient / steepest,  # or a gradient near 0 drowns in the programme's tolerances
        A_ub=np.concatenate([form.matrix, -form.matrix]),
        b_ub=np.concatenate([form.high, -form.low]),
        bounds=(None, None),
    )
    if not result.success:
        raise ArithmeticError(f"cannot bound what the best rule gains: {result.message}")
    return float(gradient @ (result.x - c))
