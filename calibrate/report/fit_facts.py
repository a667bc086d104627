"""Facts about a fit, as its file has them: the rule, the inputs, the source; labels and texts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calibrate.core.rule import CONSTANT, TERMS, Rule, constant_text, formula, term_text
from calibrate.evidence.estimate import decimal
from calibrate.report.rules import guards, joint_domain, outside, span, symbols, value_text
from calibrate.store.fit import Fit


def rule_facts(fit: Fit) -> Iterable[tuple[str, str]]:
    """(label, text) of the rule of the only entry, or of what the rules of several heads share."""
    rule, (first, *others) = fit.rule, fit.entries
    yield "kind", rule.kind
    if rule.kind == CONSTANT:
        constant = constant_text(first.coefficients[0])
        yield "beta", "a constant for each head" if others else constant
        return
    if others:
        yield f"beta({symbols(rule)})", "coefficients of its own for each head"
    else:
        yield f"beta({symbols(rule)}) = 1/theta", formula(rule.kind, first.coefficients)
        yield f"coefficients of {term_names(rule)}", numbers(first.coefficients)
    yield "domain", span(joint_domain(fit.entries), rule)
    yield "outside", outside(rule)
    yield "bounds", guards(rule)
    yield from smoothing_facts(fit)


def term_names(rule: Rule) -> str:
    """The terms of a rule in the order of its coefficients: "H^4, H^3, H^2, H, 1"."""
    return ", ".join(map(term_text, TERMS[rule.kind]))


def numbers(coefficients: Sequence[float]) -> str:
    """Coefficients with six digits, as one would paste them."""
    return ", ".join(f"{c:.6g}" for c in coefficients)


def smoothing_facts(fit: Fit) -> Iterable[tuple[str, str]]:
    """(label, text) of the penalty, the degrees of freedom and the R^2 of a fit of one head."""
    heads = fit.evidence.get("heads", [])
    if len(heads) != 1:
        return
    (head,) = heads
    if head.get("penalty") is not None:
        is_constant = head["penalty"] == "infinite"
        yield "penalty lambda", "infinite: a constant" if is_constant else f"{head['penalty']:g}"
    if fit.effective_degrees is not None:
        n_terms = len(TERMS[fit.rule.kind])
        yield "effective degrees of freedom", f"{fit.effective_degrees:.1f} of {n_terms}"
    if fit.r_squared is not None:
        yield "R^2 of log beta", r_squared_text(fit.r_squared)


def r_squared_text(r_squared: float) -> str:
    """R^2 of log beta, and what it says of the misranked inputs with a finite optimal beta."""
    share = decimal(100 * r_squared, ".0f")
    text = f"the rule explains {share} % of the variance of the optimal log beta"
    if share == "0":
        text = "a constant describes the optimal log beta as well as the rule"
    elif r_squared < 0:
        text = "a constant describes the optimal log beta better than the rule"
    return f"{decimal(r_squared, '.2f')}: among misranked inputs, {text}"


def input_facts(fit: Fit) -> Iterable[tuple[str, str]]:
    """(label, text) of the numbers of inputs that the file has, by class."""
    inputs = fit.evidence.get("inputs", {})
    if not {"seen", "misranked"} <= inputs.keys():
        return
    bad = inputs.get("bad", 0)
    right = inputs["seen"] - inputs["misranked"] - bad
    text = f"{inputs['seen']:,}: {inputs['misranked']:,} misranked, {right:,} ranked right"
    yield "inputs", text + (f", {bad:,} left out (NaN, +inf or a masked target)" if bad else "")
    optima = {key: inputs.get(f"optimum_{key}") for key in ("finite", "infinite", "zero")}
    if None not in optima.values():
        words = {"finite": "finite", "infinite": "at infinity", "zero": "at zero"}
        yield "optimal beta", ", ".join(f"{n:,} {words[key]}" for key, n in optima.items())
    if "fitted" in inputs:
        yield "fitted to", f"{inputs['fitted']:,} inputs"


def source_facts(fit: Fit) -> Iterable[tuple[str, str]]:
    """(label, text) of the source and the provenance that the file has."""
    source, provenance = fit.source, fit.provenance
    for key in ("head", "fingerprint", "collection", "seed", "citation"):
        if key in source:
            yield key, str(source[key])
    if "options" in source:
        yield "options", _pairs({key.replace("_", "-"): x for key, x in source["options"].items()})
    if provenance:
        tools = provenance.get("versions", {}).items()
        versions = ", ".join(f"{tool} {version}" for tool, version in tools)
        yield "made", ", ".join(filter(None, (provenance.get("created"), versions)))


def _pairs(mapping: Mapping[str, Any]) -> str:
    return ", ".join(f"{value_text(key)} {value_text(value)}" for key, value in mapping.items())
