"""Baselines: the rules that a fit is compared with, and what people call them."""

import math
from collections.abc import Mapping
from dataclasses import replace

from calibrate.core.rule import N_POWERS, Rule
from calibrate.core.rule_kinds import KINDS, kind_in_file
from calibrate.evidence.scores import OWN, PLAIN
from calibrate.store.coefficients import MAX_ENTROPY, Coefficients, Entry, identity
from calibrate.store.fits_store import load, published_store

# The paper's first version prints its polynomial, and applies it, in two decimals.
ROUNDED = (-0.04, 0.48, -2.3, 4.92, -1.79)
TRAINED_SIZE = 16  # items: the largest sets that the built-in heads were trained on
EXTRAPOLATED_FROM = 512
ALMOST_INFINITE = 1e30

LABELS = {
    "plain": "baseline",
    "paper": "the paper's published polynomial",
    "rounded": "the same, rounded",
    "procedure": "the paper's procedure, robust",
    "own": "fitted rule",
    "own-512": f"fitted rule, n up to {EXTRAPOLATED_FROM}",
    "polynomial": "polynomial (maximum likelihood)",
    "kappa-log-n": "log-size (maximum likelihood)",
    "constant": "constant (maximum likelihood)",
    "entropy-and-size": "entropy-and-size (maximum likelihood)",
    "log-n": f"log n / log {TRAINED_SIZE}",
    "hard": "argmax",
    "beta-64": "constant, beta = 64",
}


def kind_label(kind: str) -> str:
    """The name of a kind of rule in sentences."""
    return KINDS[kind].label if kind in KINDS else kind


def chosen_kind(fit: Coefficients) -> str:
    """The kind of rule in the words of a fit, where a constant is no polynomial."""
    return kind_in_file(fit.rule, fit.entries[0].coefficients)


def constant_of(rule: Rule, entry: Entry) -> float | None:
    """The beta of an entry that has one for every row, whatever its entropy and size; else None."""
    terms = list(entry.coefficients)
    beta = terms.pop(min(len(terms), N_POWERS) - 1)
    everywhere = rule.outside == "clamp" and not rule.min_entropy
    within = rule.min_beta <= beta <= rule.max_beta
    return beta if everywhere and within and not any(terms) else None


def described(fit: Coefficients) -> str:
    """The rule of a fit in words: "constant, beta = 2, theta = 0.5"; "" of one with many rules."""
    if fit.has_heads:
        return ""
    beta = constant_of(fit.rule, fit.entries[0])
    if beta is None:
        return kind_label(chosen_kind(fit))
    return f"{kind_label('constant')}, beta = {beta:.3g}, theta = {1 / beta:.3g}"


def paper() -> Coefficients:
    """The paper's numbers, from the package even if a user's store has a fit named "paper"."""
    return load("paper@1", published_store())


def rounded_paper() -> Coefficients:
    """The paper's numbers as its first version prints them."""
    exact = paper()
    return replace(exact, name="rounded", entries=(Entry(ROUNDED, exact.only.domain),))


def log_size(trained_up_to: int) -> Coefficients:
    """beta = log n / log N, and 1 where that is less.

    Reference: Su 2022, "A quick derivation of entropy-invariant softmax".
    """
    entry = Entry((1 / math.log(trained_up_to), 0.0), (0.0, math.log(trained_up_to)))
    return Coefficients(Rule.log_size(), (entry,), name="log-n")


def one_constant(beta: float, name: str = "constant") -> Coefficients:
    """The same beta on every head, at every entropy and size."""
    bounds = Rule.log_size(min_beta=min(beta, 1.0), max_beta=max(beta, 1.0))
    return Coefficients(bounds, (Entry((0.0, beta), (0.0, MAX_ENTROPY)),), name=name)


def hard_attention() -> Coefficients:
    """All attention on the item with the highest logit; equal ones share it."""
    return one_constant(ALMOST_INFINITE, "hard")


def fixed_rules() -> dict[str, Coefficients]:
    """The rules that need no fitting."""
    return {
        PLAIN: identity(),
        "paper": paper(),
        "rounded": rounded_paper(),
        "log-n": log_size(TRAINED_SIZE),
        "hard": hard_attention(),
    }


def of_smaller_q(fit: Coefficients, rules: Mapping[str, Coefficients]) -> list[tuple[float, str]]:
    """(q, name) of the rules of a fit's kind that were fitted with a smaller q, largest q first."""
    q = fit.quality.get("q")
    if not q or fit.has_heads:
        return []
    kind = chosen_kind(fit)
    fits = [
        (rule.quality["q"], name)
        for name, rule in rules.items()
        if "q" in rule.quality and rule.quality["q"] < q and chosen_kind(rule) == kind
    ]
    return sorted(fits, reverse=True)


def in_order(rules: Mapping[str, Coefficients]) -> dict[str, Coefficients]:
    """The rules in the order of LABELS, and then others."""
    known = list(LABELS)
    return dict(sorted(rules.items(), key=lambda rule: (*known, rule[0]).index(rule[0])))


def beside(own: Coefficients, rules: Mapping[str, Coefficients]) -> dict[str, Coefficients]:
    """A fit as "own" and other rules, in order, each rule once: of equal ones the first is kept."""
    kept = {OWN: own}
    for name, rule in rules.items():
        if name != OWN and rule not in kept.values():
            kept[name] = rule
    return in_order(kept)


def label(name: str, own: str = LABELS["own"]) -> str:
    """The name of a rule in tables and figures; `own` is the name of the head's fit."""
    return own if name == OWN else LABELS.get(name, name)
