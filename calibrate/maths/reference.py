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


def optimal_beta(logits: np.ndarray, target: int | np.ndarray) -> float:
    """The root of E_beta[z] = z_t of one row by bisection; 0 if flat, inf if sharp.

    Of a set of targets, (n,) bool: where their log odds are greatest, by a dense grid.
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


def log_odds(beta: ArrayLike, logits: ArrayLike, target: np.ndarray) -> np.ndarray:
    """log of the mass of the targets of one row over that of the others, at each beta (betas,)."""
    z, betas = np.asarray(logits, np.float64), np.asarray(beta, np.float64)

    def log_sum(z: np.ndarray) -> np.ndarray:
        powers = np.exp(betas[:, None] * (z - z.max()))
        return np.asarray(betas * z.max() + np.log(powers.sum(axis=1)))

    return np.asarray(log_sum(z[target]) - log_sum(z[~target]))


def _optimal_beta_of_set(logits: np.ndarray, target: np.ndarray) -> float:
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
