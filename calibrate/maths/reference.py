"""The float64 NumPy reference: every backend is tested against it, never against itself.

Written for plainness, not for speed, and by other means than the code that it checks.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from calibrate.maths.rule import Rule

Axis = int | tuple[int, ...] | None


def _unmasked(logits: ArrayLike, where: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    logits = np.asarray(logits, np.float64)
    real = np.broadcast_to(np.asarray(True if where is None else where, bool), logits.shape)
    return logits, real & (logits != -np.inf)


def _weights(logits: np.ndarray, valid: np.ndarray, beta: ArrayLike, axis: Axis) -> np.ndarray:
    """exp(beta (z - max z)) over the unmasked items, and 0 elsewhere."""
    peak = np.max(logits, axis=axis, keepdims=True, where=valid, initial=-np.inf)
    with np.errstate(over="ignore"):
        shifted = np.where(valid, logits, peak) - np.where(peak == -np.inf, 0.0, peak)
        return np.where(valid, np.exp(beta * np.where(valid, shifted, 0.0)), 0.0)


def softmax(
    logits: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, beta: ArrayLike = 1.0
) -> np.ndarray:
    """p_i = exp(beta z_i) / sum_j exp(beta z_j) over unmasked items; NaN if there is none."""
    logits, valid = _unmasked(logits, where)
    weights = _weights(logits, valid, beta, axis)
    with np.errstate(invalid="ignore"):
        probs = weights / weights.sum(axis=axis, keepdims=True)
    return probs if where is None else np.where(where, probs, 0.0)


def entropy(
    logits: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, keepdims: bool = False
) -> np.ndarray:
    """H = -sum p log p in nats over unmasked items, with 0 log 0 = 0."""
    p = softmax(logits, axis, where)
    terms = np.where(p == 0, 0.0, -p * np.log(np.where(p == 0, 1.0, p)))
    return np.asarray(terms.sum(axis=axis, keepdims=keepdims))


def inverse_temperature(
    H: ArrayLike,
    coefficients: Sequence[float],
    domain: Sequence[float],
    rule: Rule = Rule(),  # noqa: B008 (immutable)
    n: ArrayLike | None = None,
) -> np.ndarray:
    """beta of rows with entropy H and n unmasked items, one by one, in the words of the rule."""

    def beta_by_size(items: float) -> float:
        kappa, b = coefficients
        log_n = np.log(items)
        if kappa < 0:
            log_n = min(max(log_n, domain[0]), domain[1])
        return min(max(float(kappa * log_n + b), rule.min_beta), rule.max_beta)

    def beta_by_entropy(entropy: float) -> float:
        if entropy <= rule.min_entropy:
            return 1.0
        if rule.outside == "identity" and not domain[0] <= entropy <= domain[1]:
            return 1.0
        clamped = min(max(entropy, domain[0]), domain[1])
        return min(max(float(np.polyval(coefficients, clamped)), rule.min_beta), rule.max_beta)

    def beta_by_both(entropy: float, items: float) -> float:
        if entropy <= rule.min_entropy:
            return 1.0
        h, log_n = min(max(entropy, domain[0]), domain[1]), float(np.log(items))
        of_size = np.poly1d([coefficients[6], coefficients[5] * h + coefficients[7], 0.0])
        at = min(max(log_n, domain[2]), domain[3])
        beta = np.polyval(coefficients[:5], h) + of_size(at)
        beta += max(of_size.deriv()(at), 0.0) * (log_n - at)
        return min(max(float(beta), rule.min_beta), rule.max_beta)

    if rule.kind == "entropy-and-size":
        return np.asarray(np.vectorize(beta_by_both, otypes=[np.float64])(H, n))
    if rule.kind == "log-size":
        return np.asarray(np.vectorize(beta_by_size, otypes=[np.float64])(n))
    return np.asarray(np.vectorize(beta_by_entropy, otypes=[np.float64])(H))


def adaptive_softmax(
    logits: ArrayLike,
    coefficients: Sequence[float],
    domain: Sequence[float],
    rule: Rule = Rule(),  # noqa: B008 (immutable)
    axis: Axis = -1,
    where: ArrayLike | None = None,
) -> np.ndarray:
    """softmax(beta z), with beta by the entropy of softmax(z) and the number of its items."""
    H = entropy(logits, axis, where, keepdims=True)
    _, valid = _unmasked(logits, where)
    n = np.maximum(valid.sum(axis=axis, keepdims=True), 1)
    beta = inverse_temperature(H, coefficients, domain, rule, n)
    return softmax(logits, axis, where, beta=beta)


def expected_excess(beta: float, logits: np.ndarray, target: int) -> float:
    """E_beta[z] - z_t of one row: rises with beta and is 0 at the optimal beta."""
    u = np.asarray(logits, np.float64) - np.float64(logits[target])
    u = u[u > -np.inf]
    weights = np.exp(beta * (u - u.max()) if beta > 0 else 0 * u)
    return float(weights @ u / weights.sum())
