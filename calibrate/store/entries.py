"""Entries of a fit: the coefficients and domain of one head, or of all, with their check pairs.

Check pairs are values of a rule at points of its domain. They determine the coefficients, so that
reversed, rescaled or rounded ones are refused.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from calibrate.core.rule import (
    DEGREE,
    N_COEFFICIENTS,
    N_DOMAIN,
    TERMS,
    VARIABLES,
    RuleForm,
    bare_value,
    beta_of,
    exponents,
)
from calibrate.errors import CoefficientsError
from calibrate.storage.strict_json import FLOAT32_MAX, describe
from calibrate.store.coefficient_fields import MAX_ENTROPY

if TYPE_CHECKING:
    import numpy as np

CheckPairs = tuple[tuple[float, ...], ...]  # (p,), (x, p(x)) or (H, log n, p(H, log n))
CHECK_TOLERANCE = 1e-9  # of the largest number among the check pairs


@dataclass(frozen=True)
class Entry:
    """The rule of one head, or of all where `layer` and `head` are None.

    Attributes:
      coefficients: of the terms in `core/rule.py`; as many as the kind of rule has.
      domain: [lo, hi] of the fitted entropies, in nats; or of log n; of both; or empty.
      check: the check pairs of the file that it was read from; empty: `make_check_pairs`.
    Raises:
      CoefficientsError: numbers that are not finite, or a domain that is empty or out of range.
    """

    coefficients: tuple[float, ...]
    domain: tuple[float, ...] = ()
    layer: int | None = None
    head: int | None = None
    check: CheckPairs = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("coefficients", "domain"):  # NumPy's numbers become floats, as in a file
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        if not all(abs(number) <= FLOAT32_MAX for number in self.coefficients):
            raise CoefficientsError(
                f"coefficients are {self.coefficients!r}; give finite numbers of at most 3.4e38"
            )
        ranges = zip(self.domain[::2], self.domain[1::2], strict=False)
        if not all(0 <= lo < hi <= MAX_ENTROPY for lo, hi in ranges):
            raise CoefficientsError(
                f"domain is {list(self.domain)!r}; give lo and hi, 0 <= lo < hi <= "
                f"{MAX_ENTROPY:g}, in nats of entropy, in log n, or of both"
            )

    def beta_at(self, H: Any, log_n: Any, rule: RuleForm) -> "np.ndarray":
        """beta of rows with these entropies and log n, arrays of NumPy.

        Arguments on which a rule of this kind does not depend may be None.
        """
        import numpy as np  # deferred, so that the command line's help does not load NumPy

        beta = np.asarray(beta_of(H, log_n, self.coefficients, self.domain, rule, np))
        like = log_n if H is None else H
        return beta if like is None or beta.ndim else np.full(np.shape(like), beta)

    def constant_beta(self, rule: RuleForm) -> float | None:
        """beta, if it is the same for every row; else None."""
        terms = list(self.coefficients)
        beta = terms.pop(TERMS[rule.kind].index("1"))
        beta = min(max(beta, rule.min_beta), rule.max_beta)
        # A threshold, or `outside`, sets beta to 1 at some entropies.
        is_switched_off = rule.outside != "clamp" or rule.min_entropy > 0
        return None if any(terms) or (is_switched_off and beta != 1) else beta


def check_entries(entries: Sequence[Entry], kind: str) -> None:
    """Raises CoefficientsError unless these are entries of one kind of rule, one for each head."""
    if not entries:
        raise CoefficientsError("entries are empty; give one at least")
    for i, entry in enumerate(entries):
        coefficients, domain = entry.coefficients, entry.domain
        place = f"entries[{i}].coefficients are {coefficients!r}, its domain is {list(domain)!r}"
        if (len(coefficients), len(domain)) != (N_COEFFICIENTS[kind], N_DOMAIN[kind]):
            raise CoefficientsError(
                f"{place}; give the {N_COEFFICIENTS[kind]} coefficients and {N_DOMAIN[kind]} "
                f"ends of a domain of a rule of kind {kind!r}"
            )
        # Bounds every step of the evaluation, so that none overflows in float32.
        largest = sum(map(abs, coefficients)) * max([1.0, *domain[1::2]]) ** DEGREE
        if not largest <= FLOAT32_MAX:
            raise CoefficientsError(f"{place}; the rule is beyond float32 there; give smaller ones")
    _check_overlap([(entry.layer, entry.head) for entry in entries])


def _check_overlap(heads: Sequence[tuple[int | None, int | None]]) -> None:
    """Raises CoefficientsError if a head has two entries; None stands for all layers, or heads."""
    of_head, of_layer = Counter(heads), Counter(layer for layer, _ in heads)
    for i, (layer, head) in enumerate(heads):
        overlaps_layers = layer is None and len(of_layer) > 1
        overlaps_heads = head is None and of_layer[layer] > 1
        if overlaps_layers or overlaps_heads or of_head[layer, head] > 1:
            raise CoefficientsError(
                f"entries[{i}] is for layer {layer}, head {head} (None: all), which another entry "
                "covers too; keep one of them"
            )


def make_check_pairs(entry: Entry, kind: str) -> CheckPairs:
    """The rule without its guards at as many points of the domain as there are coefficients.

    Raises:
      CoefficientsError: points coincide.
    """
    points = _check_points(entry.domain, kind)
    if len(set(points)) < len(points):
        raise CoefficientsError(
            f"domain is {list(entry.domain)!r}, too narrow for a fit; give a wider one"
        )
    return tuple((*x, float(bare_value(x, entry.coefficients, kind))) for x in points)


def _check_points(domain: tuple[float, ...], kind: str) -> list[tuple[float, ...]]:
    """Points of the domain that determine the coefficients: one for each term.

    Each variable gets as many evenly spaced values as it has powers. The point of a term takes, for
    each variable, value number p, where p is the term's power. Because every lower power of a term
    is a term too, the values at these points determine all coefficients. Points at the lowest log n
    come first.
    """
    used = VARIABLES[kind]
    powers = [
        tuple(p for variable, p in zip("HL", exponents(term), strict=True) if variable in used)
        for term in TERMS[kind]
    ]
    degrees = map(max, zip(*powers, strict=True))
    axes = [
        [lo, hi, *(lo + (hi - lo) * i / degree for i in range(1, degree))]
        for lo, hi, degree in zip(domain[::2], domain[1::2], degrees, strict=True)
    ]
    points = [tuple(axis[p] for axis, p in zip(axes, term, strict=True)) for term in powers]

    def key(point: tuple[float, ...]) -> tuple[bool, tuple[float, ...]]:
        return len(point) == 2 and point[1] > domain[2], point

    return sorted(points, key=key)


def verify_check_pairs(entry: Entry, kind: str, place: str = "entry") -> None:
    """Raises CoefficientsError unless an entry has the check pairs of its coefficients."""
    expected = make_check_pairs(entry, kind)
    if not _agree([pair[:-1] for pair in entry.check], [pair[:-1] for pair in expected]):
        points = [list(pair[:-1]) for pair in expected]
        raise CoefficientsError(
            f"{place}.check is {describe([*map(list, entry.check)])}; give the rule's value p at "
            f"each of {points}"
        )
    if _agree(entry.check, expected):
        return
    reason = "they were rounded or changed since the fit; restore them"
    backwards = replace(entry, coefficients=entry.coefficients[::-1])
    if _agree(entry.check, make_check_pairs(backwards, kind)):
        reason = f"they are in reverse order; write those of {', '.join(TERMS[kind])}"
    raise CoefficientsError(
        f"{place}.coefficients is {describe(list(entry.coefficients))}; they do not give the "
        f"values in check: {reason}"
    )


def _agree(given: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> bool:
    """True if the numbers agree, but for rounding of the largest expected one of a column."""
    if [*map(len, given)] != [*map(len, expected)]:
        return False
    return all(
        max(abs(a - b) for a, b in zip(x, y, strict=True)) <= CHECK_TOLERANCE * max(map(abs, y))
        for x, y in zip(zip(*given, strict=True), zip(*expected, strict=True), strict=True)
    )
