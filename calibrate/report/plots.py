"""Figures: scores of rules, reliability, the rule of a fit, and a map of the betas of heads."""

import math
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.core.rule import CONSTANT
from calibrate.evidence.baselines import HARD, PAPER, is_infinite
from calibrate.evidence.calibration_error import expected_calibration_error, reliability_of
from calibrate.evidence.evidence import BASELINE, OWN, Evidence
from calibrate.evidence.metrics import RIGHT, Metric
from calibrate.report.labels import THIS_FIT, label
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
    size_colours,
    sizes_axis,
)
from calibrate.report.rule_text import joint_domain
from calibrate.report.score_tables import ECE
from calibrate.store.fit import Fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

N_SIZES = 5  # curves of a rule of entropy and size
CURVE_POINTS = 600
SPREAD = 0.2  # of the rules around a tick: no bar hides another
MAX_GAIN = 4  # times the largest gain of the fit: the range of the axis


def plot_scores(
    ax: "Axes", evidence: Evidence, metric: Metric, own: str = OWN, gain: bool = False
) -> "Axes":
    """Draws a metric of rules by size, with bars of two standard errors.

    Args:
      ax: where to draw.
      evidence: of the rules.
      metric: LOG_P, RIGHT or ECE, which has no bars.
      own: the fit, which is highlighted.
      gain: draw gains over the baseline, up to `MAX_GAIN`, and not means.
    """
    parts = evidence.by("size")
    hidden = {BASELINE} if gain else {HARD} if metric == ECE else set()
    limit = 0.0
    rules = [x for x in evidence.rules if x not in hidden and not is_infinite(x, metric)]
    for i, rule in enumerate(rules):
        colour, marker, dash = STYLES.get(OWN if rule == own else rule, OTHERS[0])
        x = np.arange(len(parts)) + SPREAD * ((i + 0.5) / len(rules) - 0.5)
        points = [_mean_and_bar(part, rule, metric, gain) for part in parts.values()]
        mean, bar = abs(metric.factor) * np.transpose(points)
        look: dict[str, Any] = {"color": colour, "marker": marker, "ls": dash, "ms": 5, "lw": 1.4}
        name = THIS_FIT if rule == own else label(rule)
        bars = bar if np.isfinite(bar).any() else None  # the ECE has none
        ax.errorbar(x, mean, bars, capsize=2, zorder=3 if rule == own else 2, label=name, **look)
        if gain and rule == own:
            limit = MAX_GAIN * np.abs(np.nan_to_num(mean)).max()
    ax.grid(alpha=0.25, lw=0.5)
    ax.set_xticks(np.arange(len(parts)), map(evidence.span, parts), rotation=45)
    ax.set_xlabel("tokens" if evidence.of.items.of_model else "items n")
    name = evidence.of.items.label_of_right if metric == RIGHT else metric.label
    ax.set_ylabel(f"{name} ({metric.unit})")
    if gain:
        ax.set_ylabel(f"gain in {name} ({metric.unit_of_change})")
        ax.axhline(0, color="#777777", lw=0.8)
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, -limit or low), min(high, limit or high))
    legend_below(ax)
    return ax


def _mean_and_bar(part: Evidence, rule: str, metric: Metric, gain: bool) -> tuple[float, float]:
    """The mean or the gain of a rule, and two of its standard errors; 0 where they are unknown."""
    if metric == ECE:
        return expected_calibration_error(reliability_of(part, rule)), 0.0
    estimate = part.gain(rule, metric) if gain else part.mean(rule, metric)
    return estimate.mean, 2 * np.nan_to_num(estimate.error)


def plot_reliability(ax: "Axes", evidence: Evidence, own: str) -> "Axes":
    """Draws the reliability diagrams of the baseline, two rules to compare, and a fit."""
    for rule in (BASELINE, PAPER, CONSTANT, own):
        if rule in evidence.rules:
            colour, marker, dash = STYLES[OWN if rule == own else rule]
            bins = reliability_of(evidence, rule)
            points = 100 * bins.confidence, 100 * bins.ranked
            name = THIS_FIT if rule == own else label(rule)
            ax.plot(*points, color=colour, marker=marker, ls=dash, ms=5, lw=1.4, label=name)
    ax.axline((0, 0), slope=1, color="#777777", ls="--", lw=1.2, label="perfectly calibrated")
    ax.set(xlabel="probability of the top item (%)", ylabel="the top item is the target (%)")
    ax.grid(alpha=0.25, lw=0.5)
    legend_below(ax)
    return ax


def plot_rule(ax: "Axes", fit: Fit) -> "Axes":
    """Draws beta against entropy or set size, thin outside the domain of the only entry.

    A rule of entropy and size has a curve for each of a few set sizes.
    """
    rule, entry = fit.rule, fit.only
    if rule.depends_on_both:
        _plot_size_curves(ax, fit)
    else:
        x = np.linspace(0, 1.15 * entry.domain[1], CURVE_POINTS)
        beta, inside = entry.beta_at(x, x, rule), (entry.domain[0] <= x) & (x <= entry.domain[1])
        across = np.exp(x) if rule.by_size else x
        ax.plot(across, beta, color=OURS, lw=1, alpha=0.6, label="outside the domain")
        ax.plot(across[inside], beta[inside], color=OURS, lw=2.5, label=THIS_FIT)
        if rule.by_size:
            exponents = range(int(math.log2(across[-1]) + 1e-9) + 1)
            sizes_axis(ax, [2**k for k in exponents[:: max(1, len(exponents) // 8)]])
        ax.set_xlim(across[0], across[-1])
    if rule.by_entropy:
        ax.set_xlabel(ENTROPY_LABEL)
    if rule.min_entropy:
        ax.axvline(rule.min_entropy, color=SHADE, ls=":", lw=1.5, label="threshold: up to it 1")
    ax.axhline(1, color=BLACK, ls="--", lw=1, label=label(BASELINE))
    ax.set_ylabel(BETA_LABEL)
    legend_below(ax)
    return ax


def _plot_size_curves(ax: "Axes", fit: Fit) -> None:
    """Draws curves coloured by set size, bold at the entropies of the domain."""
    lo, hi, small, large = fit.only.domain
    sizes = np.unique(np.exp(np.linspace(small, large, N_SIZES)).round())
    colours = size_colours(sizes[0], sizes[-1]).to_rgba(sizes)
    for n, colour in zip(sizes, colours, strict=True):
        H = np.linspace(0, math.log(n), CURVE_POINTS)
        beta = fit.only.beta_at(H, np.full(len(H), math.log(n)), fit.rule)
        inside = (lo <= H) & (hi >= H)
        ax.plot(H, beta, color=colour, lw=0.8)
        ax.plot(H[inside], beta[inside], color=colour, lw=2.5, label=f"n = {n:,.0f}")
    ax.plot([], [], color=GREY, lw=0.8, label="outside the domain")


def plot_head_betas(ax: "Axes", fit: Fit) -> "Axes":
    """Draws a map of log2 beta by layer and head; x marks heads without a rule.

    Beta is that at the largest n of the fit, or at half of the largest entropy there.
    """
    domain = joint_domain(fit.entries) or (0.0, 1.0)  # constants have none
    log_n = np.asarray(domain[-1])
    H = log_n / 2 if fit.rule.by_size else np.asarray(sum(domain[:2]) / 2)
    rows, columns = (
        sorted({getattr(x, axis) for x in fit.entries}, key=lambda i: -1 if i is None else i)
        for axis in ("layer", "head")
    )
    grid = np.full((len(rows), len(columns)), np.nan)
    for (row, layer), (column, head) in product(enumerate(rows), enumerate(columns)):
        if (entry := fit.entry_of(layer, head)) is None:
            ax.plot(column, row, "x", color="#777777", ms=5)
        else:
            grid[row, column] = math.log2(entry.beta_at(H, log_n, fit.rule))
    most = np.nanmax(np.abs([*grid.flat, 1e-9]))
    look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": "RdBu_r"}
    image = ax.imshow(grid, vmin=-most, vmax=most, **look)
    for axis, numbers, name in ((ax.xaxis, columns, "head"), (ax.yaxis, rows, "layer")):
        step = max(1, len(numbers) // 16)
        labels = ["all" if i is None else str(i) for i in numbers[::step]]
        axis.set_ticks(range(0, len(numbers), step), labels)
        axis.set_label_text(name)
    ax.figure.colorbar(image, ax=ax, label=r"$\log_2 \beta$")
    return ax
