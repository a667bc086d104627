"""The rules that a fit is compared with: how each sets beta from entropy or from set size."""

import math
import warnings
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from calibrate.errors import QualityError
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.files.store import load, published_store
from calibrate.maths.rule import Rule
from calibrate.pipeline.fit import Rows, fit_polynomial

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
    """A yardstick that nobody can deploy: of 40 constants, the best of each set size.

    The first sets choose, by whether the head is right; the others score.
    """

    @staticmethod
    def trials() -> np.ndarray:
        """The values of beta to choose from, lowest first."""
        return np.geomspace(1, 1000, 40)


ScoredRule = Coefficients | LogSize | Hindsight

PLAIN = LogSize(0.0, 1.0)
HARD = LogSize(0.0, _BEYOND_ANY_LOGIT)  # argmax; equal maxima share
HINDSIGHT = Hindsight()

LABELS = {
    "plain": "plain softmax",
    "paper": "the paper's numbers",
    "rounded": "the paper's, rounded",
    "own": "own fit",
    "own-512": f"own fit, sizes up to {EXTRAPOLATED_FROM}",
    "log-n": f"log n / log {TRAINED_SIZE}",
    "kappa-log-n": "kappa log n, fitted",
    "constant": "one constant, fitted",
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


def fitted_rules(rows: Rows) -> dict[str, ScoredRule]:
    """Every form of rule, fitted to the same interior rows by the same least squares on beta*.

    Raises:
      QualityError: too few rows for "own".
    Warns:
      UserWarning: "own-512" is left out, as there are too few rows for it.
    """
    used = rows.interior()
    log_n = np.log(used.size)
    rules: dict[str, ScoredRule] = {
        "own": _polynomial(used, "own"),
        "kappa-log-n": LogSize(float(used.beta @ log_n / (log_n @ log_n)), 0.0),
        "constant": LogSize(0.0, float(used.beta.mean())),
    }
    few = Rows(*(column[used.size <= EXTRAPOLATED_FROM] for column in used))
    if len(few.beta) < len(used.beta):
        try:
            rules["own-512"] = _polynomial(few, "own-512")
        except QualityError as failure:  # the others can be compared still
            warnings.warn(f"{LABELS['own-512']!r} is left out: {failure}", stacklevel=2)
    return rules


def in_order(rules: dict[str, ScoredRule]) -> dict[str, ScoredRule]:
    """The rules in the order of LABELS, others before hindsight."""
    known = list(LABELS)
    last = len(known) - 1
    place = {name: known.index(name) if name in LABELS else last - 0.5 for name in rules}
    return {name: rules[name] for name in sorted(rules, key=place.__getitem__)}


def label(name: str, own: str = LABELS["own"]) -> str:
    """What a rule is called in tables and figures; `own` is what the head's fit is called."""
    return own if name == "own" else LABELS.get(name, name)


def _polynomial(used: Rows, name: str) -> Coefficients:
    return Coefficients(Rule(), (Entry(*fit_polynomial(used.entropy, used.beta)),), name=name)
