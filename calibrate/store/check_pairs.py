"""Check pairs of a coefficient file: values of a rule at points of its domain.

They determine the coefficients, so that reversed, rescaled or rounded ones are refused.
"""

from calibrate.core.rule import (
    N_COEFFICIENTS,
    TERMS,
    VARIABLES,
    bare_value,
    exponents,
)
from calibrate.errors import CoefficientsError
from calibrate.storage.strict_json import describe
from calibrate.store.entries import CheckPairs, Entry

CHECK_TOLERANCE = 1e-9  # of the largest |p| among the check pairs
_CHECK_ITEMS = ("values [p]", "pairs [x, p(x)]", "triples [H, log n, p(H, log n)]")


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
    """Raises CoefficientsError if the coefficients of an entry miss its check pairs."""
    n_variables = len(VARIABLES[kind])
    if len(entry.check) != N_COEFFICIENTS[kind] or {*map(len, entry.check)} != {n_variables + 1}:
        raise CoefficientsError(
            f"{place}.check is {describe([*map(list, entry.check)])}; give "
            f"{N_COEFFICIENTS[kind]} {_CHECK_ITEMS[n_variables]}"
        )
    points = {tuple(x) for *x, _ in entry.check}
    ranges = list(zip(entry.domain[::2], entry.domain[1::2], strict=True))
    is_within = all(
        lo <= x <= hi for point in points for x, (lo, hi) in zip(point, ranges, strict=True)
    )
    if not is_within or len(points) < len(entry.check):
        raise CoefficientsError(
            f"{place}.check is at the points {sorted(points)}; give {len(entry.check)} distinct "
            f"ones of the domain {list(entry.domain)}"
        )
    tolerance = CHECK_TOLERANCE * max(abs(p) for *_, p in entry.check)
    for *x, p in entry.check:
        value = float(bare_value(x, entry.coefficients, kind))
        if not abs(value - p) <= tolerance:
            point = f" at {', '.join(f'{number:.6g}' for number in x)}" if x else ""
            raise CoefficientsError(
                f"{place}.coefficients is {describe(list(entry.coefficients))}; they give "
                f"{value:.9g}{point} where check has {p:.9g}: {_reason(entry, kind, tolerance)}"
            )


def _reason(entry: Entry, kind: str, tolerance: float) -> str:
    """Why the coefficients miss their check pairs, and the remedy."""
    backwards = entry.coefficients[::-1]
    if all(abs(bare_value(x, backwards, kind) - p) <= tolerance for *x, p in entry.check):
        return f"they are in reverse order; write those of {', '.join(TERMS[kind])}"
    return "they were rounded or changed since the fit; restore them"
