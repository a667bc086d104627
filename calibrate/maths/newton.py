"""Newton's method for maxima within linear constraints, of functions of a few numbers.

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

# Coefficients (m, k) -> values (m,), slopes (m, k) and second derivatives (m, k, k).
Functions = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]


def climb(
    at: Functions, matrix: np.ndarray, least: np.ndarray, starts: np.ndarray, tolerance: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tops that steps from starts lead to, their values, and what the last steps promised.

    All are climbed at once, each by itself: but for rounding, results do not depend on the others.

    Args:
      at: the functions, one for each start.
      matrix, least: matrix @ coefficients >= least, (constraints, k) and (constraints,).
      starts: (m, k), within the constraints.
      tolerance: a step that promises this or less is the last one, and taken without a look.
    """
    c, (value, slope, bend) = starts, at(starts)
    going, promise = np.full(len(c), True), np.zeros(len(c))
    for _ in range(MOST_STEPS):
        step = np.zeros_like(c)
        step[going] = best_steps(slope[going], bend[going], matrix, least - c[going] @ matrix.T)
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


def best_steps(
    slope: np.ndarray, bend: np.ndarray, matrix: np.ndarray, least: np.ndarray
) -> np.ndarray:
    """(m, k): of each d with the largest slope @ d - d @ |bend| @ d / 2 where matrix @ d >= least.

    Args:
      slope, bend, least: (m, k), (m, k, k) and (m, constraints).
    """
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
