"""The rules: inverse temperature beta as a function of entropy, of log n, of both, or a constant.

Coefficients are of TERMS, in this order, with L = log n. "entropy-and-size" contains the other
kinds, and lines in the commitment L - H.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from calibrate.defaults import MIN_ENTROPY

CONSTANT = "constant"
LOG_SIZE = "log-size"
POLYNOMIAL = "polynomial"
ENTROPY_AND_SIZE = "entropy-and-size"
N_POWERS = 5  # coefficients of a polynomial of entropy
DEGREE = N_POWERS - 1
TERMS = {  # by kind, the simplest first
    CONSTANT: ("1",),
    LOG_SIZE: ("L", "1"),
    POLYNOMIAL: ("H^4", "H^3", "H^2", "H", "1"),
    ENTROPY_AND_SIZE: ("H^4", "H^3", "H^2", "H", "1", "H L", "L^2", "L"),
}
KINDS = tuple(TERMS)
VARIABLES = {  # what beta is a function of
    CONSTANT: (),
    LOG_SIZE: ("L",),
    POLYNOMIAL: ("H",),
    ENTROPY_AND_SIZE: ("H", "L"),
}
N_COEFFICIENTS = {kind: len(terms) for kind, terms in TERMS.items()}
N_DOMAIN = {kind: 2 * len(variables) for kind, variables in VARIABLES.items()}  # [lo, hi] of each


class Rule(NamedTuple):
    """The kind of a rule, and the guards around its polynomial; all entropies in nats."""

    min_entropy: float = MIN_ENTROPY  # at or below it, beta is 1; 0 is no threshold
    min_beta: float = 1.0
    max_beta: float = 64.0
    outside: str = "clamp"  # what happens outside the domain: "clamp" H to it, or "identity"
    kind: str = POLYNOMIAL

    @classmethod
    def constant(cls, min_beta: float = 1.0, max_beta: float = 64.0) -> "Rule":
        """A rule of kind "constant", which has neither a threshold nor a domain."""
        return cls(0.0, min_beta, max_beta, "clamp", CONSTANT)

    @classmethod
    def log_size(cls, min_beta: float = 1.0, max_beta: float = 64.0) -> "Rule":
        """A rule of kind "log-size", without an entropy threshold and limits of its domain."""
        return cls(0.0, min_beta, max_beta, "clamp", LOG_SIZE)

    @property
    def by_entropy(self) -> bool:
        """True if beta is a function of entropy, among others."""
        return "H" in VARIABLES[self.kind]

    @property
    def by_size(self) -> bool:
        """True if beta is a function of set size, among others."""
        return "L" in VARIABLES[self.kind]

    @property
    def depends_on_both(self) -> bool:
        """True if beta is a function of entropy and of set size."""
        return self.by_entropy and self.by_size


def exponents(term: str) -> tuple[int, int]:
    """The powers of H and of L in one of TERMS: (0, 0) of "1", (1, 1) of "H L"."""
    powers = {"H": 0, "L": 0, "1": 0}
    for factor in term.split():
        variable, _, power = factor.partition("^")
        powers[variable] = int(power or 1)
    return powers["H"], powers["L"]


def constant_text(beta: float) -> str:
    """A constant beta with its temperature: "2.3 (theta = 0.435)"."""
    return f"{beta:.6g} (theta = {1 / beta:.3g})"


def term_text(term: str) -> str:
    """One of TERMS for people: "H log n"."""
    return term.replace("L^2", "(log n)^2").replace("L", "log n")


def formula(kind: str, coefficients: Sequence[float]) -> str:
    """A rule without its guards, such as "0.5 H^2 - 1.2"; terms of 0 are left out."""
    terms = []
    for number, term in zip(coefficients, TERMS[kind], strict=True):
        if number:
            terms.append(f"{number:+.6g}" + (f" {term_text(term)}" if term != "1" else ""))
    text = " ".join(terms).replace(" +", " + ").replace(" -", " - ")
    return text.removeprefix("+") or "0"


def horner(x: Any, coefficients: Sequence[Any]) -> Any:
    """p(x), highest power first, of degree 1 or more; any array type, in its own precision."""
    value = coefficients[0]
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def surface(H: Any, log_n: Any, coefficients: Sequence[Any]) -> Any:
    """The bare terms of a rule of entropy and size, without guards and at any H and log n."""
    *powers, slope, level, both, square, line = coefficients
    level = level + log_n * (line + square * log_n)
    return horner(H, (*powers, slope + both * log_n, level))


def bare_value(x: Sequence[Any], coefficients: Sequence[Any], kind: str) -> Any:
    """A rule of a kind without its guards at a point: (), (H,), (log n,) or (H, log n)."""
    if kind == CONSTANT:
        return coefficients[0]
    if kind == ENTROPY_AND_SIZE:
        return surface(x[0], x[1], coefficients)
    return horner(x[0], coefficients)


def beta_of(
    H: Any, log_n: Any, coefficients: Sequence[Any], domain: Sequence[Any], rule: Rule, xp: Any
) -> Any:
    """beta of rows with entropy H and n items, by any kind of rule.

    "constant": clip(b, min_beta, max_beta); of the shape of b.

    "polynomial": clip(p(clip(H, lo, hi)), min_beta, max_beta), and 1 where the rule is off.
    It is off where H <= min_entropy (on the raw H, and at the threshold too, as in the paper) if
    min_entropy > 0, and where H lies outside [lo, hi] if `outside` is "identity". A min_entropy of
    0 is no threshold: H rounds to 0 once the weights of all other items underflow.

    "log-size": clip(kappa log n + b, min_beta, max_beta). Beyond [lo, hi], a line that rises goes
    on, and one that falls keeps its value at that end: extrapolation never takes from beta.

    "entropy-and-size": in H like the first, without "identity"; beyond its log n, at each H, like
    the second along its slope in log n at that end.

    Args:
      H: array, entropy in nats; at least float32, or the polynomial's terms cancel to noise. None
        for "log-size" and "constant".
      log_n: array, logarithm of the number of unmasked items; likewise; one number for all rows of
        "entropy-and-size" is quicker. None for "polynomial" and "constant".
      coefficients: in the order above; numbers, or arrays that broadcast.
      domain: [lo, hi] of what it was fitted on, entropy, log n, or both in this order; likewise;
        empty for "constant".
      rule: the kind and the guards.
      xp: the arrays' namespace, numpy or jax.numpy.
    Returns:
      beta, of the shape and dtype of what the rule looks at.
    """
    if rule.kind == CONSTANT:
        return xp.clip(coefficients[0], rule.min_beta, rule.max_beta)
    lo, hi = domain[:2]
    if rule.kind == LOG_SIZE:
        kappa, inside = coefficients[-2], xp.clip(log_n, lo, hi)
        line = horner(inside, coefficients) + (kappa > 0) * kappa * (log_n - inside)
        return xp.clip(line, rule.min_beta, rule.max_beta)
    inside = H.clip(lo, hi)
    if rule.kind == ENTROPY_AND_SIZE:
        within, may_be_beyond = _size_within(log_n, domain, xp)
        value = surface(inside, within, coefficients)
        if may_be_beyond:
            rise = xp.clip(_rise(inside, within, coefficients), 0, None)
            value = value + rise * (log_n - within)
    else:
        value = horner(inside, coefficients)
    beta = value.clip(rule.min_beta, rule.max_beta)
    off = _below_threshold(H, rule)
    if rule.outside == "identity":
        beyond = (lo > H) | (hi < H)
        off = beyond if off is None else off | beyond
    return beta if off is None else xp.where(off, 1.0, beta)


def slope_of(
    H: Any,
    log_n: Any,
    beta: Any,
    coefficients: Sequence[Any],
    domain: Sequence[Any],
    rule: Rule,
    xp: Any,
) -> Any:
    """d beta / dH where beta is what `beta_of` gives, by a rule of entropy, or entropy and size.

    0 where the rule is off, or beta or H are at a limit.
    """
    c4, c3, c2, c1, beyond = *coefficients[:4], None
    if rule.kind == ENTROPY_AND_SIZE:
        both = coefficients[N_POWERS]
        within, may_be_beyond = _size_within(log_n, domain, xp)
        c1 = c1 + both * within
        beyond = both * (log_n - within) if may_be_beyond else None
    slope = horner(H, (4 * c4, 3 * c3, 2 * c2, c1))
    if beyond is not None:
        slope = xp.where(_rise(H, within, coefficients) > 0, slope + beyond, slope)
    lo, hi = domain[:2]
    moves = (lo < H) & (hi > H) & (beta > rule.min_beta) & (beta < rule.max_beta)
    off = _below_threshold(H, rule)
    return xp.where(moves if off is None else moves & ~off, slope, 0.0)


def _below_threshold(H: Any, rule: Rule) -> Any:
    """bool of H's shape: where the entropy threshold sets beta to 1; None if there is none.

    A min_entropy that is an array (of heads, or an input of a compiled program) may hold zeros.
    """
    least = rule.min_entropy
    if isinstance(least, float | int):
        return least >= H if least > 0 else None
    return (least > 0) & (least >= H)


def _size_within(log_n: Any, domain: Sequence[Any], xp: Any) -> tuple[Any, bool]:
    """log n clipped to the sizes that a rule was fitted on, and whether that may differ."""
    small, large = domain[2:4]
    if all(isinstance(x, float) for x in (log_n, small, large)):
        within = min(max(log_n, small), large)
        return within, log_n != within
    return xp.clip(log_n, small, large), True


def _rise(H: Any, log_n: Any, coefficients: Sequence[Any]) -> Any:
    """The slope of `surface` in log n."""
    both, square, line = coefficients[N_POWERS:]
    return both * H + (line + 2 * square * log_n)
