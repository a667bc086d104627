"""The beta rules: inverse temperature as a guarded polynomial of entropy, or as a line in log n."""

from collections.abc import Sequence
from typing import Any, NamedTuple

ENTROPY_POLYNOMIAL = "entropy-polynomial"
LOG_SIZE = "log-size"
# What each kind of rule is written in: c4, c3, c2, c1, c0 of p(H); or kappa, b of kappa log n + b.
N_COEFFICIENTS = {ENTROPY_POLYNOMIAL: 5, LOG_SIZE: 2}


class Rule(NamedTuple):
    """The kind of a rule, and the guards around its polynomial; all entropies in nats."""

    min_entropy: float = 0.5  # at or below it, beta is 1
    min_beta: float = 1.0
    max_beta: float = 64.0
    outside: str = "clamp"  # what happens outside the domain: "clamp" H to it, or "identity"
    kind: str = ENTROPY_POLYNOMIAL

    @classmethod
    def log_size(cls, min_beta: float = 1.0, max_beta: float = 64.0) -> "Rule":
        """A rule of kind "log-size", without an entropy gate and without limits of its domain."""
        return cls(0.0, min_beta, max_beta, "clamp", LOG_SIZE)


def horner(x: Any, coefficients: Sequence[Any]) -> Any:
    """p(x), highest power first; any array type with arithmetic, in its own precision.

    Of degree 1 at least.
    """
    value = coefficients[0]
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def beta_of(
    H: Any, log_n: Any, coefficients: Sequence[Any], domain: tuple[Any, Any], rule: Rule, xp: Any
) -> Any:
    """beta of rows with entropy H and n items, by either kind of rule.

    "entropy-polynomial": clip(p(clip(H, lo, hi)), min_beta, max_beta), and 1 where the rule is off.
    It is off where H <= min_entropy (strict gate on the raw H, as in the paper) and, if `outside`
    is "identity", where H lies outside [lo, hi].

    "log-size": clip(kappa log n + b, min_beta, max_beta). Beyond [lo, hi], the log n of the sizes
    that it was fitted on, a line that rises goes on, and one that falls keeps its value at that
    end: extrapolation never takes from beta where sets are larger than any that were seen.

    Args:
      H: array, entropy in nats; at least float32, or the polynomial's terms cancel to noise. Not
        looked at by "log-size".
      log_n: array, natural logarithm of the number of unmasked items; likewise. Looked at by
        "log-size" alone. Callers with one kind of rule may pass the same array for both.
      coefficients: of the polynomial, highest power first; numbers, or arrays that broadcast.
      domain: (lo, hi), the entropies, or log n, that it was fitted on; likewise.
      rule: the kind and the guards.
      xp: the arrays' namespace, numpy or jax.numpy.
    Returns:
      beta, of the shape and dtype of what the rule looks at.
    """
    lo, hi = domain
    if rule.kind == LOG_SIZE:
        kappa, inside = coefficients[-2], xp.clip(log_n, lo, hi)
        line = horner(inside, coefficients) + (kappa > 0) * kappa * (log_n - inside)
        return xp.clip(line, rule.min_beta, rule.max_beta)
    beta = xp.clip(horner(xp.clip(H, lo, hi), coefficients), rule.min_beta, rule.max_beta)
    off = rule.min_entropy >= H
    if rule.outside == "identity":
        off = off | (lo > H) | (hi < H)
    return xp.where(off, xp.ones_like(beta), beta)
