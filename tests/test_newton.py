"""Newton's method within linear constraints, against SciPy's solver of the same problems."""

import numpy as np
import pytest
from scipy.optimize import minimize

from calibrate.maths.newton import best_steps, climb

BOX = np.concatenate([np.eye(3), -np.eye(3)])


def bounds(half):
    return np.full(6, -half)


def curved(x, centre):
    """-sum of (x - centre)^2 + (x - centre)^4, and its derivatives."""
    u = x - centre
    return -(u**2 + u**4).sum(-1), -2 * u - 4 * u**3, diagonal(-2 - 12 * u**2)


def diagonal(x):
    return x[..., None] * np.eye(3)


@pytest.mark.parametrize("half", [0.5, 2.0, 50.0])
def test_the_tops_within_bounds(half):
    """Several functions are climbed at once as each is by itself."""
    centre = np.array([[3.0, -1.0, 0.2], [0.0, 0.0, 0.0], [-5.0, 1.0, 0.3]])
    starts = np.zeros((3, 3))
    c, value, promise = climb(lambda x: curved(x, centre), BOX, bounds(half), starts, 1e-13)
    np.testing.assert_allclose(c, np.clip(centre, -half, half), atol=1e-7)
    np.testing.assert_allclose(value, curved(c, centre)[0], rtol=1e-12, atol=1e-12)
    assert (promise <= 1e-13).all()
    for i in range(3):
        own = climb(lambda x, i=i: curved(x, centre[i]), BOX, bounds(half), starts[:1], 1e-13)
        np.testing.assert_allclose(own[0][0], c[i], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_a_step_is_the_best_of_the_parabola(seed):
    rng = np.random.default_rng(seed)
    half = rng.standard_normal((4, 3))
    bend, slope = -half.T @ half, 5 * rng.standard_normal(3)
    matrix = np.concatenate([rng.standard_normal((6, 3)), BOX])
    least = -np.concatenate([rng.uniform(0, 1, 6), np.ones(6)])
    (step,) = best_steps(slope[None], bend[None], matrix, least[None])
    assert (matrix @ step >= least - 1e-9).all()

    def gain(d):
        return slope @ d + d @ bend @ d / 2

    other = minimize(
        lambda d: -gain(d), np.zeros(3), method="SLSQP", options={"ftol": 1e-14},
        constraints={"type": "ineq", "fun": lambda d: matrix @ d - least},
    ).x  # fmt: skip
    assert gain(step) == pytest.approx(gain(other), abs=1e-7)


def test_it_climbs_out_of_a_hollow_and_stops_where_bounds_end_it():
    def hollow(x):
        """Convex along the first axis."""
        slope = np.array([2, -2, -2]) * x
        return (slope * x).sum(-1) / 2, slope, diagonal(np.array([[2, -2, -2]]))

    (c,), (value,), _ = climb(hollow, BOX, bounds(2.0), np.array([[0.1, 1.0, -1.0]]), 1e-12)
    np.testing.assert_allclose(c, [2, 0, 0], atol=1e-6)
    assert value == pytest.approx(4)


def test_a_level_function_is_left_where_it_is():
    def level(x):
        return np.ones(1), np.zeros((1, 3)), np.zeros((1, 3, 3))

    c, value, promise = climb(level, BOX, bounds(1.0), np.full((1, 3), 0.5), 0.0)
    np.testing.assert_array_equal(c, np.full((1, 3), 0.5))
    assert (value, promise) == (1.0, 0.0)
