"""Check pairs: the value of a rule at points of its domain, which determine the coefficients.

A file has them beside the coefficients. Those that were reversed, rescaled or rounded since are
refused.
"""

import math
from collections.abc import Sequence

from calibrate.core.rule import N_POWERS, SURFACE_TERMS, bare_value
from calibrate.errors import CoefficientsError
from calibrate.storage.strict_json import Refusal, Where, refuse

CHECK_TOLERANCE = 1e-9  # of the largest |p| among the pairs

Pairs = tuple[tuple[float, ...], ...]  # [x, p(x)], or triples [H, log n, value]


def make_check_pairs(coefficients: tuple[float, ...], domain: tuple[float, ...]) -> Pairs:
    """The bare rule at as many points of the domain as there are coefficients.

    Raises:
      CoefficientsError: points coincide, or a value is beyond float64.
    """
    lo, hi = domain[:2]
    parts = min(len(coefficients), N_POWERS) - 1
    ends = [*(lo + (hi - lo) * i / parts for i in range(parts)), hi]
    points: list[tuple[float, ...]] = [(x,) for x in ends]
    if len(domain) == 4:
        small, large = domain[2:]
        points = [(x, small) for x in ends]
        points += [(lo, small + (large - small) / 2), (lo, large), (hi, large)]
    check = tuple((*x, float(bare_value(x, coefficients))) for x in points)
    if len(set(points)) < len(points) or not all(math.isfinite(p) for *_, p in check):
        raise CoefficientsError(
            f"coefficients are {coefficients!r}; their rule is beyond float64, or the "
            f"domain {list(domain)!r} is too narrow for a fit"
        )
    return check


def verify_check_pairs(
    coefficients: tuple[float, ...], domain: tuple[float, ...], check: Pairs, where: Where
) -> None:
    """Refuses an entry of a file whose coefficients miss its check pairs."""
    points = {tuple(x) for *x, _ in check}
    ranges = list(zip(domain[::2], domain[1::2], strict=True))
    within = all(lo <= x <= hi for at in points for x, (lo, hi) in zip(at, ranges, strict=True))
    if not within or len(points) < len(check):
        remedy = f"give {len(check)} distinct ones of the domain {list(domain)}"
        raise Refusal((*where, "check"), f"at the points {sorted(points)}", remedy)
    tolerance = CHECK_TOLERANCE * max(abs(p) for *_, p in check)
    for *x, p in check:
        value = float(bare_value(x, coefficients))
        if not abs(value - p) <= tolerance:
            point = ", ".join(f"{number:.6g}" for number in x)
            wrong = f"they give p({point}) = {value:.9g} where check has {p:.9g}"
            cause = _what_happened(coefficients, check, tolerance)
            refuse(list(coefficients), f"{wrong}: {cause}", (*where, "coefficients"))


def _what_happened(coefficients: Sequence[float], check: Pairs, tolerance: float) -> str:
    """Why the coefficients miss their check pairs, and the remedy."""
    backwards = [bare_value(x, coefficients[::-1]) - p for *x, p in check]
    if all(abs(miss) <= tolerance for miss in backwards):
        surface = len(check[0]) == 3
        order = SURFACE_TERMS if surface else "the highest power first"
        return f"they are in reverse order; write {order}"
    return "they were rounded or changed since the fit; restore them"
