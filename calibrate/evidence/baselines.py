"""Baselines: the rules that a fit is compared with."""

import math
from collections.abc import Mapping
from dataclasses import replace

from calibrate.core.rule import CONSTANT, Rule
from calibrate.evidence.evidence import BASELINE
from calibrate.evidence.metrics import LOG_P, Metric
from calibrate.store.entry import Entry
from calibrate.store.fit import Fit, identity
from calibrate.store.fits_store import load, published_store

# The paper's first version prints its polynomial, and applies it, in two decimals.
ROUNDED = (-0.04, 0.48, -2.3, 4.92, -1.79)
TRAINED_SIZE = 16  # items: the largest sets that the built-in heads were trained on
PAPER = "paper"  # the name of the published polynomial
HARD = "hard"  # the name of attention to the item with the highest logit
ALMOST_INFINITE = 1e30


def paper() -> Fit:
    """The paper's numbers, from the package even if a user's store has a fit named "paper"."""
    return load("paper@1", published_store())


def rounded_paper() -> Fit:
    """The paper's numbers as its first version prints them."""
    exact = paper()
    return replace(exact, name="rounded", entries=(Entry(ROUNDED, exact.only.domain),))


def log_size(trained_up_to: int) -> Fit:
    """beta = log n / log N, and 1 where that is less.

    Reference: Su 2022, "A quick derivation of entropy-invariant softmax".
    """
    entry = Entry((1 / math.log(trained_up_to), 0.0), (0.0, math.log(trained_up_to)))
    return Fit(Rule.log_size(), (entry,), name="log-n")


def one_constant(beta: float, name: str = CONSTANT) -> Fit:
    """One beta for all heads."""
    rule = Rule.constant(min(beta, 1.0), max(beta, 1.0))
    return Fit(rule, (Entry((beta,)),), name=name)


def hard_attention() -> Fit:
    """All attention on the item with the highest logit; equal ones share it."""
    return one_constant(ALMOST_INFINITE, HARD)


def is_infinite(rule: str, metric: Metric) -> bool:
    """True of the log-likelihood of arg max, which is -infinity wherever that is wrong."""
    return (rule, metric) == (HARD, LOG_P)


def fixed_rules() -> dict[str, Fit]:
    """The rules that need no fitting."""
    return {
        BASELINE: identity(),
        PAPER: paper(),
        "rounded": rounded_paper(),
        "log-n": log_size(TRAINED_SIZE),
        HARD: hard_attention(),
    }


def baselines_beside(fit: Fit, constant: float | None) -> dict[str, Fit]:
    """The rules that a fit of one head is scored beside, and the fit by its reference.

    Args:
      fit: of one entry.
      constant: the beta of highest likelihood for the same inputs, if it is known; left out where
        the fit is a constant itself.
    """
    others = {BASELINE: identity(), PAPER: paper(), HARD: hard_attention()}
    if constant is not None and not fit.ignores_inputs:
        others[CONSTANT] = one_constant(constant)
    return {**without_equals(others, {fit.reference: fit}), fit.reference: fit}


def without_equals(rules: Mapping[str, Fit], fits: Mapping[str, Fit]) -> dict[str, Fit]:
    """The rules that equal none of the fits beside which they are scored, and the baseline."""
    return {
        name: rule for name, rule in rules.items() if name == BASELINE or rule not in fits.values()
    }
