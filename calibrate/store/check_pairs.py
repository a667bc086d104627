"""Check pairs: coefficients that were reversed, rescaled or rounded are refused."""

from calibrate.core.rule import SURFACE_TERMS, bare_value
from calibrate.storage.strict_json import Refusal, Where, refuse
from calibrate.store.coefficients import Entry

CHECK_TOLERANCE = 1e-9  # of the largest |p| among the pairs


def check_pairs(entry: Entry, where: Where) -> None:
    """Refuses an entry whose coefficients miss its check pairs, or triples [H, log n, value]."""
    points = {tuple(x) for *x, _ in entry.check}
    ranges = list(zip(entry.domain[::2], entry.domain[1::2], strict=True))
    within = all(lo <= x <= hi for at in points for x, (lo, hi) in zip(at, ranges, strict=True))
    if not within or len(points) < len(entry.check):
        remedy = f"give {len(entry.check)} distinct ones of the domain {list(entry.domain)}"
        raise Refusal((*where, "check"), f"at the points {sorted(points)}", remedy)
    tolerance = CHECK_TOLERANCE * max(abs(p) for *_, p in entry.check)
    for *x, p in entry.check:
        if not abs(entry.value_at(*x) - p) <= tolerance:
            point = ", ".join(f"{number:.6g}" for number in x)
            wrong = f"they give p({point}) = {entry.value_at(*x):.9g} where check has {p:.9g}"
            place = (*where, "coefficients")
            refuse(list(entry.coefficients), f"{wrong}: {_what_happened(entry, tolerance)}", place)


def _what_happened(entry: Entry, tolerance: float) -> str:
    """Why the coefficients miss their check pairs, and the remedy."""
    backwards = [bare_value(x, entry.coefficients[::-1]) - p for *x, p in entry.check]
    if all(abs(miss) <= tolerance for miss in backwards):
        order = SURFACE_TERMS if len(entry.domain) == 4 else "the highest power first"
        return f"they are in reverse order; write {order}"
    return "they were rounded or changed since the fit; restore them"
