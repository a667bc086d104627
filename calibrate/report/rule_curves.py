"""Curves of a rule: beta over entropy, over set size, or over entropy at several set sizes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.evidence.evidence import Head
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths.rule import Rule, beta_of
from calibrate.report.rule_words import TERMS, polynomial

N_SIZES = 5  # curves between the smallest and the largest set size of a domain
BEYOND = 4  # times the largest: the size of one more
ABOVE_ZERO = 1e-6  # nats: at 0 any beta gives the same, and a gate there does nothing
ROUNDING = 1e-9
POINTS = 201  # of a curve


class SizeCurve(NamedTuple):
    """beta of sets of one size, over the entropies that such sets can have."""

    size: int
    entropy: np.ndarray  # (points,) nats, up to log n
    beta: np.ndarray  # (points,)
    inside: np.ndarray  # (points,) bool: in the domain's entropies
    beyond: bool  # whether the size lies outside the domain's sizes


def of_both(rule: Rule) -> bool:
    """Whether beta is a function of entropy and of set size."""
    return rule.by_entropy and rule.by_size


def rule_curve(fit: Coefficients, entry: Entry, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(x as an axis shows it, beta) of one entry at x, which is entropies or log sizes.

    Of a rule of one variable.
    """
    return np.exp(x) if fit.rule.by_size else x, _beta(fit, entry, x, x)


def beta_at(fit: Coefficients, entry: Entry, H: np.ndarray, n: float) -> np.ndarray:
    """beta of one entry at entropies H in sets of n items, of H's shape."""
    return _beta(fit, entry, H, np.full(H.shape, np.log(n)))


def _beta(fit: Coefficients, entry: Entry, H: np.ndarray, log_n: np.ndarray) -> np.ndarray:
    H = np.maximum(H, ABOVE_ZERO)
    return np.asarray(beta_of(H, log_n, entry.coefficients, entry.domain, fit.rule, np))


def size_curves(
    fit: Coefficients, entry: Entry, sizes: Sequence[int] | None = None
) -> list[SizeCurve]:
    """Curves of one entry of a rule of entropy and size, by rising size.

    A set of one item has no entropy, and no curve. `sizes` of None are those of `shown_sizes`.
    """
    lo, hi, small, large = entry.domain
    curves = []
    for n in shown_sizes((small, large)) if sizes is None else sizes:
        log_n = float(np.log(n))
        if log_n <= ABOVE_ZERO:
            continue
        H = np.linspace(ABOVE_ZERO, log_n, POINTS)
        beta = beta_at(fit, entry, H, n)
        beyond = not small - ROUNDING <= log_n <= large + ROUNDING
        curves.append(SizeCurve(n, H, beta, (lo <= H) & (hi >= H), beyond))
    return curves


def shown_sizes(domain: Sequence[float]) -> list[int]:
    """A few set sizes of a domain [lo, hi] of log n: its ends, powers of two, and one beyond."""
    smallest, largest = map(float, np.exp(domain))
    between = np.log2(np.geomspace(smallest, largest, N_SIZES)[1:-1])
    between = 2 ** np.floor(between + 0.5 + ROUNDING)  # halves upwards, on any machine
    sizes = [smallest, *np.clip(between, smallest, largest), largest, BEYOND * largest]
    return sorted({round(float(n)) for n in sizes})


def domain_curve(fit: Coefficients, entry: Entry) -> tuple[np.ndarray, np.ndarray]:
    """(x as an axis shows it, beta) of one entry over its domain.

    Of a rule of entropy and size, that of sets of `largest_size` of the fit.
    """
    if not of_both(fit.rule):
        lo, hi = entry.domain
        return rule_curve(fit, entry, np.linspace(lo, hi, POINTS))
    (curve,) = size_curves(fit, entry, [largest_size(fit)])
    return curve.entropy[curve.inside], curve.beta[curve.inside]


def beta_range(fit: Coefficients, entry: Entry) -> tuple[float, float]:
    """The least and greatest beta of one entry over its domain."""
    if of_both(fit.rule):
        within = [c.beta[c.inside] for c in size_curves(fit, entry) if not c.beyond]
        beta = np.concatenate(within)
    else:
        _, beta = domain_curve(fit, entry)
    return float(beta.min()), float(beta.max())


def beta_text(fit: Coefficients, entry: Entry) -> str:
    """The range of beta over the domain of one entry, in a few letters."""
    least, most = beta_range(fit, entry)
    return f"{most:.2f}" if is_constant(fit, entry) else f"{least:.2f} to {most:.2f}"


def is_constant(fit: Coefficients, entry: Entry) -> bool:
    """Whether beta is the same for every row: neither domain nor entropy nor size matters."""
    rule, terms = fit.rule, list(entry.coefficients)
    constant = terms.pop(TERMS[len(terms)].index(""))
    everywhere = rule.outside == "clamp" and not rule.min_entropy
    return not any(terms) and everywhere and rule.min_beta <= constant <= rule.max_beta


def all_constant(fit: Coefficients) -> bool:
    """Whether every entry is a constant."""
    return all(is_constant(fit, entry) for entry in fit.entries)


def constant_text(entry: Entry) -> str:
    """The rule of an entry that is a constant, in words."""
    return f"beta = {polynomial(entry.coefficients)} for every row"


def typical_betas(
    fit: Coefficients, heads: Iterable[Head], n: float | None = None
) -> dict[Head, float | None]:
    """beta of each head at half of the entropy that n items can have; None where it has no rule.

    Args:
      fit: with entries for layers or heads.
      heads: by (layer, head).
      n: items; None is the largest number that the fit was made of.
    """
    domain = joint_domain(fit.entries)
    log_n = np.asarray(domain[-1] if n is None else np.log(n))
    H = log_n / 2 if fit.rule.by_size else np.asarray(sum(domain[:2]) / 2)
    entries = {head: fit.entry_of(*head) for head in heads}
    return {
        head: None if entry is None else float(_beta(fit, entry, H, log_n))
        for head, entry in entries.items()
    }


def largest_size(fit: Coefficients) -> int:
    """The largest set size that a rule of entropy and size was fitted on."""
    return round(float(np.exp(joint_domain(fit.entries)[3])))


def joint_domain(entries: Sequence[Entry]) -> tuple[float, ...]:
    """The range that the domains of several entries span, in each variable."""
    ends = zip(*(entry.domain for entry in entries), strict=True)
    return tuple(max(column) if i % 2 else min(column) for i, column in enumerate(ends))
