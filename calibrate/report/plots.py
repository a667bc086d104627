"""Figures: scores of rules, the rule of a fit, maps of heads, and what a diagnosis measured."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from calibrate.core.rule_kinds import KINDS
from calibrate.evidence.calibration_error import reliability
from calibrate.evidence.evidence import OWN, PLAIN, Evidence
from calibrate.evidence.metrics import LOG_P, PER_CENT, RIGHT, ItemKind, Metric
from calibrate.report.labels import label
from calibrate.report.plot_style import (
    BETA_LABEL,
    ENTROPY_LABEL,
    GATED,
    HEAD_STYLES,
    OTHERS,
    OURS,
    PAPER,
    SHADE,
    STYLES,
    legend_below,
    plot_head_map,
    plot_size_curves,
    short,
    sizes_axis,
)
from calibrate.report.rules import rule_curve, size_curves, typical_betas
from calibrate.store.coefficients import Coefficients

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from calibrate.fitting.diagnosis import HeadDiagnosis

# What people compare, in this order: of more curves than these, none can be told from another.
COMPARED = (OWN, PLAIN, "paper", "procedure", "hard", "log-n", "constant", "kappa-log-n")
MAX_CURVES = 5
INFINITE = ("hard", "beta-64")  # the log-likelihood of these would hide all others
LEGEND = {  # names that are shorter than in tables
    "paper": "published polynomial",
    "procedure": "this head's polynomial",
    **{kind.score_name: f"{kind.name}, q = 0" for kind in KINDS.values()},
}
BEYOND_NOTE = "Rules far beyond this fit are in the tables alone."
SPREAD = {"size": 0.2, "template": 0.4}  # of the rules around their place: no bar hides another
FAR = 4.0  # times the largest gain of the fit: what gains or loses more is out of the figure


def plot_scores(
    ax: "Axes",
    evidence: Evidence,
    metric: Metric,
    by: str = "size",
    own: str = OWN,
    gain: bool = False,
    name: str = "",
) -> "Axes":
    """A metric of the rules that people compare; bars of two standard errors on either side.

    Args:
      ax: where to draw.
      evidence: of the rules.
      metric: LOG_P, P or RIGHT.
      by: "size" or "template".
      own: the rule that is highlighted.
      gain: draw gains over the baseline, not means.
      name: of `own`, for people.
    """
    parts, others = evidence.by(by), iter(OTHERS * len(evidence.rules))
    rules = [rule for rule in _compared(evidence, own, metric) if not (gain and rule == PLAIN)]
    for i, rule in enumerate(rules):
        colour, marker, dash = STYLES.get(OWN if rule == own else rule) or next(others)
        x = np.arange(len(parts)) + SPREAD[by] * ((i + 0.5) / len(rules) - 0.5)
        ax.errorbar(
            x,
            *_means_and_bars(parts.values(), rule, metric, gain),
            color=colour,
            marker=marker,
            ms=5,
            lw=1.4,
            capsize=2,
            ls=dash if by == "size" else "",
            zorder=3 if rule == own else 2,
            label=short(name if rule == own and name else LEGEND.get(rule, label(rule))),
        )
    ticks = [evidence.span(key) if by == "size" else str(key) for key in parts]
    ax.set_xticks(np.arange(len(parts)), ticks, rotation=45)
    if by == "size":
        ax.set_xlabel("tokens" if evidence.of.items.in_tokens else "set size n")
    ax.grid(alpha=0.25, lw=0.5)
    if gain:
        ax.axhline(0, color="#777777", lw=0.8)
        _limit(ax, _means_and_bars(parts.values(), own, metric, gain)[0])
    ax.set_ylabel(_scores_label(metric, evidence.of.items, gain))
    legend_below(ax)
    return ax


def _means_and_bars(
    parts: Iterable[Evidence], rule: str, metric: Metric, gain: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(parts,) means or gains of a rule, and (2, parts) lengths of its bars, down and up."""
    estimates = [x.gain(rule, metric) if gain else x.mean(rule, metric) for x in parts]
    pairs = np.array([(estimate.mean, estimate.error) for estimate in estimates], float)
    mean, error = abs(metric.factor) * pairs.T  # up is better
    low, high = (-100 * gain, 100) if metric.unit == PER_CENT else (-np.inf, np.inf)
    return mean, np.clip([mean - low, high - mean], 0, 2 * np.nan_to_num(error))


def _scores_label(metric: Metric, items: ItemKind, gain: bool) -> str:
    """The label of an axis of scores: "gain in accuracy (points)"."""
    label = items.label_of_right if metric == RIGHT else metric.label
    unit = metric.unit_of_change if gain else metric.unit
    return f"{'gain in ' * gain}{label} ({unit})"


def plot_reliability(ax: "Axes", evidence: Evidence, own: str, name: str) -> "Axes":
    """The share of items whose target is on top against the top item's probability; two rules."""
    for rule, style, label_of_rule in ((PLAIN, PLAIN, label(PLAIN)), (own, OWN, name)):
        colour, marker, dash = STYLES[style]
        bins = reliability(evidence, rule)
        ax.plot(
            100 * bins.confidence,
            100 * bins.ranked,
            color=colour,
            marker=marker,
            ls=dash,
            ms=5,
            lw=1.4,
            label=short(label_of_rule),
        )
    ax.axline((0, 0), slope=1, color="#777777", ls="--", lw=1.2, label="perfectly calibrated")
    ax.set(xlabel="probability of the top item (%)", ylabel="the top item is the target (%)")
    ax.grid(alpha=0.25, lw=0.5)
    legend_below(ax)
    return ax


def _compared(evidence: Evidence, own: str, metric: Metric) -> list[str]:
    """The rules that are drawn, in their own order."""
    hidden = INFINITE if metric == LOG_P else ()
    wanted = (rule for rule in (own, *COMPARED, *evidence.rules) if rule not in hidden)
    known = [rule for rule in wanted if rule in evidence.rules]
    shown = list(dict.fromkeys(known))[:MAX_CURVES]
    return [rule for rule in evidence.rules if rule in shown]


def _limit(ax: "Axes", gains: np.ndarray) -> None:
    """Leaves what is far beyond the fit's own gains out of the axis: it would hide them."""
    reach = np.abs(np.nan_to_num(gains)).max(initial=0)
    low, high = ax.get_ylim()
    if reach > 0:
        ax.set_ylim(max(low, -FAR * reach), min(high, FAR * reach))


def plot_gain_map(ax: "Axes", evidence: Evidence, rule: str) -> "Axes":
    """A map of layers and heads: what a fit adds to the log-likelihood; x where it has no rule."""
    gains = {
        head: float(part.gain(rule, LOG_P).mean) if evidence.names(rule, head) else None
        for head, part in evidence.by("head").items()
    }
    return plot_head_map(ax, gains, "gain in log-likelihood (nats)", "PuOr_r")


def plot_rule(ax: "Axes", fit: Coefficients) -> "Axes":
    """beta against entropy, or set size, past both ends of the domain; with its band if known.

    A rule of entropy and size is a curve for each of a few set sizes.
    """
    if fit.rule.depends_on_both:
        plot_size_curves(ax, size_curves(fit, fit.entries[0]))
        ax.plot([], [], color=GATED, lw=0.8, label="outside the domain")
        ax.set_xlim(left=0)
    else:
        _plot_rule_of_one_variable(ax, fit)
    ax.axhline(1, color=PAPER, ls="--", lw=1, label="baseline")
    ax.set(ylabel=BETA_LABEL, title=short(fit.reference))
    legend_below(ax)
    return ax


def _plot_rule_of_one_variable(ax: "Axes", fit: Coefficients) -> None:
    rule, entry = fit.rule, fit.entries[0]
    x = np.linspace(0, 1.15 * entry.domain[1], 1200)
    across, beta = rule_curve(fit, entry, x)
    inside = (entry.domain[0] <= x) & (entry.domain[1] >= x)
    if fit.quality.get("band"):
        points, *band = np.array(fit.quality["band"]).T
        points = points if rule.by_entropy else np.exp(points)
        ax.fill_between(points, *band, color=SHADE, alpha=0.4, lw=0, label="95 % bootstrap band")
    ax.plot(across, beta, color=OURS, lw=1, alpha=0.6, label="outside the domain")
    ax.plot(across[inside], beta[inside], color=OURS, lw=2.5, label="beta")
    if rule.min_entropy:
        ax.axvline(rule.min_entropy, color=SHADE, ls=":", lw=1.5, label="threshold: up to it 1")
    if rule.by_entropy:
        ax.set_xlabel(ENTROPY_LABEL)
    else:
        exponents = range(int(math.log2(across[-1]) + 1e-9) + 1)
        sizes_axis(ax, [2**k for k in exponents[:: max(1, len(exponents) // 8)]])
    ax.set_xlim(across[0], across[-1])


def plot_head_betas(ax: "Axes", fit: Coefficients) -> "Axes":
    """A map of log2 beta at the largest n of the fit and half the entropy it can have; x: no rule.

    The fit has entries for layers or heads.
    """
    betas = typical_betas(fit, [(entry.layer, entry.head) for entry in fit.entries])
    values = {name: None if beta is None else math.log2(beta) for name, beta in betas.items()}
    plot_head_map(ax, values, r"$\log_2 \beta$", "RdBu_r")
    return ax


def plot_entropy(ax: "Axes", heads: "Sequence[HeadDiagnosis]") -> "Axes":
    """Mean entropy against set size, the paper's Figure 3; the five of most gain are coloured."""
    by_size = [np.array([(x.size, x.entropy) for x in head.sizes]).T for head in heads]
    for n, H in by_size[len(HEAD_STYLES) :]:
        ax.plot(n, H, "-", color=GATED, lw=0.8, alpha=0.7, zorder=1)
    for head, (n, H), (colour, marker) in zip(heads, by_size, HEAD_STYLES, strict=False):
        ax.plot(n, H, "-", color=colour, marker=marker, ms=5, label=short(head.name), zorder=3)
    if len(heads) > len(HEAD_STYLES):
        ax.plot([], [], "-", color=GATED, label=f"{len(heads) - len(HEAD_STYLES)} other heads")
    sizes = sorted({x.size for head in heads for x in head.sizes})
    ends = np.array([sizes[0], sizes[-1]])
    ax.plot(ends, np.log(ends), "--", color=PAPER, lw=1, label="log n: uniform attention", zorder=2)
    sizes_axis(ax, sizes)
    ax.set(xlabel="set size n (items)", ylabel="mean Shannon entropy H (nats)")
    ax.set_ylim(bottom=-0.02 * np.log(sizes[-1]))  # markers at 0 are shown whole
    ax.set_title("Entropy that grows with the set is dispersion")
    ax.legend(framealpha=0.9, fontsize=8)
    return ax
