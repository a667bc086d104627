"""Adaptive softmax in float64, right, or with the mistakes that people make, made on purpose.

    p = softmax(z),  H = -sum p log p,  beta = clip(polynomial(H)),  softmax(beta z)

Each mistake changes one of these steps. A function under test whose probabilities agree with those
of a mistake has this mistake.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from calibrate.conformance.vectors import VectorRow
from calibrate.core.rule import RuleForm, beta_of
from calibrate.store.fit import Fit

REVERSED = "reversed-coefficients"
THETA = "theta-for-beta"
BITS = "entropy-in-bits"
MASKED = "entropy-of-masked-items"
SHARPENED = "entropy-of-sharpened"
NO_FLOOR = "no-floor"
NO_THRESHOLD = "no-threshold"
LOG_EPSILON = "log-epsilon"
ZERO_LOG_ZERO = "zero-log-zero"
PLAIN = "plain-softmax"
TWICE = "scaled-twice"
WRONG_AXIS = "wrong-axis"
DIFFERS = "differs"

REMEDIES = {
    REVERSED: "the coefficients are evaluated in reverse order: the first is that of H^4, as "
    "numpy.polyval takes them",
    THETA: "the polynomial gives beta = 1/theta, and the logits are divided by it: multiply them",
    BITS: "the entropy is in bits: use the natural logarithm",
    MASKED: "masked items count in the entropy, or in n: mask the logits before the first softmax",
    SHARPENED: "the entropy is that of sharpened weights: compute it from softmax(z), once",
    NO_FLOOR: "beta falls below its lower bound: write max(beta, 1), or the fit's min_beta",
    NO_THRESHOLD: "beta is not 1 at low entropy: use 1 where H is at most the fit's min_entropy",
    LOG_EPSILON: "an epsilon in log(p + eps) changes the entropy: use 0 where p is 0, as "
    "scipy.special.entr",
    ZERO_LOG_ZERO: "0 log 0 makes the entropy NaN where a weight is 0, as that of a masked item: "
    "use 0 where p is 0, as scipy.special.entr",
    PLAIN: "the result is softmax(z): the adaptive function is never called, or its beta is 1",
    TWICE: "the logits are multiplied by beta twice",
    WRONG_AXIS: "a batch gives another result than its rows one by one: softmax and entropy go "
    "along the last axis, with keepdims",
    DIFFERS: "no common mistake explains the difference: compare H and beta of the row below; the "
    "entropy may be in 16-bit precision, or the bounds of beta may be others",
}
# The mistakes that are tried, alone and together.
COMBINED = (
    *(REVERSED, THETA, BITS, MASKED, SHARPENED, NO_FLOOR, NO_THRESHOLD, TWICE),
    *(ZERO_LOG_ZERO, LOG_EPSILON),
)
EPSILONS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8)


class RowBeta(NamedTuple):
    """The quantities of one row on the way to its probabilities."""

    entropy: float  # nats
    n: int
    beta: float
    probabilities: np.ndarray


def softmax(logits: np.ndarray, real: np.ndarray) -> np.ndarray:
    """softmax over real items in float64; 0 for the others, and for all where none is real."""
    if not real.any():
        return np.zeros(len(logits))
    z = np.where(real, logits.astype(float), -np.inf)
    weights = np.exp(z - z.max())
    return np.asarray(weights / weights.sum())


def entropy(probabilities: np.ndarray, epsilon: float = 0.0) -> float:
    """-sum p log(p + epsilon) in nats."""
    p = probabilities[probabilities > 0]
    return float(-(p * np.log(p + epsilon)).sum())


def has_zero_weight(row: VectorRow) -> bool:
    """True if an item has the weight 0 in float32."""
    weights = softmax(row.logits, row.logits > -np.inf).astype(np.float32)
    return bool((weights == 0).any())


def mistaken_row(
    row: VectorRow,
    fit: Fit,
    mistakes: Collection[str] = (),
    epsilon: float = EPSILONS[0],
) -> RowBeta:
    """One row by a fit, with mistakes; without any, as it should be.

    Args:
      fit: with one entry for all heads.
      epsilon: of the mistake "log-epsilon".
    """
    real = row.real
    counted = row.logits > -np.inf if MASKED in mistakes else real
    z = np.where(counted, row.logits.astype(float), 0)
    p = softmax(z, counted)
    n = len(z) if MASKED in mistakes else int(real.sum())
    rule, domain = _guards(fit, mistakes)
    coefficients = fit.entries[0].coefficients[:: -1 if REVERSED in mistakes else 1]

    def beta_at(p: np.ndarray) -> tuple[float, float]:
        H = entropy(p, epsilon if LOG_EPSILON in mistakes else 0.0)
        H = H / np.log(2) if BITS in mistakes else H
        log_n = np.log(max(n, 1))
        beta = beta_of(np.asarray(H), np.asarray(log_n), coefficients, domain, rule, np)
        return H, float(beta)

    H, beta = beta_at(p)
    if SHARPENED in mistakes:
        H, beta = beta_at(softmax(beta * z, counted))
    if ZERO_LOG_ZERO in mistakes and has_zero_weight(row):
        beta = 1.0  # where(H > threshold, ...) of NaN
    beta = 1 / beta if THETA in mistakes and beta else beta
    beta = beta**2 if TWICE in mistakes else beta
    beta = 1.0 if PLAIN in mistakes else beta
    return RowBeta(H, n, beta, softmax(beta * z, real))


def _guards(fit: Fit, mistakes: Collection[str]) -> tuple[RuleForm, tuple[float, ...]]:
    """The rule and the domain that act on beta.

    Pasted code of the published polynomial has no domain, which changes nothing where it is right:
    beyond the domain the polynomial is below 1. So a mistake leaves the domain of a fit that is off
    outside ("identity") out, too.
    """
    rule, domain = fit.rule, fit.entries[0].domain
    if mistakes and rule.outside == "identity":
        rule, domain = rule._replace(outside="clamp"), (-np.inf, np.inf) * (len(domain) // 2)
    if NO_FLOOR in mistakes:
        rule = rule._replace(min_beta=-np.inf)
    if NO_THRESHOLD in mistakes:
        rule = rule._replace(min_entropy=0.0)
    return rule, domain
