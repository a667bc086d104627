"""The rule of a fit: as text, as facts, and as curves of beta over entropy or set size."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from calibrate.core.rule import CONSTANT, TERMS, RuleForm, constant_text, formula
from calibrate.evidence.estimate import decimal
from calibrate.evidence.evidence import OptionalHeadId
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

N_SIZES = 5  # curves between the smallest and the largest set size of a domain
BEYOND = 4  # times the largest set size: the size of one more curve
CURVE_POINTS = 201


def rule_facts(fit: Fit) -> Iterable[tuple[str, str]]:
    """(label, text) of the rule of the only entry, or of the parts that several entries share."""
    rule, others = fit.rule, fit.entries[1:]
    yield "kind", rule.kind
    if not others:
        yield beta_fact(fit)
    elif rule.kind == CONSTANT:
        yield "beta", "a constant for each head"
    else:
        yield f"beta({symbols(rule)})", "coefficients of its own for each head"
    if rule.kind == CONSTANT:
        return
    yield "domain", domain_text(joint_domain(fit.entries), rule)
    yield "outside", outside_text(rule)
    yield "bounds", bounds_text(rule)
    yield from _smoothing_facts(fit)


def beta_fact(fit: Fit) -> tuple[str, str]:
    """(label, text) of the formula of the first entry."""
    rule, coefficients = fit.rule, fit.entries[0].coefficients
    if rule.kind == CONSTANT:
        return "beta", constant_text(coefficients[0])
    return f"beta({symbols(rule)}) = 1/theta", formula(rule.kind, coefficients)


def _smoothing_facts(fit: Fit) -> Iterable[tuple[str, str]]:
    """(label, text) of the penalty, the degrees of freedom and the R^2 of a fit of one head."""
    heads = fit.evidence.get("heads", [])
    if len(heads) != 1:
        return
    (head,) = heads
    if head.get("penalty") is not None:
        is_constant = head["penalty"] == "infinite"
        yield "penalty lambda", "infinite: a constant" if is_constant else f"{head['penalty']:g}"
    if fit.effective_degrees is not None:
        degrees = f"{fit.effective_degrees:.1f} of {len(TERMS[fit.rule.kind])}"
        yield "effective degrees of freedom", degrees
    if fit.r_squared is not None:
        yield "R^2 of log beta", r_squared_text(fit.r_squared)


def r_squared_text(r_squared: float) -> str:
    """The R^2 of log beta on the inputs of the fit, and its meaning."""
    share = decimal(100 * r_squared, ".0f")
    text = f"the rule explains {share} % of the variance of the optimal log beta"
    if share == "0":
        text = "a constant describes the optimal log beta as well as the rule"
    elif r_squared < 0:
        text = "a constant describes the optimal log beta better than the rule"
    inputs = "among misranked inputs of the fit (in sample)"
    return f"{decimal(r_squared, '.2f')}: {inputs}, {text}"


def symbols(rule: RuleForm) -> str:
    """The symbols of what beta is a function of: "H", "n" or "H, n"."""
    return ", ".join(["H"] * rule.by_entropy + ["n"] * rule.by_size)


def domain_text(domain: Sequence[float], rule: RuleForm) -> str:
    """The entropies and set sizes of the inputs that a rule was fitted to.

    "every input" of a constant, which has no domain.
    """
    if not domain:
        return "every input"
    if rule.depends_on_both:
        lo, hi, small, large = domain
        # The entropy of n items is at most log n.
        ranges = f"{_entropies(lo, min(hi, large))} and sets of {_sizes(small, large)}"
        return f"{ranges}: entropies H and sizes n of the inputs of the fit"
    if rule.by_size:
        return f"{_sizes(*domain)}: sizes n of the inputs of the fit"
    return f"{_entropies(*domain)}: entropies H of the inputs of the fit"


def _entropies(lo: float, hi: float) -> str:
    return f"{round(lo, 4):.4g} .. {hi:.4g} nats"


def _sizes(lo: float, hi: float) -> str:
    """A range of set sizes, given the logarithms of its ends."""
    return f"{_items(lo)} .. {_items(hi)} items"


def _items(log_n: float) -> str:
    """A set size in words, given its logarithm."""
    n = math.exp(log_n)
    return f"{n:,.0f}" if n < 1e9 else f"{n:.3g}"


def outside_text(rule: RuleForm) -> str:
    """Describes a rule outside its domain."""
    if rule.depends_on_both:
        return (
            "H is clamped to the domain; at other sizes, a beta that rises with log n is "
            "extrapolated, and one that falls is held constant"
        )
    if not rule.by_entropy:
        return "a line that rises is extrapolated, and one that falls is held constant"
    return "H is clamped to the domain" if rule.outside == "clamp" else "beta is 1 outside it"


def bounds_text(rule: RuleForm) -> str:
    """Describes the bounds of beta, and the entropies at which it is 1."""
    bounds = f"{bound_text(rule.min_beta)} <= beta <= {bound_text(rule.max_beta)}"
    if not rule.min_entropy:
        return bounds
    return f"beta = 1 up to H = {rule.min_entropy:g} nats; above, {bounds}"


def bound_text(beta: float) -> str:
    """A bound of beta, or a tick of its axis: "64", "1/1024" where that is shorter."""
    inverse = 1 / beta
    return f"1/{inverse:g}" if beta < 1 and inverse == round(inverse) else f"{beta:g}"


def value_text(value: Any) -> str:
    """A JSON value as printable text, numbers with six digits."""
    if value is None:
        return "absent or null"
    if isinstance(value, list):
        return ", ".join(map(value_text, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    printable = isinstance(value, str) and value.isprintable()
    return value if printable else json.dumps(value)


class SizeCurve(NamedTuple):
    """beta of sets of one size, over the entropies that such sets can have."""

    size: int
    entropy: np.ndarray  # (points,) nats, up to log n
    beta: np.ndarray  # (points,)
    inside: np.ndarray  # (points,) bool: in the domain's entropies
    beyond: bool  # True of a size larger than those of the domain


def rule_curve(fit: Fit, entry: Entry, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(entropies or sizes, beta) of one entry of a rule of one variable.

    Args:
      fit: has the rule.
      entry: of the fit.
      x: (points,) entropies, or logarithms of sizes for a rule of size.
    """
    return np.exp(x) if fit.rule.by_size else x, entry.beta_at(x, x, fit.rule)


def size_curves(fit: Fit, entry: Entry) -> list[SizeCurve]:
    """Curves of one entry of a rule of entropy and size: for sizes of its domain, and one beyond.

    A set of one item always has entropy 0, and no curve.
    """
    lo, hi, small, large = entry.domain
    sizes = np.exp([*np.linspace(small, large, N_SIZES), large + math.log(BEYOND)])
    curves = []
    for n in sorted({round(float(size)) for size in sizes} - {1}):
        H = np.linspace(0, math.log(n), CURVE_POINTS)
        beta = entry.beta_at(H, np.full(CURVE_POINTS, math.log(n)), fit.rule)
        curves.append(SizeCurve(n, H, beta, (lo <= H) & (hi >= H), n > 2 * math.exp(large)))
    return curves


def beta_range(fit: Fit, entry: Entry) -> tuple[float, float]:
    """The least and greatest beta of one entry over its domain."""
    if fit.rule.depends_on_both:
        curves = size_curves(fit, entry)
        beta = np.concatenate([c.beta[c.inside] for c in curves if not c.beyond])
    else:
        lo, hi = entry.domain or (0.0, 1.0)  # a constant has none
        _, beta = rule_curve(fit, entry, np.linspace(lo, hi, CURVE_POINTS))
    return float(beta.min()), float(beta.max())


def entry_heading(fit: Fit) -> str:
    """The heading of a column of `entry_text`."""
    return "beta" if fit.ignores_inputs else f"beta({symbols(fit.rule)})"


def entry_text(fit: Fit, entry: Entry | None) -> str:
    """The rule of a head in a table: beta, its range, or the formula of a rule of size."""
    if entry is None:
        return "1"
    if not (fit.ignores_inputs or fit.rule.by_entropy):
        return formula(fit.rule.kind, entry.coefficients)
    least, most = beta_range(fit, entry)
    is_constant = entry.constant_beta(fit.rule) is not None
    return f"{most:.2f}" if is_constant else f"{least:.2f} to {most:.2f}"


def typical_betas(
    fit: Fit, heads: Iterable[OptionalHeadId], n: float | None = None
) -> dict[OptionalHeadId, float | None]:
    """beta of each head at one n and entropy; None where it has no rule.

    The entropy is half of the highest that n items can have; of a rule of entropy alone, the middle
    of its domain.

    Args:
      fit: with entries for layers or heads.
      heads: by (layer, head).
      n: items; None is the largest number that the fit was fitted to.
    """
    domain = joint_domain(fit.entries) or (0.0, 1.0)  # constants have none
    log_n = np.asarray(domain[-1] if n is None else np.log(n))
    H = log_n / 2 if fit.rule.by_size else np.asarray(sum(domain[:2]) / 2)
    entries = {head: fit.entry_of(*head) for head in heads}
    return {
        head: None if entry is None else float(entry.beta_at(H, log_n, fit.rule))
        for head, entry in entries.items()
    }


def joint_domain(entries: Sequence[Entry]) -> tuple[float, ...]:
    """The range that the domains of several entries span, in each variable; () of constants."""
    ends = zip(*(entry.domain for entry in entries), strict=True)
    return tuple(max(column) if i % 2 else min(column) for i, column in enumerate(ends))
