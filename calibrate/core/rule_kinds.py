"""Kinds of rule: what each is called, what beta depends on, and its regression.

beta is linear in the coefficients of a kind: beta = design @ coefficients, row by row. Its bounds
are linear constraints on them. A new kind is one entry of KINDS. The equation that the runtime
evaluates is in `rule.py`, where `rule.kind` of a coefficient file selects it: a constant is written
as a polynomial with four zeros.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from calibrate.core.bernstein import basis, elevation, plain_powers, unit
from calibrate.core.rule import (
    ENTROPY_AND_SIZE,
    ENTROPY_POLYNOMIAL,
    LOG_SIZE,
    N_POWERS,
    TERMS,
    Rule,
)

CONSTANT = "constant"
POLYNOMIAL = "polynomial"
ENTROPY = "entropy"
SIZE = "size"
DEGREE = N_POWERS - 1
ELEVATED_TO = 24
Domain = tuple[float, ...]  # [lo, hi] of entropy, of log n, or of both


class Form(NamedTuple):
    """beta = design @ coefficients, where low <= matrix @ coefficients <= high.

    Arrays: design (rows, k); matrix (constraints, k); low, high (constraints,). The coefficients of
    a constant beta are that beta times `ones`.
    """

    design: np.ndarray
    matrix: np.ndarray
    low: np.ndarray
    high: np.ndarray
    ones: np.ndarray  # (k,)

    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        """The constraints as sides @ coefficients >= bounds."""
        sides = np.concatenate([self.matrix, -self.matrix])
        return sides, np.concatenate([self.low, -self.high])


@dataclass(frozen=True)
class RuleKind:
    """A kind of rule for beta, linear in its k coefficients.

    Attributes:
      name: what options and `kind=` call it.
      label: what tables and sentences call it.
      file_kind: its `rule.kind` in a coefficient file.
      needs: what beta depends on: ENTROPY, SIZE, both or neither.
      min_sizes: different numbers of items that rows must have to determine it.
      ones: (k,) the coefficients of beta = 1.
      design: (entropy, log n, domain) -> (rows, k); the arguments are (rows,) and in nats.
      bounded: design -> (constraints, k), whose product with the coefficients the bounds of beta
        hold for, so that they hold for beta.
      file_coefficients: (coefficients, domain) -> those of a coefficient file.
      own_terms: those of TERMS of its file kind that may differ from 0; none given: all.
      scored_as: what its fit is called among scored rules; None: its name.
      least_squares: True for the kind that least squares of the optimal beta fit.
    """

    name: str
    label: str
    file_kind: str
    needs: frozenset[str]
    min_sizes: int
    ones: tuple[float, ...]
    design: Callable[[np.ndarray, np.ndarray, Domain], np.ndarray]
    bounded: Callable[[np.ndarray], np.ndarray]
    file_coefficients: Callable[[np.ndarray, Domain], tuple[float, ...]]
    own_terms: tuple[str, ...] = ()
    scored_as: str | None = None
    least_squares: bool = False

    @property
    def score_name(self) -> str:
        """The name of its fit among scored rules."""
        return self.scored_as or self.name

    @property
    def terms(self) -> tuple[str, ...]:
        """The terms that beta is a sum of, those of TERMS of its file kind that may differ from 0.

        The fit of a model has a number for each, so that they have to be closed: with "H L" there
        are "H", "L" and "1".
        """
        return self.own_terms or TERMS[self.file_kind]

    @property
    def by_entropy(self) -> bool:
        """True if a file of this kind has a domain and a threshold of entropy."""
        return Rule(kind=self.file_kind).by_entropy

    @property
    def depends_on_both(self) -> bool:
        """True if beta is a function of entropy and of set size."""
        return self.needs == {ENTROPY, SIZE}

    def domain(self, entropy: tuple[float, float], log_n: tuple[float, float]) -> Domain:
        """The part of the domains of entropy and log n that a file of this kind names."""
        by_size = Rule(kind=self.file_kind).by_size
        return (*(entropy if self.by_entropy else ()), *(log_n if by_size else ()))

    def form(
        self, entropy: np.ndarray, log_n: np.ndarray, domain: Domain, low: float, high: float
    ) -> Form:
        """The design and the constraints at (rows,) entropies and log n, for bounds of beta."""
        design = self.design(entropy, log_n, domain)
        matrix = self.bounded(design)
        bounds = np.full(len(matrix), low), np.full(len(matrix), high)
        return Form(design, matrix, *bounds, np.array(self.ones))


def _constant_design(entropy: np.ndarray, log_n: np.ndarray, domain: Domain) -> np.ndarray:
    return np.ones((len(entropy), 1))


def _line_design(entropy: np.ndarray, log_n: np.ndarray, domain: Domain) -> np.ndarray:
    return np.column_stack([log_n, np.ones(len(log_n))])


def _polynomial_design(entropy: np.ndarray, log_n: np.ndarray, domain: Domain) -> np.ndarray:
    return basis(unit(entropy, (domain[0], domain[1])), DEGREE)


def _surface_design(entropy: np.ndarray, log_n: np.ndarray, domain: Domain) -> np.ndarray:
    """A polynomial of entropy and terms of H log n, (log n)^2 and log n, both scaled to [0, 1]."""
    lo, hi, small, large = domain
    h, size = unit(entropy, (lo, hi)), unit(log_n, (small, large))
    return np.column_stack([basis(h, DEGREE), h * size, size**2, size])


def _first_row(design: np.ndarray) -> np.ndarray:
    """The constraint of a constant: all rows have its beta."""
    return design[:1]


def _end_rows(design: np.ndarray) -> np.ndarray:
    """The constraints of a line: within bounds at both ends, it is so between them."""
    return design[[design[:, 0].argmin(), design[:, 0].argmax()]]


def _elevated(design: np.ndarray) -> np.ndarray:
    """The constraints of a polynomial on all of its domain: enough, and nearly necessary."""
    return elevation(DEGREE, ELEVATED_TO)


def _every_row(design: np.ndarray) -> np.ndarray:
    return design


def _constant_in_file(c: np.ndarray, domain: Domain) -> tuple[float, ...]:
    return (0.0,) * DEGREE + (float(c[0]),)


def _line_in_file(c: np.ndarray, domain: Domain) -> tuple[float, ...]:
    return tuple(map(float, c))


def _polynomial_in_file(c: np.ndarray, domain: Domain) -> tuple[float, ...]:
    return plain_powers(c, (domain[0], domain[1]))


def _surface_in_file(c: np.ndarray, domain: Domain) -> tuple[float, ...]:
    lo, hi, small, large = domain
    width, height = hi - lo, large - small
    both, square, line = c[DEGREE + 1 :] / (width * height, height**2, height)
    *powers, linear, constant = plain_powers(c[: DEGREE + 1], (lo, hi))
    linear -= small * both
    constant += lo * small * both + small**2 * square - small * line
    terms = *powers, linear, constant, both, square, line - lo * both - 2 * small * square
    return tuple(map(float, terms))


KINDS = {  # simplest first
    kind.name: kind
    for kind in (
        RuleKind(
            name=CONSTANT,
            label="constant",
            file_kind=ENTROPY_POLYNOMIAL,
            needs=frozenset(),
            min_sizes=1,
            ones=(1.0,),
            design=_constant_design,
            bounded=_first_row,
            file_coefficients=_constant_in_file,
            own_terms=("1",),
        ),
        RuleKind(
            name=LOG_SIZE,
            label="log-size (kappa log n + b)",
            file_kind=LOG_SIZE,
            needs=frozenset({SIZE}),
            min_sizes=2,
            ones=(0.0, 1.0),
            design=_line_design,
            bounded=_end_rows,
            file_coefficients=_line_in_file,
            scored_as="kappa-log-n",
        ),
        RuleKind(
            name=POLYNOMIAL,
            label="polynomial",
            file_kind=ENTROPY_POLYNOMIAL,
            needs=frozenset({ENTROPY}),
            min_sizes=1,
            ones=(1.0,) * N_POWERS,
            design=_polynomial_design,
            bounded=_elevated,
            file_coefficients=_polynomial_in_file,
            least_squares=True,
        ),
        RuleKind(
            name=ENTROPY_AND_SIZE,
            label="entropy-and-size",
            file_kind=ENTROPY_AND_SIZE,
            needs=frozenset({ENTROPY, SIZE}),
            min_sizes=3,
            ones=(*(1.0,) * N_POWERS, 0.0, 0.0, 0.0),
            design=_surface_design,
            bounded=_every_row,
            file_coefficients=_surface_in_file,
        ),
    )
}

SIMPLEST = next(iter(KINDS.values()))
OF_LEAST_SQUARES = next(kind for kind in KINDS.values() if kind.least_squares)
# By kind in files, the kinds of rule that such a file can hold: all that need nothing else.
FAMILIES = {
    rich.file_kind: tuple(kind for kind in KINDS.values() if kind.needs <= rich.needs)
    for rich in KINDS.values()
    if rich.needs
}


def kind_in_file(rule: Rule, coefficients: Sequence[float]) -> str:
    """The name of the simplest kind that a rule in a file is of, by the terms that are not 0."""
    used = {term for term, c in zip(TERMS[rule.kind], coefficients, strict=True) if c}
    return next(
        kind.name
        for kind in KINDS.values()
        if kind.file_kind == rule.kind and used <= set(kind.terms)
    )


def in_family(
    rule: Rule,
    coefficients: Sequence[float],
    family: str,
    entropy: tuple[float, float],
    log_n: tuple[float, float],
) -> tuple[tuple[float, ...], Domain]:
    """The coefficients and the domain of a rule, as a file of a richer kind holds them.

    The domains of entropy and log n are those for what the rule does not depend on.
    """
    by_term = dict(zip(TERMS[rule.kind], coefficients, strict=True))
    target = Rule(kind=family)
    domain = (*(entropy if target.by_entropy else ()), *(log_n if target.by_size else ()))
    return tuple(by_term.get(term, 0.0) for term in TERMS[family]), domain


def kind_label(kind: str) -> str:
    """The name of a kind of rule in sentences."""
    return KINDS[kind].label if kind in KINDS else kind
