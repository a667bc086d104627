"""Rules in words: the polynomial, what it is a function of, its domain and its guards."""

import math

from calibrate.maths.rule import LOG_SIZE, N_COEFFICIENTS, Rule


def polynomial(coefficients: tuple[float, ...]) -> str:
    """p(H), or kappa log n + b, written out with six digits; a constant is that number."""
    if not any(coefficients[:-1]):
        return f"{coefficients[-1]:.6g}"
    x = "log n" if len(coefficients) == N_COEFFICIENTS[LOG_SIZE] else "H"
    terms = []
    for power, value in zip(reversed(range(len(coefficients))), coefficients, strict=True):
        factor = {0: "", 1: f" {x}"}.get(power, f" {x}^{power}")
        terms.append(f"{'-' if value < 0 else '+'} {abs(value):.6g}{factor}")
    return " ".join(terms).removeprefix("+ ").replace("- ", "-", terms[0].startswith("-"))


def variable(rule: Rule) -> str:
    """The variable that beta is a function of."""
    return "set size" if rule.kind == LOG_SIZE else "entropy"


def span(domain: tuple[float, float], kind: str) -> str:
    """A range of entropies, or of set sizes, in words."""
    lo, hi = domain
    if kind == LOG_SIZE:
        return f"{items(lo)} .. {items(hi)} items"
    return f"{lo:.4g} .. {hi:.4g} nats"


def items(log_n: float) -> str:
    """A set size in words, given its logarithm."""
    n = math.exp(log_n)
    return f"{n:,.0f}" if n < 1e9 else f"{n:.3g}"


def outside(rule: Rule) -> str:
    """What happens outside the domain, in words."""
    if rule.kind == LOG_SIZE:
        return "the line goes on outside"
    return "H is clamped to it" if rule.outside == "clamp" else "beta is 1 outside"


def guards(rule: Rule) -> str:
    """The bounds of beta, and where it is 1, in words."""
    if rule.kind == LOG_SIZE:
        return f"{rule.min_beta:g} <= beta <= {rule.max_beta:g} at every set size"
    return (
        f"beta = 1 up to H = {rule.min_entropy:g} nats; "
        f"above, {rule.min_beta:g} <= beta <= {rule.max_beta:g}"
    )
