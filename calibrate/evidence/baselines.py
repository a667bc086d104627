"""Baselines: the rules that a fit is compared with."""

import math
from collections.abc import Mapping
from dataclasses import replace

from calibrate.core.rule import Rule
from calibrate.core.rule_kinds import kind_in_file
from calibrate.evidence.evidence import PLAIN
from calibrate.evidence.metrics import LOG_P, Metric
from calibrate.store.coefficients import Coefficients, identity
from calibrate.store.entry import MAX_ENTROPY, Entry
from calibrate.store.fits_store import load, published_store

# The paper's first version prints its polynomial, and applies it, in two decimals.
ROUNDED = (-0.04, 0.48, -2.3, 4.92, -1.79)
TRAINED_SIZE = 16  # items: the largest sets that the built-in heads were trained on
EXTRAPOLATED_FROM = 512
PAPER = "paper"  # the name of the published polynomial
HARD = "hard"  # the name of attention to the item with the highest logit
ALMOST_INFINITE = 1e30


def chosen_kind(fit: Coefficients) -> str:
    """The kind of rule in the words of a fit, where a constant is no polynomial."""
    return kind_in_file(fit.rule, fit.entries[0].coefficients)


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
    return one_constant(ALMOST_INFINITE, HARD)


def is_infinite(rule: str, metric: Metric) -> bool:
    """True of the log-likelihood of argmax, which is -infinity wherever that is wrong."""
    return (rule, metric) == (HARD, LOG_P)


def fixed_rules() -> dict[str, Coefficients]:
    """The rules that need no fitting."""
    return {
        PLAIN: identity(),
        PAPER: paper(),
        "rounded": rounded_paper(),
        "log-n": log_size(TRAINED_SIZE),
        HARD: hard_attention(),
    }


def without_equals(
    rules: Mapping[str, Coefficients], fits: Mapping[str, Coefficients]
) -> dict[str, Coefficients]:
    """The rules that equal none of the fits beside which they are scored, and the baseline."""
    return {
        name: rule for name, rule in rules.items() if name == PLAIN or rule not in fits.values()
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
