"""Check pairs: the values of a rule at points of its domain, which determine the coefficients.

A file has them beside the coefficients, so that reversed, rescaled or rounded coefficients are
refused. The pair of a constant is its value alone.
"""

from collections.abc import Sequence

from calibrate.core.rule import TERMS, VARIABLES, bare_value, exponents
from calibrate.errors import CoefficientsError
from calibrate.storage.strict_json import Refusal, Where, refuse

CHECK_TOLERANCE = 1e-9  # of the largest |p| among the pairs

Pairs = tuple[tuple[float, ...], ...]  # (p,), (x, p(x)) or (H, log n, p(H, log n))


def make_check_pairs(
    coefficients: tuple[float, ...], domain: tuple[float, ...], kind: str
) -> Pairs:
    """The bare rule of a kind at as many points of the domain as there are coefficients.

    Raises:
      CoefficientsError: points coincide.
    """
    points = _points(domain, kind)
    if len(set(points)) < len(points):
        raise CoefficientsError(f"domain is {list(domain)!r}, too narrow for a fit; give a wider")
    return tuple((*x, float(bare_value(x, coefficients, kind))) for x in points)


def _points(domain: tuple[float, ...], kind: str) -> list[tuple[float, ...]]:
    """Points of the domain that determine the coefficients: one for each term.

    A variable has as many values, evenly spaced, as its powers; the power 0 has the lower end, 1
    the upper end, and others those between. As the terms are closed, no other sum of them is 0 at
    all points. Those at the lowest log n come first.
    """
    used = VARIABLES[kind]
    powers = [
        tuple(p for variable, p in zip("HL", exponents(term), strict=True) if variable in used)
        for term in TERMS[kind]
    ]
    degrees = map(max, zip(*powers, strict=True))
    axes = list(map(_axis, domain[::2], domain[1::2], degrees))
    points = [tuple(axis[p] for axis, p in zip(axes, of_term, strict=True)) for of_term in powers]
    return sorted(points, key=lambda point: (point[1:] > domain[-2:-1], point))


def _axis(lo: float, hi: float, degree: int) -> list[float]:
    """degree + 1 numbers from lo to hi, evenly spaced: the two ends first."""
    return [lo, hi, *(lo + (hi - lo) * i / degree for i in range(1, degree))]


def verify_check_pairs(
    coefficients: tuple[float, ...],
    domain: tuple[float, ...],
    check: Pairs,
    kind: str,
    where: Where,
) -> None:
    """Refuses an entry of a file of a kind of rule whose coefficients miss its check pairs."""
    points = {tuple(x) for *x, _ in check}
    ranges = list(zip(domain[::2], domain[1::2], strict=True))
    within = all(lo <= x <= hi for at in points for x, (lo, hi) in zip(at, ranges, strict=True))
    if not within or len(points) < len(check):
        remedy = f"give {len(check)} distinct ones of the domain {list(domain)}"
        raise Refusal((*where, "check"), f"at the points {sorted(points)}", remedy)
    tolerance = CHECK_TOLERANCE * max(abs(p) for *_, p in check)
    for *x, p in check:
        value = float(bare_value(x, coefficients, kind))
        if not abs(value - p) <= tolerance:
            at = f" at {', '.join(f'{number:.6g}' for number in x)}" if x else ""
            wrong = f"they give {value:.9g}{at} where check has {p:.9g}"
            cause = _what_happened(coefficients, check, kind, tolerance)
            refuse(list(coefficients), f"{wrong}: {cause}", (*where, "coefficients"))


def _what_happened(coefficients: Sequence[float], check: Pairs, kind: str, tolerance: float) -> str:
    """Why the coefficients miss their check pairs, and the remedy."""
    backwards = [bare_value(x, coefficients[::-1], kind) - p for *x, p in check]
    if all(abs(miss) <= tolerance for miss in backwards):
        return f"they are in reverse order; write those of {', '.join(TERMS[kind])}"
    return "they were rounded or changed since the fit; restore them"
