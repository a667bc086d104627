"""The rules: inverse temperature beta as a function of the entropy H, of L = log n, or of both.

A rule is a sum of the TERMS of its kind, times coefficients in this order. The terms of
"entropy-and-size" include those of all other kinds; so a line in the commitment L - H is one of its
rules. `beta_of` is the equation.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from calibrate.defaults import MIN_ENTROPY

CONSTANT = "constant"
LOG_SIZE = "log-size"
POLYNOMIAL = "polynomial"
ENTROPY_AND_SIZE = "entropy-and-size"
N_POWERS = 5  # coefficients of a polynomial of the entropy
DEGREE = N_POWERS - 1
TERMS = {  # by kind, simplest kind first
    CONSTANT: ("1",),
    LOG_SIZE: ("L", "1"),
    POLYNOMIAL: ("H^4", "H^3", "H^2", "H", "1"),
    ENTROPY_AND_SIZE: ("H^4", "H^3", "H^2", "H", "1", "H L", "L^2", "L"),
}
KINDS = tuple(TERMS)
VARIABLES = {  # on which beta depends, by kind
    CONSTANT: (),
    LOG_SIZE: ("L",),
    POLYNOMIAL: ("H",),
    ENTROPY_AND_SIZE: ("H", "L"),
}
N_COEFFICIENTS = {kind: len(terms) for kind, terms in TERMS.items()}
N_DOMAIN = {kind: 2 * len(variables) for kind, variables in VARIABLES.items()}  # lo, hi of each


class RuleForm(NamedTuple):
    """The form of a rule: its kind and its guards, without coefficients.

    Attributes:
      min_entropy: nats, at or below which beta is 1; 0 is no threshold.
      min_beta, max_beta: bounds of beta.
      outside: of the domain of H, "clamp" evaluates the rule at its end, "identity" sets beta to 1.
      kind: one of KINDS.
    """

    min_entropy: float = MIN_ENTROPY
    min_beta: float = 1.0
    max_beta: float = 64.0
    outside: str = "clamp"
    kind: str = POLYNOMIAL

    @classmethod
    def constant(cls, min_beta: float = 1.0, max_beta: float = 64.0) -> "RuleForm":
        """The guards of a constant, which has neither a threshold nor a domain."""
        return cls(0.0, min_beta, max_beta, "clamp", CONSTANT)

    @classmethod
    def log_size(cls, min_beta: float = 1.0, max_beta: float = 64.0) -> "RuleForm":
        """The guards of a line in log n, which has no entropy threshold."""
        return cls(0.0, min_beta, max_beta, "clamp", LOG_SIZE)

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest beta."""
        return self.min_beta, self.max_beta

    @property
    def by_entropy(self) -> bool:
        """True if beta depends on the entropy."""
        return "H" in VARIABLES[self.kind]

    @property
    def by_size(self) -> bool:
        """True if beta depends on the number of items."""
        return "L" in VARIABLES[self.kind]

    @property
    def depends_on_both(self) -> bool:
        """True if beta depends on the entropy and on the number of items."""
        return self.by_entropy and self.by_size


class Sharing(StrEnum):
    """The heads of a model that share one rule; the values are the names in files and tables."""

    GLOBAL = "all heads alike"
    PER_LAYER = "each layer"
    PER_HEAD = "each head"

    def columns(self, heads: Sequence[tuple[int, int]]) -> list[int]:
        """The index of the rule of each (layer, head), in an array of the distinct rules."""
        if self is Sharing.GLOBAL:
            return [0] * len(heads)
        if self is Sharing.PER_HEAD:
            return list(range(len(heads)))
        layers = sorted({layer for layer, _ in heads})
        return [layers.index(layer) for layer, _ in heads]


def exponents(term: str) -> tuple[int, int]:
    """The powers of H and of L in one of TERMS: (0, 0) for "1", (1, 1) for "H L"."""
    powers = {"H": 0, "L": 0, "1": 0}
    for factor in term.split():
        variable, _, power = factor.partition("^")
        powers[variable] = int(power or 1)
    return powers["H"], powers["L"]


def constant_text(beta: float) -> str:
    """A constant beta with its temperature: "2.3 (theta = 0.435)"."""
    return f"{beta:.6g} (theta = {1 / beta:.3g})"


def term_text(term: str) -> str:
    """One of TERMS as text: "H log n"."""
    return term.replace("L^2", "(log n)^2").replace("L", "log n")


def formula(kind: str, coefficients: Sequence[float]) -> str:
    """A rule without its guards as text, such as "0.5 H^2 - 1.2"; omits terms of coefficient 0."""
    terms = []
    for number, term in zip(coefficients, TERMS[kind], strict=True):
        if number:
            terms.append(f"{number:+.6g}" + (f" {term_text(term)}" if term != "1" else ""))
    text = " ".join(terms).replace(" +", " + ").replace(" -", " - ")
    return text.removeprefix("+") or "0"


def horner(x: Any, coefficients: Sequence[Any]) -> Any:
    """p(x) of degree 1 or more, coefficients highest power first, in the precision of x."""
    value = coefficients[0]
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def surface(H: Any, log_n: Any, coefficients: Sequence[Any]) -> Any:
    """A rule of entropy and size without its guards, at any H and log n."""
    *powers, slope, level, both, square, line = coefficients
    level = level + log_n * (line + square * log_n)
    return horner(H, (*powers, slope + both * log_n, level))


def bare_value(x: Sequence[Any], coefficients: Sequence[Any], kind: str) -> Any:
    """A rule without its guards at a point x of its variables: (), (H,), (log n,) or (H, log n)."""
    if kind == CONSTANT:
        return coefficients[0]
    if kind == ENTROPY_AND_SIZE:
        return surface(x[0], x[1], coefficients)
    return horner(x[0], coefficients)


def beta_of(
    H: Any, log_n: Any, coefficients: Sequence[Any], domain: Sequence[Any], rule: RuleForm, xp: Any
) -> Any:
    """beta of rows with entropy H and n unmasked items.

    "constant": clip(b, min_beta, max_beta).

    "polynomial": clip(p(clip(H, lo, hi)), min_beta, max_beta), and 1 where the rule is off: where
    H <= min_entropy if min_entropy > 0 (the raw H, threshold included, as in the paper), and where
    H is outside of [lo, hi] if `outside` is "identity". A min_entropy of 0 is no threshold, since H
    rounds to 0 once the weights of all other items underflow.

    "log-size": clip(kappa log n + b, min_beta, max_beta). Outside of [lo, hi], a rising line goes
    on and a falling one keeps its value at the end: extrapolation never lowers beta.

    "entropy-and-size": in H like the polynomial, without "identity". Beyond its range of log n it
    goes on with the slope at the end of the range, if that rises; else it keeps the value there.
    The slope depends on H.

    Args:
      H: array of entropies in nats, float32 or wider, or the polynomial's terms cancel to noise;
        None for "log-size" and "constant".
      log_n: array, likewise; one number for all rows of "entropy-and-size" is quicker. None for
        "polynomial" and "constant".
      coefficients: in the order of TERMS; numbers, or arrays that broadcast.
      domain: numbers or arrays as coefficients: [lo, hi] of the entropy, of log n, or of both in
        this order; empty for "constant".
      rule: the kind and the guards.
      xp: the namespace of the arrays: numpy, jax.numpy, torch, or `Nodes` of export/onnx_arrays.py.
        Only `+ - * < > >= & |`, `.clip`, `xp.clip` and `xp.where` may be used, so that a rule
        writes itself into a graph.
    Returns:
      beta, of the shape and dtype of H or log n; of "constant", of its coefficient.
    """
    if rule.kind == CONSTANT:
        return xp.clip(coefficients[0], rule.min_beta, rule.max_beta)
    lo, hi = domain[:2]
    if rule.kind == LOG_SIZE:
        kappa, _ = coefficients
        inside = log_n.clip(lo, hi)
        line = horner(inside, coefficients) + (kappa > 0) * kappa * (log_n - inside)
        return line.clip(rule.min_beta, rule.max_beta)
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
        outside = (lo > H) | (hi < H)
        off = outside if off is None else off | outside
    return beta if off is None else xp.where(off, 1.0, beta)


def slope_of(
    H: Any,
    log_n: Any,
    beta: Any,
    coefficients: Sequence[Any],
    domain: Sequence[Any],
    rule: RuleForm,
    xp: Any,
) -> Any:
    """d beta / dH, where beta is that of `beta_of`, for a rule that depends on the entropy.

    0 where the rule is off, and where beta or H is at a bound.
    """
    c4, c3, c2, c1 = coefficients[:DEGREE]
    extra = None
    if rule.kind == ENTROPY_AND_SIZE:
        both = coefficients[N_POWERS]
        within, may_be_beyond = _size_within(log_n, domain, xp)
        c1 = c1 + both * within
        extra = both * (log_n - within) if may_be_beyond else None
    slope = horner(H, (4 * c4, 3 * c3, 2 * c2, c1))
    if extra is not None:
        slope = xp.where(_rise(H, within, coefficients) > 0, slope + extra, slope)
    lo, hi = domain[:2]
    moves = (lo < H) & (hi > H) & (beta > rule.min_beta) & (beta < rule.max_beta)
    off = _below_threshold(H, rule)
    return xp.where(moves if off is None else moves & ~off, slope, 0.0)


def _below_threshold(H: Any, rule: RuleForm) -> Any:
    """True where the entropy threshold sets beta to 1, of the shape of H; None without a threshold.

    min_entropy may be an array, of heads or as an input of a compiled program; 0 is no threshold.
    """
    least = rule.min_entropy
    if isinstance(least, float | int):
        return least >= H if least > 0 else None
    return (least > 0) & (least >= H)


def _size_within(log_n: Any, domain: Sequence[Any], xp: Any) -> tuple[Any, bool]:
    """log n clipped to the domain of a rule, and False if that is known to change nothing."""
    small, large = domain[2:4]
    if all(isinstance(x, float) for x in (log_n, small, large)):
        within = min(max(log_n, small), large)
        return within, log_n != within
    return xp.clip(log_n, small, large), True


def _rise(H: Any, log_n: Any, coefficients: Sequence[Any]) -> Any:
    """The slope of `surface` in log n."""
    both, square, line = coefficients[N_POWERS:]
    return both * H + (line + 2 * square * log_n)
