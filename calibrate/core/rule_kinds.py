"""Kinds of rule: what each is called, what it depends on, and how it is fitted.

A new kind is one entry of KINDS. The runtime's equation of each is in `rule.py`, where `rule.kind`
of a coefficient file selects it; a constant is written as a polynomial with four zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from calibrate.core import rule_forms
from calibrate.core.rule import ENTROPY_AND_SIZE, ENTROPY_POLYNOMIAL, LOG_SIZE, N_POWERS
from calibrate.core.rule_forms import Domain, Form

CONSTANT = "constant"
POLYNOMIAL = "polynomial"
ENTROPY = "entropy"
SIZE = "size"


@dataclass(frozen=True)
class RuleKind:
    """A kind of rule for beta, linear in its coefficients.

    Attributes:
      name: what options and `kind=` call it.
      label: what tables and sentences call it.
      file_kind: its `rule.kind` in a coefficient file.
      needs: what beta depends on: ENTROPY, SIZE, both or neither.
      min_sizes: different numbers of items that rows must have to determine it.
      form: (entropy, log n, domain, low, high) -> its design and constraints at rows or cells.
      powers: (coefficients of the form, domain) -> those of the file.
    """

    name: str
    label: str
    file_kind: str
    needs: frozenset[str]
    min_sizes: int
    form: Callable[[np.ndarray, np.ndarray, Domain, float, float], Form]
    powers: Callable[[np.ndarray, Domain], tuple[float, ...]]

    def domain(self, entropy: tuple[float, float], log_n: tuple[float, float]) -> Domain:
        """The part of the domains of entropy and log n that a file of this kind names."""
        if self.file_kind == ENTROPY_AND_SIZE:
            return (*entropy, *log_n)
        return log_n if self.file_kind == LOG_SIZE else entropy


def _as_polynomial(c: np.ndarray, domain: Domain) -> tuple[float, ...]:
    return (0.0,) * (N_POWERS - 1) + (float(c[0]),)


KINDS = {  # simplest first
    kind.name: kind
    for kind in (
        RuleKind(
            CONSTANT,
            "constant",
            ENTROPY_POLYNOMIAL,
            frozenset(),
            1,
            lambda H, log_n, domain, low, high: rule_forms.constant_form(len(H), low, high),
            _as_polynomial,
        ),
        RuleKind(
            LOG_SIZE,
            "log-size (kappa log n + b)",
            LOG_SIZE,
            frozenset({SIZE}),
            2,
            lambda H, log_n, domain, low, high: rule_forms.log_size_form(log_n, low, high),
            lambda c, domain: tuple(map(float, c)),
        ),
        RuleKind(
            POLYNOMIAL,
            "polynomial",
            ENTROPY_POLYNOMIAL,
            frozenset({ENTROPY}),
            1,
            lambda H, log_n, domain, low, high: rule_forms.polynomial_form(H, domain, low, high),
            lambda c, domain: rule_forms.plain_powers(c, (domain[0], domain[1])),
        ),
        RuleKind(
            ENTROPY_AND_SIZE,
            "entropy-and-size",
            ENTROPY_AND_SIZE,
            frozenset({ENTROPY, SIZE}),
            3,
            rule_forms.entropy_and_size_form,
            lambda c, domain: tuple(map(float, rule_forms.plain_terms(c, domain))),
        ),
    )
}


def kind_label(kind: str) -> str:
    """The name of a kind of rule in sentences."""
    return KINDS[kind].label if kind in KINDS else kind
