"""The rule of a fit as text: its facts, and the beta of each head."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from calibrate.core.rule import CONSTANT, TERMS, RuleForm, constant_text, formula
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

GRID_POINTS = 101  # in each variable, at which the range of beta is found


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
    return f"beta({symbols(rule)})", formula(rule.kind, coefficients)


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
        share = (
            "the share of the variance of the optimal log beta of misranked inputs that the rule "
            "explains, below 0 if their mean describes it better; no measure of the gain"
        )
        yield "R^2 of log beta", f"{fit.r_squared:.2f}: {share}"


def symbols(rule: RuleForm) -> str:
    """The symbols of what beta is a function of: "H", "n" or "H, n"."""
    return ", ".join(["H"] * rule.by_entropy + ["n"] * rule.by_size)


def domain_text(domain: Sequence[float], rule: RuleForm) -> str:
    """The entropies and set sizes of the domain of a rule, which is no constant."""
    if rule.depends_on_both:
        lo, hi, small, large = domain
        # The entropy of n items is at most log n.
        return f"{_entropies(lo, min(hi, large))} and sets of {_sizes(small, large)}"
    return _sizes(*domain) if rule.by_size else _entropies(*domain)


def _entropies(lo: float, hi: float) -> str:
    return f"{round(lo, 4):.4g} .. {hi:.4g} nats"


def _sizes(lo: float, hi: float) -> str:
    """A range of set sizes, given the logarithms of its ends."""
    return f"{math.exp(lo):,.0f} .. {math.exp(hi):,.0f} items"


def outside_text(rule: RuleForm) -> str:
    """Describes a rule outside its domain."""
    if rule.depends_on_both:
        return (
            "H is clipped to the domain; at other sizes, a beta that rises with log n is "
            "extrapolated, and one that falls is held constant"
        )
    if not rule.by_entropy:
        return "a line that rises is extrapolated, and one that falls is held constant"
    return "H is clipped to the domain" if rule.outside == "clamp" else "beta is 1 outside it"


def bounds_text(rule: RuleForm) -> str:
    """Describes the bounds of beta, and the entropies at which it is 1."""
    bounds = f"{bound_text(rule.min_beta)} <= beta <= {bound_text(rule.max_beta)}"
    if not rule.min_entropy:
        return bounds
    return f"beta = 1 up to H = {rule.min_entropy:g} nats; above, {bounds}"


def bound_text(beta: float) -> str:
    """A bound of beta, or a tick of its axis: "64", "1/1,024" where that is shorter."""
    inverse = 1 / beta
    return f"1/{inverse:,g}" if beta < 1 and inverse == round(inverse) else f"{beta:,g}"


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


def beta_range(fit: Fit, entry: Entry) -> tuple[float, float]:
    """The least and greatest beta of one entry over its domain."""
    domain = entry.domain or (0.0, 1.0)  # a constant has none
    H = log_n = np.linspace(domain[0], domain[1], GRID_POINTS)
    if fit.rule.depends_on_both:
        log_n = np.linspace(domain[2], domain[3], GRID_POINTS)[:, None]
        H, log_n = np.broadcast_arrays(np.minimum(H, log_n), log_n)
    beta = entry.beta_at(H, log_n, fit.rule)
    return float(beta.min()), float(beta.max())


def joint_domain(entries: Sequence[Entry]) -> tuple[float, ...]:
    """The range that the domains of several entries span, in each variable; () of constants."""
    ends = zip(*(entry.domain for entry in entries), strict=True)
    return tuple(max(column) if i % 2 else min(column) for i, column in enumerate(ends))
