"""Figures: scores of rules, the rule of a fit, and maps of heads."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.core.rule import CONSTANT, LOG_SIZE, POLYNOMIAL
from calibrate.evidence.baselines import HARD, PAPER, is_infinite
from calibrate.evidence.calibration_error import expected_calibration_error, reliability_of
from calibrate.evidence.evidence import BASELINE, OWN, Evidence
from calibrate.evidence.metrics import LOG_P, PER_CENT, RIGHT, ItemKind, Metric
from calibrate.fitting.options import LEAST_SQUARES
from calibrate.report.comparison import ECE
from calibrate.report.labels import LOG_N, THIS_FIT, label
from calibrate.report.plot_style import (
    BETA_LABEL,
    BLACK,
    ENTROPY_LABEL,
    GREY,
    OTHERS,
    OURS,
    SHADE,
    STYLES,
    legend_below,
    plot_head_map,
    plot_size_curves,
    short,
    sizes_axis,
)
from calibrate.report.rules import rule_curve, size_curves, typical_betas
from calibrate.store.fit import Fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The rules that people compare, in this order. More curves cannot be told apart.
COMPARED = (OWN, BASELINE, PAPER, CONSTANT, HARD, LEAST_SQUARES, POLYNOMIAL, LOG_SIZE, LOG_N)
MAX_CURVES = 5
LEGEND_NAMES = {LEAST_SQUARES: "least squares"}  # names that are shorter than in tables
BEYOND_NOTE = "A curve that leaves the figure gains or loses far more than this fit."
SPREAD = 0.2  # of the rules around a tick: no bar hides another
MAX_GAIN = 4.0  # times the largest gain of the fit: the range of the axis


def plot_scores(
    ax: "Axes",
    evidence: Evidence,
    metric: Metric,
    own: str = OWN,
    gain: bool = False,
    name: str = "",
) -> "Axes":
    """Draws a metric of the rules that people compare by size, with bars of two standard errors.

    Args:
      ax: where to draw.
      evidence: of the rules.
      metric: LOG_P, P, RIGHT or ECE, which has no bars.
      own: the rule to highlight.
      gain: draw gains over the baseline, not means.
      name: of `own`, for people.
    """
    parts, others = evidence.by("size"), iter(OTHERS * len(evidence.rules))
    rules = [rule for rule in _compared(evidence, own, metric) if not (gain and rule == BASELINE)]
    for i, rule in enumerate(rules):
        colour, marker, dash = STYLES.get(OWN if rule == own else rule) or next(others)
        x = np.arange(len(parts)) + SPREAD * ((i + 0.5) / len(rules) - 0.5)
        look: dict[str, Any] = {"color": colour, "marker": marker, "ms": 5, "lw": 1.4, "capsize": 2}
        ax.errorbar(
            x,
            *_means_and_bars(parts.values(), rule, metric, gain),
            zorder=3 if rule == own else 2,
            ls=dash,
            label=short(name if rule == own and name else _legend_name(rule)),
            **look,
        )
    ax.grid(alpha=0.25, lw=0.5)
    ax.set_xticks(np.arange(len(parts)), map(evidence.span, parts), rotation=45)
    ax.set_xlabel("tokens" if evidence.of.items.in_tokens else "items n")
    if gain:
        ax.axhline(0, color="#777777", lw=0.8)
        limit = _largest_gain(evidence, own, metric)
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, -limit), min(high, limit))
    ax.set_ylabel(_scores_label(metric, evidence.of.items, gain))
    legend_below(ax)
    return ax


def _legend_name(rule: str) -> str:
    return LEGEND_NAMES.get(rule, label(rule))


def _means_and_bars(
    parts: Iterable[Evidence], rule: str, metric: Metric, gain: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """(parts,) means or gains of a rule, and (2, parts) lengths of its bars, if it has any."""
    if metric == ECE:
        errors = [expected_calibration_error(reliability_of(x, rule)) for x in parts]
        return 100 * np.array(errors), None
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
    """Draws the reliability diagrams of the baseline, two rules to compare, and a fit."""
    for rule in diagram_rules(evidence, own):
        colour, marker, dash = STYLES[OWN if rule == own else rule]
        bins = reliability_of(evidence, rule)
        ax.plot(
            100 * bins.confidence,
            100 * bins.ranked,
            color=colour,
            marker=marker,
            ls=dash,
            ms=5,
            lw=1.4,
            label=short(name if rule == own else label(rule)),
        )
    ax.axline((0, 0), slope=1, color="#777777", ls="--", lw=1.2, label="perfectly calibrated")
    ax.set(xlabel="probability of the top item (%)", ylabel="the top item is the target (%)")
    ax.grid(alpha=0.25, lw=0.5)
    legend_below(ax)
    return ax


def diagram_rules(evidence: Evidence, own: str) -> list[str]:
    """The rules of a reliability diagram."""
    return [rule for rule in (BASELINE, PAPER, CONSTANT, own) if rule in evidence.rules]


def _compared(evidence: Evidence, own: str, metric: Metric) -> list[str]:
    """The rules to draw, in the order of the evidence; none whose scores are infinite."""
    wanted = (own, *COMPARED, *evidence.rules)
    known = [rule for rule in wanted if rule in evidence.rules and not is_infinite(rule, metric)]
    if metric == ECE:  # that of argmax would hide all others
        known = [rule for rule in known if rule != HARD]
    shown = list(dict.fromkeys(known))[:MAX_CURVES]
    return [rule for rule in evidence.rules if rule in shown]


def _largest_gain(evidence: Evidence, own: str, metric: Metric) -> float:
    """The limit of the axis of gains: far larger ones would hide those of the fit."""
    gains, _ = _means_and_bars(evidence.by("size").values(), own, metric, gain=True)
    return float(MAX_GAIN * np.abs(np.nan_to_num(gains)).max(initial=0)) or math.inf


def leaves_figure(evidence: Evidence, own: str, metric: Metric) -> bool:
    """True if a gain of a rule in the figure of gains lies beyond its axis."""
    parts, limit = evidence.by("size").values(), _largest_gain(evidence, own, metric)
    gains = [_means_and_bars(parts, x, metric, True)[0] for x in _compared(evidence, own, metric)]
    return bool((np.abs(np.nan_to_num(gains)) > limit).any())


def plot_gain_map(ax: "Axes", evidence: Evidence, rule: str) -> "Axes":
    """Draws a map of the gain of each head in log-likelihood; x marks heads without a rule."""
    gains = {
        head: float(part.gain(rule, LOG_P).mean) if evidence.names(rule, head) else None
        for head, part in evidence.by("head").items()
    }
    return plot_head_map(ax, gains, "gain in log-likelihood (nats)", "PuOr_r")


def plot_rule(ax: "Axes", fit: Fit) -> "Axes":
    """Draws beta against entropy or set size, also outside the domain; a constant is a line.

    A rule of entropy and size has a curve for each of a few set sizes.
    """
    if fit.ignores_inputs:
        _plot_constant(ax, fit)
    elif fit.rule.depends_on_both:
        plot_size_curves(ax, size_curves(fit, fit.entries[0]))
        ax.plot([], [], color=GREY, lw=0.8, label="outside the domain")
        ax.set_xlim(left=0)
    else:
        _plot_rule_of_one_variable(ax, fit)
    ax.axhline(1, color=BLACK, ls="--", lw=1, label=label(BASELINE))
    ax.set(ylabel=BETA_LABEL, title=short(fit.reference))
    legend_below(ax)
    return ax


def _plot_constant(ax: "Axes", fit: Fit) -> None:
    (beta,) = fit.entries[0].beta_at(np.zeros(1), np.zeros(1), fit.rule)
    ax.axhline(beta, color=OURS, lw=2.5, label=f"{THIS_FIT}, beta = {beta:.3g}")
    ax.set(xticks=[], xlabel="every entropy H and every n", ylim=(0, 1.25 * max(beta, 1)))


def _plot_rule_of_one_variable(ax: "Axes", fit: Fit) -> None:
    rule, entry = fit.rule, fit.entries[0]
    x = np.linspace(0, 1.15 * entry.domain[1], 1200)
    across, beta = rule_curve(fit, entry, x)
    inside = (entry.domain[0] <= x) & (entry.domain[1] >= x)
    ax.plot(across, beta, color=OURS, lw=1, alpha=0.6, label="outside the domain")
    ax.plot(across[inside], beta[inside], color=OURS, lw=2.5, label=THIS_FIT)
    if rule.min_entropy:
        ax.axvline(rule.min_entropy, color=SHADE, ls=":", lw=1.5, label="threshold: up to it 1")
    if rule.by_entropy:
        ax.set_xlabel(ENTROPY_LABEL)
    else:
        exponents = range(int(math.log2(across[-1]) + 1e-9) + 1)
        sizes_axis(ax, [2**k for k in exponents[:: max(1, len(exponents) // 8)]])
    ax.set_xlim(across[0], across[-1])


def plot_head_betas(ax: "Axes", fit: Fit) -> "Axes":
    """Draws a map of log2 beta for a fit with entries for layers or heads; see `typical_betas`."""
    betas = typical_betas(fit, [(entry.layer, entry.head) for entry in fit.entries])
    values = {name: None if beta is None else math.log2(beta) for name, beta in betas.items()}
    plot_head_map(ax, values, r"$\log_2 \beta$", "RdBu_r")
    return ax
