"""Rules as text, and as curves of beta over entropy or set size."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from calibrate.core.rule import Rule, formula
from calibrate.evidence.evidence import OptionalHeadId
from calibrate.store.entry import Entry
from calibrate.store.fit import Fit

N_SIZES = 5  # curves between the smallest and the largest set size of a domain
BEYOND = 4  # times the largest: the size of one more
POINTS = 201  # of a curve


def symbols(rule: Rule) -> str:
    """The symbols of what beta is a function of: "H", "n" or "H, n"."""
    return ", ".join(["H"] * rule.by_entropy + ["n"] * rule.by_size)


def span(domain: Sequence[float], rule: Rule) -> str:
    """The range of entropies, of set sizes, or of both that a rule was fitted on, in words.

    "every input" of a constant, which has no domain.
    """
    if rule.depends_on_both:
        lo, hi, small, large = domain
        # The entropy of n items is at most log n.
        return f"{_entropies(lo, min(hi, large))} and sets of {_sizes(small, large)}"
    if rule.by_size:
        return _sizes(*domain)
    return _entropies(*domain) if domain else "every input"


def _entropies(lo: float, hi: float) -> str:
    return f"{round(lo, 4):.4g} .. {hi:.4g} nats"


def _sizes(lo: float, hi: float) -> str:
    """A range of set sizes, given the logarithms of its ends."""
    return f"{_items(lo)} .. {_items(hi)} items"


def _items(log_n: float) -> str:
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
    bounds = f"{bound_text(rule.min_beta)} <= beta <= {bound_text(rule.max_beta)}"
    if not rule.min_entropy:
        return bounds
    return f"beta = 1 up to H = {rule.min_entropy:g} nats; above, {bounds}"


def bound_text(beta: float) -> str:
    """A bound of beta, or a tick of its axis: "64", "1/1024" where that is shorter."""
    inverse = 1 / beta
    return f"1/{inverse:g}" if beta < 1 and inverse == round(inverse) else f"{beta:g}"


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


def rule_curve(fit: Fit, entry: Entry, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(x as an axis shows it, beta) of one entry at x, which is entropies or log sizes.

    Of a rule of one variable.
    """
    return np.exp(x) if fit.rule.by_size else x, entry.beta_at(x, x, fit.rule)


def size_curves(fit: Fit, entry: Entry) -> list[SizeCurve]:
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


def beta_range(fit: Fit, entry: Entry) -> tuple[float, float]:
    """The least and greatest beta of one entry over its domain."""
    if fit.rule.depends_on_both:
        within = [c.beta[c.inside] for c in size_curves(fit, entry) if not c.beyond]
        beta = np.concatenate(within)
    else:
        lo, hi = entry.domain or (0.0, 1.0)  # a constant has none
        _, beta = rule_curve(fit, entry, np.linspace(lo, hi, POINTS))
    return float(beta.min()), float(beta.max())


def _range_text(fit: Fit, entry: Entry) -> str:
    """The range of beta over the domain of one entry, in a few letters."""
    least, most = beta_range(fit, entry)
    is_constant = entry.constant_beta(fit.rule) is not None
    return f"{most:.2f}" if is_constant else f"{least:.2f} to {most:.2f}"


def entry_heading(fit: Fit) -> str:
    """The heading of a column of `entry_text`."""
    return "beta" if fit.ignores_inputs else f"beta({symbols(fit.rule)})"


def entry_text(fit: Fit, entry: Entry | None) -> str:
    """The rule of a head in a table: a formula, or the least and most beta of a long one."""
    if entry is None:
        return "1"
    if fit.ignores_inputs or fit.rule.by_entropy:
        return _range_text(fit, entry)
    return formula(fit.rule.kind, entry.coefficients)


def typical_betas(
    fit: Fit, heads: Iterable[OptionalHeadId], n: float | None = None
) -> dict[OptionalHeadId, float | None]:
    """beta of each head at one n and entropy; None where it has no rule.

    The entropy is half of the highest that n items can have; of a rule of entropy alone, the middle
    of its domain.

    Args:
      fit: with entries for layers or heads.
      heads: by (layer, head).
      n: items; None is the largest number that the fit was fitted to.
    """
    domain = joint_domain(fit.entries) or (0.0, 1.0)  # constants have none
    log_n = np.asarray(domain[-1] if n is None else np.log(n))
    H = log_n / 2 if fit.rule.by_size else np.asarray(sum(domain[:2]) / 2)
    entries = {head: fit.entry_of(*head) for head in heads}
    return {
        head: None if entry is None else float(entry.beta_at(H, log_n, fit.rule))
        for head, entry in entries.items()
    }


def joint_domain(entries: Sequence[Entry]) -> tuple[float, ...]:
    """The range that the domains of several entries span, in each variable; () of constants."""
    ends = zip(*(entry.domain for entry in entries), strict=True)
    return tuple(max(column) if i % 2 else min(column) for i, column in enumerate(ends))
