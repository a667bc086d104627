"""Check pairs: do the coefficients still give the polynomial that was fitted?"""

from fractions import Fraction

from calibrate.files.coefficients import N_COEFFICIENTS, Entry
from calibrate.files.strict_json import Path, refuse, refuse_state
from calibrate.maths.rule import horner

TOLERANCE = 1e-9  # of the largest |p| among the pairs

Pairs = tuple[tuple[float, float], ...]


def verify(entry: Entry, where: Path) -> None:
    """Five distinct points of the domain determine a quartic: the polynomial must meet them.

    Args:
      entry: whose coefficients and check pairs were read from a file.
      where: its path in the file.
    Raises:
      CoefficientsError: the pairs determine nothing, or the coefficients miss them.
    """
    lo, hi = entry.domain
    points = [H for H, _ in entry.check]
    if len(set(points)) < N_COEFFICIENTS or min(points) < lo or max(points) > hi:
        refuse_state(
            (*where, "check"), f"at the entropies {points}",
            f"give five distinct ones of the domain [{lo}, {hi}]",
        )  # fmt: skip
    missed = _first_missed(entry.coefficients, entry.check)
    if missed is not None:
        H, expected = entry.check[missed]
        refuse(
            (*where, "coefficients"), list(entry.coefficients),
            f"they give p({H:.6g}) = {horner(H, entry.coefficients):.9g} where check[{missed}] "
            f"has {expected:.9g}: {_what_happened(entry)}",
        )  # fmt: skip


def _first_missed(coefficients: tuple[float, ...], check: Pairs) -> int | None:
    c4, c3, c2, c1, c0 = coefficients
    tolerance = TOLERANCE * max([abs(p) for _, p in check])
    for i, (H, expected) in enumerate(check):
        # `horner`, written out: files of a thousand heads are read too.
        if not abs((((c4 * H + c3) * H + c2) * H + c1) * H + c0 - expected) <= tolerance:
            return i
    return None


def _what_happened(entry: Entry) -> str:
    """Why the coefficients miss their check pairs, and the remedy."""
    if _first_missed(entry.coefficients[::-1], entry.check) is None:
        return "they are in reverse order; write the highest power first"
    digits = max(len(repr(c).partition(".")[2]) for c in entry.coefficients)
    half_a_digit = Fraction(50_001, 100_000) / 10**digits  # and a little, for the pairs' own digits
    differences = zip(_interpolate(entry.check), entry.coefficients, strict=True)
    if all(abs(original - Fraction(c)) <= half_a_digit for original, c in differences):
        return f"they were rounded to {digits} digits; restore them all"
    return "they, the domain or the check changed since the fit; restore the file"


def _interpolate(check: Pairs) -> list[Fraction]:
    """Coefficients, highest power first, of the quartic through five points (Lagrange, exact)."""
    total = [Fraction(0)] * N_COEFFICIENTS
    for H, p in check:
        basis = [Fraction(p)]
        for other, _ in check:
            if other != H:
                root, gap = Fraction(other), Fraction(H) - Fraction(other)
                longer = zip([*basis, Fraction(0)], [Fraction(0), *basis], strict=True)
                basis = [(a - root * b) / gap for a, b in longer]
        total = [a + b for a, b in zip(total, basis, strict=True)]
    return total
