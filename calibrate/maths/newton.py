"""Newton's method for a maximum within linear constraints, of a function of a few numbers.

Each step is the best one of the parabola at the point, by least distance programming (Lawson and
Hanson, Solving Least Squares Problems, chapter 23). Where the function is not concave, its
curvature counts as if it were, so that every step leads up.
"""

from collections.abc import Callable

import numpy as np

MOST_STEPS = 200
FLAT, FLATTEST = 1e-10, 1e-12  # curvature below this share of the largest, and this, counts as it
RISE = 0.1  # of what the parabola promises at first, that a step has to gain
SHORTEST = 1e-6  # share of a step

# Coefficients (k,) -> value, slope (k,) and second derivatives (k, k).
Function = Callable[[np.ndarray], tuple[float, np.ndarray, np.ndarray]]


def climb(
    at: Function, matrix: np.ndarray, least: np.ndarray, start: np.ndarray, tolerance: float
) -> tuple[np.ndarray, float, float]:
    """The top that steps from a start lead to, its value, and what the last step promised.

    Args:
      at: the function.
      matrix, least: matrix @ coefficients >= least, (constraints, k) and (constraints,).
      start: (k,), within the constraints.
      tolerance: a step that promises this or less is the last one, and taken without a look.
    """
    c, (value, slope, bend) = start, at(start)
    for _ in range(MOST_STEPS):
        step = best_step(slope, bend, matrix, least - matrix @ c)
        promise, share = float(slope @ step), 1.0
        if promise <= tolerance:
            return c + step, value + promise / 2, promise
        new = at(c + step)
        while not new[0] >= value + RISE * share * promise and share > SHORTEST:
            share /= 4
            new = at(c + share * step)
        if not new[0] > value:  # rounding spoils every step
            break
        c, (value, slope, bend) = c + share * step, new
    return c, value, promise


def best_step(
    slope: np.ndarray, bend: np.ndarray, matrix: np.ndarray, least: np.ndarray
) -> np.ndarray:
    """(k,) d with the largest slope @ d - d @ |bend| @ d / 2 where matrix @ d >= least."""
    from scipy.optimize import nnls

    curvature, axes = np.linalg.eigh(bend)
    curvature = np.abs(curvature)
    curvature = np.maximum(curvature, max(FLAT * curvature.max(), FLATTEST))
    whiten = axes / np.sqrt(curvature)  # step = whiten @ x, of which slope @ whiten is the best
    free = slope @ whiten
    sides = matrix @ whiten
    short = least - sides @ free
    y = np.zeros_like(free)
    if (short > 0).any():
        # Of x = free + y the best has the least y where sides @ y >= short.
        both, last = np.vstack([sides.T, short]), np.append(y, 1.0)
        rest = both @ nnls(both, last, maxiter=50 * len(short))[0] - last
        y = -rest[:-1] / rest[-1]
    step: np.ndarray = whiten @ (free + y)
    return step
