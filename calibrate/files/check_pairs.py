"""Check pairs: points that a file's coefficients must reproduce, and why they do not."""

from typing import Any

from calibrate.files.coefficients import Entry
from calibrate.files.strict_json import Refusal, Where, refuse
from calibrate.maths.rule import N_POWERS, TERMS, surface

TOLERANCE = 1e-9  # of the largest |p| among the pairs

Pairs = tuple[tuple[float, ...], ...]


def check_polynomial(entry: Entry, where: Where) -> None:
    """As many points of the domain as coefficients determine a rule: it must meet them.

    Args:
      entry: whose coefficients and check pairs, or triples [H, log n, value], were read from a
        file.
      where: its path in the file.
    Raises:
      CoefficientsError: the pairs determine nothing, or the coefficients miss them.
    """
    if not (_in_domain(entry) if len(entry.domain) == 2 else _in_domain_of_both(entry)):
        _refuse_points(entry, where)
    if _miss(entry.coefficients, entry.check):
        misses = [abs(entry.value_at(*x) - p) for *x, p in entry.check]
        worst = max(range(len(misses)), key=misses.__getitem__)
        *x, expected = entry.check[worst]
        point = ", ".join(f"{number:.6g}" for number in x)
        refuse(
            list(entry.coefficients),
            f"they give p({point}) = {entry.value_at(*x):.9g} where check[{worst}] "
            f"has {expected:.9g}: {_what_happened(entry)}",
            (*where, "coefficients"),
        )  # fmt: skip


def _in_domain(entry: Entry) -> bool:
    """Whether the points are distinct ones of the domain: they determine a polynomial."""
    lo, hi = entry.domain
    points = [x for x, _ in entry.check]
    return len(set(points)) == len(points) and lo <= min(points) and max(points) <= hi


def _in_domain_of_both(entry: Entry) -> bool:
    """Whether the points are of the domain and determine a rule of entropy and size.

    Five entropies at one log n determine its polynomial of H there. At another log n = L the rule
    differs by L - L0 times a plane in H and L; three points that are not on one line determine it.
    """
    lo, hi, small, large = entry.domain
    if not all(lo <= H <= hi and small <= log_n <= large for H, log_n, _ in entry.check):
        return False
    same = entry.check[0][1]
    points = {(H, log_n) for H, log_n, _ in entry.check[:N_POWERS] if log_n == same}
    units = [((H - lo) / (hi - lo), (log_n - small) / (large - small))
             for H, log_n, _ in entry.check[N_POWERS:] if log_n != same]  # fmt: skip
    if len(points) < N_POWERS or len(units) < 3:
        return False
    (a, x), (b, y), (c, z) = units
    return abs((b - a) * (z - x) - (c - a) * (y - x)) > TOLERANCE


def _refuse_points(entry: Entry, where: Where) -> None:
    lo, hi = entry.domain[:2]
    points: list[Any] = [x for x, *_ in entry.check]
    remedy = f"give {len(points)} distinct ones of the domain [{lo}, {hi}]"
    if len(entry.domain) == 4:
        points = [tuple(float(f"{number:.4g}") for number in x) for *x, _ in entry.check]
        remedy = (
            f"give (H, log n) of the domain {list(entry.domain)}: five entropies at one log n, and "
            "three points at others that are not on one line"
        )
    raise Refusal((*where, "check"), f"at the points {points}", remedy)


def _miss(coefficients: tuple[float, ...], check: Pairs) -> bool:
    """Whether the rule misses any of the pairs."""
    tolerance = TOLERANCE * max([abs(pair[-1]) for pair in check])
    if len(check[0]) == 3:
        misses = [surface(H, log_n, coefficients) - p for H, log_n, p in check]
        return not all(abs(miss) <= tolerance for miss in misses)
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
        order = TERMS if len(entry.domain) == 4 else "the highest power first"
        return f"they are in reverse order; write {order}"
    return (
        "they were rounded or changed since the fit, or the domain or the check was; restore them"
    )
