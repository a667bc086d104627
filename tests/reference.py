"""The float64 reference: every backend is tested against it, never against itself.

Written for plainness, not for speed, and by other means than the code that it checks.
"""

import numpy as np
from scipy.optimize import brentq
from scipy.special import entr
from scipy.special import softmax as scipy_softmax

from calibrate.core.rule import RuleForm

BASELINE = RuleForm()


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


def inverse_temperature(H, coefficients, domain, rule=BASELINE, n=None):
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
        if rule.min_entropy > 0 and entropy <= rule.min_entropy:
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

    if rule.kind == "constant":
        return np.full(np.shape(H), guarded(coefficients[0]))
    if rule.kind == "log-size":
        return np.asarray(np.vectorize(beta_by_size, otypes=[float])(n))
    return np.asarray(np.vectorize(beta_by_entropy, otypes=[float])(H, 1 if n is None else n))


def adaptive_softmax(logits, coefficients, domain, rule=BASELINE, axis=-1, where=None):
    """softmax(beta z), with beta by the entropy of softmax(z) and the number of its items.

    An item more than 9,000 below the highest logit is none of them.
    """
    H = entropy(logits, axis, where, keepdims=True)
    z = _masked(logits, where)
    n = (z >= z.max(axis=axis, keepdims=True) - 9_000).sum(axis=axis, keepdims=True)
    beta = inverse_temperature(H, coefficients, domain, rule, np.maximum(n, 1))
    return softmax(logits, axis, where, beta=beta)


def expected_excess(beta, logits, target):
    """E_beta[z] - z_t of one row: rises with beta and is 0 at the optimal beta."""
    u = np.asarray(logits, np.float64) - np.float64(logits[target])
    u = u[u > -np.inf]
    return float(scipy_softmax(beta * u) @ u)


def optimal_beta(logits, target):
    """The root of E_beta[z] = z_t of one row by Brent's method; 0 if flat, inf if sharp."""
    u = np.asarray(logits, np.float64) - np.float64(logits[target])
    u = u[u > -np.inf]
    if u.max() == 0 and u.mean() < 0:
        return np.inf
    if u.mean() >= 0:
        return 0.0
    high = 1.0 / np.ptp(u)
    while expected_excess(high, logits, target) < 0:
        high *= 2
    return brentq(expected_excess, 0, high, (logits, target), xtol=1e-300, rtol=1e-15)
