"""The optimal beta in float64, by bisection and by dense grids: the solver is tested against it."""

import numpy as np

from calibrate.maths.reference import expected_excess


def optimal_beta(logits, target):
    """The root of E_beta[z] = z_t of one row by bisection; 0 if flat, inf if sharp.

    For a set of targets, (n,) bool: where their log odds are greatest, by a dense grid.
    """
    if isinstance(target, np.ndarray) and target.ndim:
        return _optimal_beta_of_set(logits, target)
    t = int(target)
    u = np.asarray(logits, np.float64) - np.float64(logits[t])
    u = u[u > -np.inf]
    if u.max() == 0 and u.mean() < 0:
        return np.inf
    if u.mean() >= 0:
        return 0.0
    lo, hi = 0.0, 1.0 / (u.max() - u.min())
    while expected_excess(hi, logits, t) < 0:
        lo, hi = hi, 2 * hi
    for _ in range(200):
        middle = (lo + hi) / 2
        if expected_excess(middle, logits, t) < 0:
            lo = middle
        else:
            hi = middle
    return float((lo + hi) / 2)


def log_odds(beta, logits, target):
    """log of the mass of the targets of one row over that of the others, at each beta (betas,)."""
    z, betas = np.asarray(logits, np.float64), np.asarray(beta, np.float64)

    def log_sum(z):
        powers = np.exp(betas[:, None] * (z - z.max()))
        return np.asarray(betas * z.max() + np.log(powers.sum(axis=1)))

    return np.asarray(log_sum(z[target]) - log_sum(z[~target]))


def _optimal_beta_of_set(logits, target):
    """The best of 0, infinity, and every peak of a dense grid, zoomed into; ties go in this order.

    A peak counts if it is above both ends by more than rounding.
    """
    real = np.asarray(logits) != -np.inf
    z, target = np.asarray(logits, np.float64)[real], np.asarray(target)[real]
    z = z - z.max()
    if target.all() or z.min() == 0:
        return 0.0
    betas = np.geomspace(1e-4, 1e6, 2000) / -z.min()
    odds = log_odds(betas, z, target)
    with np.errstate(divide="ignore"):
        at_zero, at_infinity = (
            np.log(np.sum(target[items])) - np.log(np.sum(~target[items]))
            for items in (z <= 0, z == 0)
        )
    best, highest = (np.inf, at_infinity) if at_infinity > at_zero else (0.0, at_zero)
    highest += 1e-12
    for i in 1 + np.flatnonzero((odds[1:-1] > odds[:-2]) & (odds[1:-1] >= odds[2:])):
        lo, hi = betas[i - 1], betas[i + 1]
        for _ in range(10):
            fine = np.linspace(lo, hi, 21)
            odds_fine = log_odds(fine, z, target)
            top = int(np.argmax(odds_fine))
            lo, hi = fine[max(top - 1, 0)], fine[min(top + 1, 20)]
        if odds_fine[top] > highest:
            best, highest = fine[top], odds_fine[top]
    return float(best)
