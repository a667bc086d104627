"""The beta rule: inverse temperature as a guarded polynomial of entropy."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """The guards around the polynomial; all entropies in nats."""

    min_entropy: float = 0.5  # at or below it, beta is 1
    min_beta: float = 1.0
    max_beta: float = 64.0
    outside: str = "clamp"  # what happens outside the domain: "clamp" H to it, or "identity"


def horner(H: Any, coefficients: Sequence[Any]) -> Any:
    """p(H), highest power first; any array type with arithmetic, in its own precision."""
    value = H * 0 + coefficients[0]
    for coefficient in coefficients[1:]:
        value = value * H + coefficient
    return value


def beta_of_entropy(
    H: Any, coefficients: Sequence[Any], domain: tuple[Any, Any], rule: Rule, xp: Any
) -> Any:
    """beta(H) = clip(p(clip(H, lo, hi)), min_beta, max_beta), and 1 where the rule is off.

    It is off where H <= min_entropy (strict gate on the raw H, as in the paper) and, if `outside`
    is "identity", where H lies outside [lo, hi].

    Args:
      H: array, entropy in nats; at least float32, or the polynomial's terms cancel to noise.
      coefficients: of the polynomial, highest power first; numbers, or arrays that broadcast to H.
      domain: (lo, hi), the entropies that the polynomial was fitted on; likewise.
      rule: the guards.
      xp: the array's namespace, numpy or jax.numpy.
    Returns:
      beta, of H's shape and dtype.
    """
    lo, hi = domain
    beta = xp.clip(horner(xp.clip(H, lo, hi), coefficients), rule.min_beta, rule.max_beta)
    off = rule.min_entropy >= H
    if rule.outside == "identity":
        off = off | (lo > H) | (hi < H)
    return xp.where(off, xp.ones_like(beta), beta)
