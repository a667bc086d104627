"""Names of rules and of kinds of rule for people, and the order in which rules are shown."""

from collections.abc import Mapping

from calibrate.core.rule_kinds import KINDS, SIMPLEST, kind_label
from calibrate.evidence.baselines import (
    EXTRAPOLATED_FROM,
    TRAINED_SIZE,
    chosen_kind,
)
from calibrate.evidence.evidence import OWN
from calibrate.store.coefficients import Coefficients

# The richest kind of one variable first, and those of both last.
_RICHEST_FIRST = list(KINDS.values())[::-1]
_SHOWN_KINDS = sorted(_RICHEST_FIRST, key=lambda kind: kind.depends_on_both)
LABELS = {
    "plain": "baseline",
    "paper": "the paper's published polynomial",
    "rounded": "the same, rounded",
    "procedure": "the paper's procedure, robust",
    "own": "fitted rule",
    "own-512": f"fitted rule, n up to {EXTRAPOLATED_FROM}",
    **{kind.score_name: f"{kind.name} (maximum likelihood)" for kind in _SHOWN_KINDS},
    "log-n": f"log n / log {TRAINED_SIZE}",
    "hard": "argmax",
    "beta-64": "constant, beta = 64",
}


def described(fit: Coefficients) -> str:
    """The rule of a fit in words: "constant, beta = 2, theta = 0.5"; "" of one with many rules."""
    if fit.has_heads:
        return ""
    beta = fit.entries[0].constant_beta(fit.rule)
    if beta is None:
        return kind_label(chosen_kind(fit))
    return f"{SIMPLEST.label}, beta = {beta:.3g}, theta = {1 / beta:.3g}"


def in_order(rules: Mapping[str, Coefficients]) -> dict[str, Coefficients]:
    """The rules in the order of LABELS, and then others."""
    known = {name: rules[name] for name in LABELS if name in rules}
    return known | dict(rules)


def beside(own: Coefficients, rules: Mapping[str, Coefficients]) -> dict[str, Coefficients]:
    """A fit as "own" and other rules, in order, each rule once: of equal ones the first is kept."""
    kept = {OWN: own}
    for name, rule in rules.items():
        if name != OWN and rule not in kept.values():
            kept[name] = rule
    return in_order(kept)


def label(rule: str, own: str = "") -> str:
    """The name of a rule in tables, figures and sentences; `own` is that of OWN, if it has one."""
    return own if rule == OWN and own else LABELS.get(rule, rule)
