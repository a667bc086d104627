"""Check pairs: points that a file's coefficients must reproduce, and why they do not."""

from decimal import Decimal
from fractions import Fraction

from calibrate.files.coefficients import Entry
from calibrate.files.strict_json import Refusal, Where, refuse
from calibrate.maths.rule import horner

TOLERANCE = 1e-9  # of the largest |p| among the pairs

Pairs = tuple[tuple[float, float], ...]


def check_polynomial(entry: Entry, where: Where) -> None:
    """As many points of the domain as coefficients determine a polynomial: it must meet them.

    Args:
      entry: whose coefficients and check pairs were read from a file.
      where: its path in the file.
    Raises:
      CoefficientsError: the pairs determine nothing, or the coefficients miss them.
    """
    lo, hi = entry.domain
    points = [x for x, _ in entry.check]
    if len(set(points)) < len(entry.coefficients) or min(points) < lo or max(points) > hi:
        remedy = f"give {len(entry.coefficients)} distinct ones of the domain [{lo}, {hi}]"
        raise Refusal((*where, "check"), f"at the points {points}", remedy)
    if _miss(entry.coefficients, entry.check):
        misses = [abs(horner(x, entry.coefficients) - p) for x, p in entry.check]
        worst = max(range(len(misses)), key=misses.__getitem__)
        x, expected = entry.check[worst]
        refuse(
            list(entry.coefficients),
            f"they give p({x:.6g}) = {horner(x, entry.coefficients):.9g} where check[{worst}] "
            f"has {expected:.9g}: {_what_happened(entry)}",
            (*where, "coefficients"),
        )  # fmt: skip


def _miss(coefficients: tuple[float, ...], check: Pairs) -> bool:
    """Whether the polynomial misses any of the pairs."""
    tolerance = TOLERANCE * max([abs(p) for _, p in check])
    for x, expected in check:
        # `horner`, written out: files of a thousand heads are read too.
        p = 0.0
        for coefficient in coefficients:
            p = p * x + coefficient
        if not abs(p - expected) <= tolerance:
            return True
    return False


def _what_happened(entry: Entry) -> str:
    """Why the coefficients miss their check pairs, and the remedy."""
    if not _miss(entry.coefficients[::-1], entry.check):
        return "they are in reverse order; write the highest power first"
    given = list(map(Fraction, entry.coefficients))
    originals = _interpolate(entry.check)
    gaps = [abs(o - c) for o, c in zip(originals, given, strict=True)]
    if all(gap <= _half_a_digit(c) for gap, c in zip(gaps, entry.coefficients, strict=True)):
        return "they were rounded; restore all their digits"
    scale = max(given, key=abs) / (originals[given.index(max(given, key=abs))] or 1)
    if all(abs(c - scale * o) * 10**6 <= abs(c) for o, c in zip(originals, given, strict=True)):
        return f"they were multiplied by {_spell(scale)}; restore them"
    if sum(sorted(gaps)[:-1]) * 10**6 < max(gaps):
        i = gaps.index(max(gaps))
        return f"coefficients[{i}] alone changed, from about {_spell(originals[i])}; restore it"
    return "they, the domain or the check changed since the fit; restore the file"


def _half_a_digit(coefficient: float) -> Fraction:
    """Of the last decimal place as written, and a little for the pairs' own digits."""
    exponent = Decimal(repr(coefficient)).as_tuple().exponent
    assert isinstance(exponent, int)  # coefficients are finite
    return Fraction(50_001, 100_000) * Fraction(10) ** exponent


def _spell(value: Fraction) -> str:
    try:
        return f"{float(value):.9g}"
    except OverflowError:
        return "a number beyond float64"


def _interpolate(check: Pairs) -> list[Fraction]:
    """Coefficients, highest power first, of the polynomial through points (Lagrange, exact)."""
    total = [Fraction(0)] * len(check)
    for x, p in check:
        basis = [Fraction(p)]
        for other, _ in check:
            if other != x:
                root, gap = Fraction(other), Fraction(x) - Fraction(other)
                longer = zip([*basis, Fraction(0)], [Fraction(0), *basis], strict=True)
                basis = [(a - root * b) / gap for a, b in longer]
        total = [a + b for a, b in zip(total, basis, strict=True)]
    return total
