"""Rules and fits as text, and as curves of beta over entropy or set size."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from calibrate.core.rule import TERMS, Rule
from calibrate.evidence.evidence import OptionalHeadId
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry

COUNTS = {  # counts of rows that a file may have, in words
    "misranked": "misranked",
    "ties": "ties",
    "nan": "with NaN",
    "inf": "with +inf",
    "masked_target": "with a masked target",
    "interior": "with a finite optimal beta",
    "sharp": "with the optimum at infinity",
    "flat": "with the optimum at zero",
    "unsolved": "not converged",
    "gated": "below the entropy threshold",
    "at_bound": "at a bound of beta",
}
N_SIZES = 5  # curves between the smallest and the largest set size of a domain
BEYOND = 4  # times the largest: the size of one more
POINTS = 201  # of a curve


def polynomial(rule: Rule, coefficients: tuple[float, ...]) -> str:
    """The bare rule, without guards, written out with six digits; terms of 0 are left out."""
    text = ""
    for value, term in zip(coefficients, TERMS[rule.kind], strict=True):
        sign = "-" if value < 0 else "+"
        if value:
            factor = _factor(term)
            text += f" {sign} {abs(value):.6g}{factor}" if text else f"{value:.6g}{factor}"
    return text or "0"


def _factor(term: str) -> str:
    """One of TERMS behind its coefficient: " H^4", " (log n)^2", " H log n", and "" of "1"."""
    words = ["(log n)" + x.removeprefix("L") if x.startswith("L^") else x for x in term.split()]
    return "".join(f" {'log n' if word == 'L' else word}" for word in words if word != "1")


def symbols(rule: Rule) -> str:
    """The symbols of what beta is a function of: "H", "n" or "H, n"."""
    return ", ".join(["H"] * rule.by_entropy + ["n"] * rule.by_size)


def span(domain: Sequence[float], rule: Rule) -> str:
    """The range of entropies, of set sizes, or of both that a rule was fitted on, in words."""
    if rule.depends_on_both:
        lo, hi, small, large = domain
        # An entropy of more than log n is no set's.
        return f"{_entropies(lo, min(hi, large))} and sets of {_sizes(small, large)}"
    return _entropies(*domain) if rule.by_entropy else _sizes(*domain)


def _entropies(lo: float, hi: float) -> str:
    return f"{lo:.4g} .. {hi:.4g} nats"


def _sizes(lo: float, hi: float) -> str:
    """A range of set sizes, given the logarithms of its ends."""
    return f"{items(lo)} .. {items(hi)} items"


def items(log_n: float) -> str:
    """A set size in words, given its logarithm."""
    n = math.exp(log_n)
    return f"{n:,.0f}" if n < 1e9 else f"{n:.3g}"


def outside(rule: Rule) -> str:
    """The rule outside its domain, in words."""
    if rule.depends_on_both:
        return (
            "H is clamped; beyond the sizes, beta goes on along log n where it rises, and is held "
            "where it falls"
        )
    if not rule.by_entropy:
        return "a line that rises goes on outside, and one that falls is held at its ends"
    return "H is clamped to it" if rule.outside == "clamp" else "beta is 1 outside"


def guards(rule: Rule) -> str:
    """The bounds of beta, and where it is 1, in words."""
    bounds = f"{rule.min_beta:g} <= beta <= {rule.max_beta:g}"
    if not rule.min_entropy:
        return bounds
    return f"beta = 1 up to H = {rule.min_entropy:g} nats; above, {bounds}"


# Of options, by their keys in files, where the command line has other names.
OPTION_NAMES = {
    "gate": "min-entropy",
    "force": "kind",
    "prior_rows": "pseudo-observations",
    "strength": "interpolation",
    "allowed_loss": "max-kl",
    "trained_up_to": "trained-up-to",
    "min_beta": "min-beta",
}


def facts(fit: Coefficients) -> Iterable[tuple[str, str]]:
    """(label, text) of the rows, source and provenance that the file has."""
    quality, source, provenance = fit.quality, fit.source, fit.provenance
    rows = quality.get("rows", {})
    used = rows.get("used", rows.get("interior"))
    if used is not None and "rows" in rows:
        counts = [f"{rows[key]:,} {words}" for key, words in COUNTS.items() if rows.get(key)]
        yield "inputs", f"{used:,} used of {rows['rows']:,}: {', '.join(counts)}"
    for key in ("head", "fingerprint", "collection", "seed", "citation"):
        if key in source:
            yield key, str(source[key])
    if "options" in source:
        options = {OPTION_NAMES.get(key, key): x for key, x in source["options"].items()}
        yield "options", _pairs(options)
    if provenance:
        tools = provenance.get("versions", {}).items()
        versions = ", ".join(f"{tool} {version}" for tool, version in tools)
        yield "made", ", ".join(filter(None, (provenance.get("created"), versions)))


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


class SizeCurve(NamedTuple):
    """beta of sets of one size, over the entropies that such sets can have."""

    size: int
    entropy: np.ndarray  # (points,) nats, up to log n
    beta: np.ndarray  # (points,)
    inside: np.ndarray  # (points,) bool: in the domain's entropies
    beyond: bool  # whether the size is larger than those of the domain


def rule_curve(fit: Coefficients, entry: Entry, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(x as an axis shows it, beta) of one entry at x, which is entropies or log sizes.

    Of a rule of one variable.
    """
    return np.exp(x) if fit.rule.by_size else x, entry.beta_at(x, x, fit.rule)


def size_curves(fit: Coefficients, entry: Entry) -> list[SizeCurve]:
    """Curves of one entry of a rule of entropy and size: sizes of its domain, and one beyond.

    A set of one item has no entropy, and no curve.
    """
    lo, hi, small, large = entry.domain
    sizes = np.exp([*np.linspace(small, large, N_SIZES), large + math.log(BEYOND)])
    curves = []
    for n in sorted({round(float(size)) for size in sizes} - {1}):
        H = np.linspace(0, math.log(n), POINTS)
        beta = entry.beta_at(H, np.full(POINTS, math.log(n)), fit.rule)
        curves.append(SizeCurve(n, H, beta, (lo <= H) & (hi >= H), n > 2 * math.exp(large)))
    return curves


def beta_range(fit: Coefficients, entry: Entry) -> tuple[float, float]:
    """The least and greatest beta of one entry over its domain."""
    if fit.rule.depends_on_both:
        within = [c.beta[c.inside] for c in size_curves(fit, entry) if not c.beyond]
        beta = np.concatenate(within)
    else:
        lo, hi = entry.domain
        _, beta = rule_curve(fit, entry, np.linspace(lo, hi, POINTS))
    return float(beta.min()), float(beta.max())


def beta_text(fit: Coefficients, entry: Entry) -> str:
    """The range of beta over the domain of one entry, in a few letters."""
    least, most = beta_range(fit, entry)
    is_constant = entry.constant_beta(fit.rule) is not None
    return f"{most:.2f}" if is_constant else f"{least:.2f} to {most:.2f}"


def entry_heading(fit: Coefficients) -> str:
    """The heading of a column of `entry_text`."""
    return "beta" if fit.ignores_inputs else f"beta({symbols(fit.rule)})"


def entry_text(fit: Coefficients, entry: Entry | None) -> str:
    """The rule of a head in a table: a formula, or the least and most beta of a long one."""
    if entry is None:
        return "1"
    if fit.ignores_inputs or fit.rule.depends_on_both:
        return beta_text(fit, entry)
    return polynomial(fit.rule, entry.coefficients)


def typical_betas(
    fit: Coefficients, heads: Iterable[OptionalHeadId], n: float | None = None
) -> dict[OptionalHeadId, float | None]:
    """beta of each head at half of the entropy that n items can have; None where it has no rule.

    Args:
      fit: with entries for layers or heads.
      heads: by (layer, head).
      n: items; None is the largest number that the fit was fitted to.
    """
    domain = joint_domain(fit.entries)
    log_n = np.asarray(domain[-1] if n is None else np.log(n))
    H = log_n / 2 if fit.rule.by_size else np.asarray(sum(domain[:2]) / 2)
    entries = {head: fit.entry_of(*head) for head in heads}
    return {
        head: None if entry is None else float(entry.beta_at(H, log_n, fit.rule))
        for head, entry in entries.items()
    }


def joint_domain(entries: Sequence[Entry]) -> tuple[float, ...]:
    """The range that the domains of several entries span, in each variable."""
    ends = zip(*(entry.domain for entry in entries), strict=True)
    return tuple(max(column) if i % 2 else min(column) for i, column in enumerate(ends))
