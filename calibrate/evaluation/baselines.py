"""The rules that a fit is compared with: how each sets beta from entropy or from set size."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from calibrate.errors import QualityError
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.files.store import load, published_store
from calibrate.fitting.model_selection import Choice, choose
from calibrate.fitting.paper_procedure import fit_as_in_the_paper
from calibrate.fitting.rule_fitting import Options, fit_rule
from calibrate.fitting.solved_rows import Rows

# The paper's first version prints its polynomial, and applies it, in two decimals.
ROUNDED = (-0.04, 0.48, -2.3, 4.92, -1.79)
TRAINED_SIZE = 16  # the largest set that the built-in heads were trained on
EXTRAPOLATED_FROM = 512
_BEYOND_ANY_LOGIT = 1e30


class LogSize(NamedTuple):
    """beta = kappa log n + constant, whatever the entropy.

    Reference: Su 2022, "A quick derivation of entropy-invariant softmax".
    """

    kappa: float
    constant: float

    def beta(self, size: int) -> float:
        return self.kappa * math.log(size) + self.constant


class Hindsight(NamedTuple):
    """A yardstick that cannot be deployed: the best of HINDSIGHT_BETAS at each set size.

    The first sets choose, by whether the head is right; the others score.
    """


ScoredRule = Coefficients | LogSize | Hindsight

PLAIN = LogSize(0.0, 1.0)
HARD = LogSize(0.0, _BEYOND_ANY_LOGIT)  # argmax; equal maxima share
HINDSIGHT = Hindsight()
HINDSIGHT_BETAS = np.geomspace(1, 1000, 40)

LABELS = {
    "plain": "plain softmax",
    "paper": "the paper's numbers",
    "rounded": "the paper's, rounded",
    "procedure": "the paper's procedure",
    "own": "own fit",
    "own-512": f"own fit, sizes up to {EXTRAPOLATED_FROM}",
    "polynomial": "polynomial, fitted",
    "kappa-log-n": "kappa log n + b, fitted",
    "constant": "one constant, fitted",
    "log-n": f"log n / log {TRAINED_SIZE}",
    "hard": "hard attention",
    "hindsight": "best constant in hindsight",
}


def paper() -> Coefficients:
    """The paper's own numbers, whatever a user's store calls "paper"."""
    return load("paper@1", published_store())


def rounded_paper() -> Coefficients:
    """The paper's numbers as its first version prints them."""
    exact = paper()
    return replace(exact, name="rounded", entries=(Entry(ROUNDED, exact.only.domain),))


def fixed_rules() -> dict[str, ScoredRule]:
    """What needs no fitting."""
    return {
        "plain": PLAIN,
        "paper": paper(),
        "rounded": rounded_paper(),
        "log-n": LogSize(1 / math.log(TRAINED_SIZE), 0.0),
        "hard": HARD,
        "hindsight": HINDSIGHT,
    }


def fitted_rules(rows: Rows, choice: Choice | None = None) -> dict[str, ScoredRule]:
    """The rule that these rows call for, every kind of rule fitted to them, and the paper's way.

    Args:
      rows: of a collection.
      choice: that was made of them already.
    Raises:
      QualityError: no rule is worth it: too few rows for "own", or none beats plain softmax.
    Warns:
      UserWarning: rules that are left out, as there are too few rows for them.
    """
    choice = choice or choose(rows, Options())
    rules: dict[str, ScoredRule] = {"own": choice.chosen.fit}
    rules |= {_NAMES[candidate.kind]: candidate.fit for candidate in choice.candidates}
    small = rows.size <= EXTRAPOLATED_FROM
    wanted: dict[str, Callable[[], Coefficients]] = {"procedure": lambda: fit_as_in_the_paper(rows)}
    if not small.all():
        wanted["own-512"] = lambda: fit_rule(rows.take(small), choice.chosen.kind)
    for name, fit in wanted.items():
        try:
            rules[name] = fit()
        except QualityError as failure:  # the others can be compared still
            warnings.warn(f"{LABELS[name]!r} is left out: {failure}", stacklevel=2)
    return {name: _named(rule, name) for name, rule in rules.items()}


_NAMES = {"constant": "constant", "log-size": "kappa-log-n", "polynomial": "polynomial"}


def _named(rule: ScoredRule, name: str) -> ScoredRule:
    return replace(rule, name=name) if isinstance(rule, Coefficients) else rule


def in_order(rules: dict[str, ScoredRule]) -> dict[str, ScoredRule]:
    """The rules in the order of LABELS, others before hindsight."""
    known = list(LABELS)
    last = len(known) - 1
    place = {name: known.index(name) if name in LABELS else last - 0.5 for name in rules}
    return {name: rules[name] for name in sorted(rules, key=place.__getitem__)}


def beside(own: Coefficients, rules: dict[str, ScoredRule]) -> dict[str, ScoredRule]:
    """A fit and others, in order, without those that are the fit itself by another name."""
    others = {name: rule for name, rule in rules.items() if rule != own and name != "own"}
    return in_order({**others, "own": own})


def label(name: str, own: str = LABELS["own"]) -> str:
    """What a rule is called in tables and figures; `own` is what the head's fit is called."""
    return own if name == "own" else LABELS.get(name, name)
