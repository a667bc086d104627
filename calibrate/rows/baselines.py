"""Baselines: the rules that a fit is compared with, of entropy, of set size, or constant."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from calibrate.errors import QualityError
from calibrate.files.coefficients import MAX_ENTROPY, Coefficients, Entry
from calibrate.files.store import load, published_store
from calibrate.maths.rule import Rule
from calibrate.rows.max_retrieval import TRAINED_SIZES
from calibrate.rows.model_selection import Choice, choose
from calibrate.rows.paper_procedure import fit_as_in_the_paper
from calibrate.rows.rule_fitting import KINDS, Options, fit_rule
from calibrate.rows.solved_rows import Rows

# The paper's first version prints its polynomial, and applies it, in two decimals.
ROUNDED = (-0.04, 0.48, -2.3, 4.92, -1.79)
TRAINED_SIZE = TRAINED_SIZES[1]  # the largest that the built-in heads were trained on
EXTRAPOLATED_FROM = 512
_ALMOST_INFINITE = 1e30


class LogSize(NamedTuple):
    """beta = kappa log n + constant, independent of entropy.

    Reference: Su 2022, "A quick derivation of entropy-invariant softmax".
    """

    kappa: float
    constant: float

    def beta(self, size: int) -> float:
        return self.kappa * math.log(size) + self.constant


class Hindsight(NamedTuple):
    """The best of HINDSIGHT_BETAS at each set size: a reference that cannot be deployed.

    The constant with the most right answers on the first sets is scored on the others.
    """


ScoredRule = Coefficients | LogSize | Hindsight

PLAIN = LogSize(0.0, 1.0)
HARD = LogSize(0.0, _ALMOST_INFINITE)  # argmax; equal maxima share the weight
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
    "entropy-and-size": "entropy and size, fitted",
    "log-n": f"log n / log {TRAINED_SIZE}",
    "hard": "hard attention",
    "hindsight": "best constant in hindsight",
}


def paper() -> Coefficients:
    """The paper's numbers, from the package even if a user's store has a fit named "paper"."""
    return load("paper@1", published_store())


def rounded_paper() -> Coefficients:
    """The paper's numbers as its first version prints them."""
    exact = paper()
    return replace(exact, name="rounded", entries=(Entry(ROUNDED, exact.only.domain),))


def log_size(trained_up_to: int) -> Coefficients:
    """beta = log n / log N, and 1 where that is less."""
    entry = Entry((1 / math.log(trained_up_to), 0.0), (0.0, math.log(trained_up_to)))
    return Coefficients(Rule.log_size(), (entry,), name="log-n")


def fixed_rules() -> dict[str, ScoredRule]:
    """The rules that need no fitting."""
    return {
        "plain": PLAIN,
        "paper": paper(),
        "rounded": rounded_paper(),
        "log-n": LogSize(1 / math.log(TRAINED_SIZE), 0.0),
        "hard": HARD,
        "hindsight": HINDSIGHT,
    }


def fitted_rules(rows: Rows, choice: Choice | None = None) -> dict[str, ScoredRule]:
    """The rule chosen for these rows, every kind fitted to them, and the paper's procedure.

    Args:
      rows: of a collection.
      choice: the result of `choose` for these rows; None is that with default options.
    Raises:
      QualityError: no rule "own": too few rows, or no rule beats plain softmax.
    Warns:
      UserWarning: a rule is left out, as it has too few rows.
    """
    choice = choice or choose(rows, Options())
    rules: dict[str, ScoredRule] = {"own": choice.chosen.fit}
    rules |= {_NAMES[candidate.kind]: candidate.fit for candidate in choice.candidates}
    small = rows.size <= EXTRAPOLATED_FROM
    optional: dict[str, Callable[[], Coefficients]] = {
        "procedure": lambda: fit_as_in_the_paper(rows)
    }
    if not small.all():
        optional["own-512"] = lambda: fit_rule(
            rows.take(small), choice.chosen.kind, choice.options._replace(q=choice.chosen.q)
        )
    for name, fit in optional.items():
        try:
            rules[name] = fit()
        except QualityError as failure:  # the others can still be compared
            warnings.warn(f"{LABELS[name]!r} is left out: {failure}", stacklevel=2)
    return {name: _named(rule, name) for name, rule in rules.items()}


def one_constant(beta: float) -> Coefficients:
    """The same beta on every head, at every entropy and size."""
    bounds = Rule.log_size(min_beta=min(beta, 1.0), max_beta=max(beta, 1.0))
    return Coefficients(bounds, (Entry((0.0, beta), (0.0, MAX_ENTROPY)),), name="constant")


def rivals_on_logits(choice: Choice | None) -> dict[str, Coefficients]:
    """The other kinds fitted to the same rows, if known, and, as "hard", the largest beta."""
    candidates = choice.candidates if choice else []
    kinds = {_NAMES[c.kind]: c.fit for c in candidates if choice and c.kind != choice.chosen.kind}
    return {**kinds, "hard": one_constant(Rule().max_beta)}


def by_sharpness(choice: Choice) -> dict[str, ScoredRule]:
    """The rules of the chosen kind with each q that was tried, named "q-0.25" and the like."""
    tried = {f"q-{candidate.q:g}": candidate.fit for candidate in choice.trade}
    return {name: _named(fit, name) for name, fit in tried.items()}


_NAMES = {name: name for name in KINDS} | {"log-size": "kappa-log-n"}


def _named(rule: ScoredRule, name: str) -> ScoredRule:
    return replace(rule, name=name) if isinstance(rule, Coefficients) else rule


def in_order(rules: dict[str, ScoredRule]) -> dict[str, ScoredRule]:
    """The rules in the order of LABELS, others before hindsight."""
    known = list(LABELS)
    last = len(known) - 1
    position = {name: known.index(name) if name in LABELS else last - 0.5 for name in rules}
    return {name: rules[name] for name in sorted(rules, key=position.__getitem__)}


def beside(own: Coefficients, rules: dict[str, ScoredRule]) -> dict[str, ScoredRule]:
    """A fit as "own" and other rules, in order, each rule once: of equal ones the first is kept."""
    kept: dict[str, ScoredRule] = {"own": own}
    for name, rule in rules.items():
        if name != "own" and rule not in kept.values():
            kept[name] = rule
    return in_order(kept)


def label(name: str, own: str = LABELS["own"]) -> str:
    """The name of a rule in tables and figures; `own` is the name of the head's fit."""
    if name.startswith("q-"):
        return f"the same kind at q = {name.removeprefix('q-')}"
    return own if name == "own" else LABELS.get(name, name)
