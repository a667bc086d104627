"""Rules that a fit is compared with."""

import math
from collections.abc import Mapping

from calibrate.core.rule import CONSTANT, RuleForm
from calibrate.evidence.evidence import BASELINE
from calibrate.evidence.metrics import LOG_P, Metric
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit, identity
from calibrate.store.loading import load
from calibrate.store.references import published_store

TRAINED_SIZE = 16  # items: the largest inputs that the built-in heads were trained on
PAPER = "paper"  # the name of the published polynomial
LOG_N = "log n / log "  # and the largest trained size: the name of log-n scaling
HARD = "hard"  # the name of hard attention, to the item with the highest logit
ALMOST_INFINITE = 1e30


def paper() -> Fit:
    """The paper's polynomial; of the package, even if a user's store has a fit named "paper"."""
    return load("paper@1", published_store())


def log_size_rule(trained_up_to: int) -> Fit:
    """beta = max(1, log n / log N), N being the largest trained size.

    Reference: Su 2022, "A quick derivation of entropy-invariant softmax".
    """
    entry = Entry((1 / math.log(trained_up_to), 0.0), (0.0, math.log(trained_up_to)))
    return Fit(RuleForm.log_size(), (entry,), name="log-n")


def one_constant(beta: float, name: str = CONSTANT) -> Fit:
    """One beta for all heads."""
    rule = RuleForm.constant(min(beta, 1.0), max(beta, 1.0))
    return Fit(rule, (Entry((beta,)),), name=name)


def hard_attention() -> Fit:
    """Hard attention: all weight on the item with the highest logit; equal ones share it."""
    return one_constant(ALMOST_INFINITE, HARD)


def is_infinite(rule: str, metric: Metric) -> bool:
    """True for the log-likelihood of hard attention: -infinity wherever its argmax is wrong."""
    return (rule, metric) == (HARD, LOG_P)


def fixed_rules() -> dict[str, Fit]:
    """The rules that need no fit, by name."""
    return {
        BASELINE: identity(),
        PAPER: paper(),
        f"{LOG_N}{TRAINED_SIZE}": log_size_rule(TRAINED_SIZE),
        HARD: hard_attention(),
    }


def baselines_beside(fit: Fit, constant: float | None) -> dict[str, Fit]:
    """The rules that a fit of one head is compared with, by name, and the fit by its reference.

    Args:
      fit: with one entry.
      constant: the beta of highest likelihood for the same inputs, if it is known; left out if the
        fit is a constant itself.
    """
    others = {BASELINE: identity()}
    if constant is not None and not fit.ignores_inputs:
        others[CONSTANT] = one_constant(constant)
    others |= {PAPER: paper(), HARD: hard_attention()}
    return {**without_equals(others, {fit.reference: fit}), fit.reference: fit}


def without_equals(rules: Mapping[str, Fit], fits: Mapping[str, Fit]) -> dict[str, Fit]:
    """The rules without those that equal one of the fits; the baseline stays."""
    return {
        name: rule for name, rule in rules.items() if name == BASELINE or rule not in fits.values()
    }
