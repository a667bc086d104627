"""Wording of results: numbers, rules and fits as text."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calibrate.files.bad_rows import BAD
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths.rule import ENTROPY_AND_SIZE, ENTROPY_POLYNOMIAL, LOG_SIZE, Rule

POWERS_OF_ENTROPY = (" H^4", " H^3", " H^2", " H", "")
SYMBOLS = {LOG_SIZE: "n", ENTROPY_POLYNOMIAL: "H", ENTROPY_AND_SIZE: "H, n"}  # of what beta is
VARIABLES = {
    LOG_SIZE: "set size", ENTROPY_POLYNOMIAL: "entropy", ENTROPY_AND_SIZE: "entropy and set size",
}  # fmt: skip
FORMS = {
    LOG_SIZE: "kappa log n + b",
    ENTROPY_POLYNOMIAL: "a polynomial of degree 4 in H",
    ENTROPY_AND_SIZE: "p(H) + (a H + b log n + c) log n, p of degree 4",
}
TERMS = {  # by the number of coefficients, in the order of `maths/rule.py`
    2: (" log n", ""),
    5: POWERS_OF_ENTROPY,
    8: (*POWERS_OF_ENTROPY, " H log n", " (log n)^2", " log n"),
}


def polynomial(coefficients: tuple[float, ...]) -> str:
    """The bare rule, without guards, written out with six digits; terms of 0 are left out."""
    terms = [
        f"{'-' if value < 0 else '+'} {abs(value):.6g}{factor}"
        for value, factor in zip(coefficients, TERMS[len(coefficients)], strict=True)
        if value
    ]
    if not terms:
        return "0"
    return " ".join(terms).removeprefix("+ ").replace("- ", "-", terms[0].startswith("-"))


def span(domain: Sequence[float], kind: str) -> str:
    """A range of entropies, of set sizes, or of both, in words."""
    if kind == ENTROPY_AND_SIZE:
        lo, hi, small, large = domain
        entropies = span((lo, min(hi, large)), "")  # more than log n is no set's
        return f"{entropies} and sets of {span((small, large), LOG_SIZE)}"
    lo, hi = domain
    if kind == LOG_SIZE:
        return f"{items(lo)} .. {items(hi)} items"
    return f"{lo:.4g} .. {hi:.4g} nats"


def items(log_n: float) -> str:
    """A set size in words, given its logarithm."""
    n = math.exp(log_n)
    return f"{n:,.0f}" if n < 1e9 else f"{n:.3g}"


def outside(rule: Rule, entries: Sequence[Entry]) -> str:
    """What happens outside the domain of each entry, in words."""
    if rule.kind == ENTROPY_AND_SIZE:
        return (
            "H is clamped; beyond the sizes, beta goes on along log n where it rises, and is held "
            "where it falls"
        )
    if rule.kind == LOG_SIZE:
        falls = {entry.coefficients[0] < 0 for entry in entries}
        if len(falls) == 2:
            return "outside, lines that rise go on, and the others hold beta at their ends"
        return "beta is held at its ends outside" if True in falls else "the line goes on outside"
    return "H is clamped to it" if rule.outside == "clamp" else "beta is 1 outside"


def guards(rule: Rule) -> str:
    """The bounds of beta, and where it is 1, in words."""
    bounds = f"{rule.min_beta:g} <= beta <= {rule.max_beta:g}"
    if not rule.min_entropy:  # at H = 0 any beta gives the same
        return f"{bounds} at every {VARIABLES[rule.kind]}"
    return f"beta = 1 up to H = {rule.min_entropy:g} nats; above, {bounds}"


def left_out(rows: Mapping[str, int]) -> list[tuple[int, str]]:
    """(count, reason) of the rows that were not fitted, if the file has them."""
    if not {"rows", "misranked", "kept", "interior"} <= rows.keys():
        return []
    reasons = [(sum(rows.get(reason, 0) for reason in BAD), "bad (NaN, +inf or a masked target)")]
    if "used" in rows:
        gated = min(rows.get("gated", 0), rows["kept"] - rows["used"])
        reasons += [
            (rows["rows"] - rows["kept"] - reasons[0][0], "not kept"),
            (gated, "at or below the gate"),
            (rows["kept"] - rows["used"] - gated, "not selected, without weight, or not usable"),
        ]
    else:
        reasons += [
            (
                rows["rows"] - rows["misranked"],
                "not misranked: no item's logit is above the target's",
            ),
            (rows["misranked"] - rows["kept"], "over the byte budget"),
            (rows.get("flat", 0), "flat (no positive optimum)"),
            (rows.get("unsolved", 0), "unsolved"),
        ]
    return [(count, reason) for count, reason in reasons if count]


def through_a_model(fit: Coefficients) -> bool:
    """Whether a fit was made through a model: of answers by tokens, not of rows by set size."""
    return bool(fit.source.get("options", {}).get("through") == "model")


def facts(fit: Coefficients) -> Iterable[tuple[str, str]]:
    """(label, text) of the rows, source and provenance that the file has."""
    quality, source, made = fit.quality, fit.source, fit.provenance
    rows = quality.get("rows", {})
    used = rows.get("used", rows.get("interior"))
    if used is not None and "rows" in rows:
        yield "rows", f"{used:,} used of {rows['rows']:,} seen"
    if reasons := left_out(rows):
        yield "left out", ", ".join(f"{count:,} {reason}" for count, reason in reasons)
    if quality.get("residuals"):
        yield "residuals", _pairs(quality["residuals"])
    if quality.get("learning_curve"):
        yield "learning", "; ".join(map(_pairs, quality["learning_curve"]))
    if "condition" in quality:
        yield "condition", f"{quality['condition']:.4g}"
    for key in ("head", "fingerprint", "collection", "seed", "citation"):
        if key in source:
            yield key, str(source[key])
    if "options" in source:
        yield "options", _pairs(source["options"])
    versions = ", ".join(f"{tool} {version}" for tool, version in made.get("versions", {}).items())
    if made:
        yield "made", ", ".join(filter(None, (made.get("created"), versions)))


def _pairs(mapping: Mapping[str, Any]) -> str:
    return ", ".join(f"{value_text(key)} {value_text(value)}" for key, value in mapping.items())


def value_text(value: Any) -> str:
    """A JSON value as printable text, numbers with six digits."""
    if value is None:
        return "absent or null"
    if isinstance(value, list):
        return ", ".join(map(value_text, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    printable = isinstance(value, str) and value.isprintable()
    return value if printable else json.dumps(value)
