"""The float64 reference: every backend is tested against it, never against itself.

Written for plainness, not for speed, and by other means than the code that it checks.
"""

import numpy as np
from scipy.special import entr
from scipy.special import softmax as scipy_softmax

from calibrate.maths.rule import Rule

PLAIN = Rule()


def _masked(logits, where):
    """Logits in float64, -inf where masked."""
    logits = np.asarray(logits, np.float64)
    return logits if where is None else np.where(where, logits, -np.inf)


def softmax(logits, axis=-1, where=None, beta=1.0):
    """p_i = exp(beta z_i) / sum_j exp(beta z_j) over unmasked items; NaN if there is none."""
    z = _masked(logits, where)
    with np.errstate(invalid="ignore", over="ignore"):
        probs = scipy_softmax(beta * z, axis)
    return probs if where is None else np.where(where, probs, 0.0)


def entropy(logits, axis=-1, where=None, keepdims=False):
    """H = -sum p log p in nats over unmasked items, with 0 log 0 = 0."""
    return np.asarray(entr(softmax(logits, axis, where)).sum(axis=axis, keepdims=keepdims))


def inverse_temperature(H, coefficients, domain, rule=PLAIN, n=None):
    """beta of rows with entropy H and n unmasked items, one by one, in the words of the rule."""

    def guarded(beta):
        return min(max(float(beta), rule.min_beta), rule.max_beta)

    def beta_by_size(items):
        kappa, b = coefficients
        log_n = np.log(items)
        if kappa < 0:
            log_n = min(max(log_n, domain[0]), domain[1])
        return guarded(kappa * log_n + b)

    def beta_by_entropy(entropy, items):
        if entropy <= rule.min_entropy:
            return 1.0
        if rule.outside == "identity" and not domain[0] <= entropy <= domain[1]:
            return 1.0
        h = min(max(entropy, domain[0]), domain[1])
        beta = np.polyval(coefficients[:5], h)
        if rule.kind == "entropy-and-size":
            log_n = np.log(items)
            of_size = np.poly1d([coefficients[6], coefficients[5] * h + coefficients[7], 0.0])
            at = min(max(log_n, domain[2]), domain[3])
            beta += of_size(at) + max(of_size.deriv()(at), 0.0) * (log_n - at)
        return guarded(beta)

    if rule.kind == "log-size":
        return np.asarray(np.vectorize(beta_by_size, otypes=[float])(n))
    return np.asarray(np.vectorize(beta_by_entropy, otypes=[float])(H, 1 if n is None else n))


def adaptive_softmax(logits, coefficients, domain, rule=PLAIN, axis=-1, where=None):
    """softmax(beta z), with beta by the entropy of softmax(z) and the number of its items."""
    H = entropy(logits, axis, where, keepdims=True)
    n = (_masked(logits, where) != -np.inf).sum(axis=axis, keepdims=True)
    beta = inverse_temperature(H, coefficients, domain, rule, np.maximum(n, 1))
    return softmax(logits, axis, where, beta=beta)


def expected_excess(beta, logits, target):
    """E_beta[z] - z_t of one row: rises with beta and is 0 at the optimal beta."""
    u = np.asarray(logits, np.float64) - np.float64(logits[target])
    u = u[u > -np.inf]
    return float(scipy_softmax(beta * u) @ u)


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
