"""Plots of example sets: their coefficients, entropies and temperatures, plain and under a fit."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from calibrate.files.coefficients import Coefficients
from calibrate.maths.reference import entropy
from calibrate.report.plot_style import (
    BETA_LABEL,
    GATED,
    HEAD_STYLES,
    OURS,
    PAPER,
    SHADE,
    draw_size_curves,
    legend_below,
    new_figure,
    rule_axis,
    scatter_by_size,
    short,
    sizes_axis,
)
from calibrate.report.rule_curves import of_both, rule_curve, size_curves
from calibrate.report.wording import argument
from calibrate.rows.example_sets import ExampleSets, estimated_dispersal, reach, shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

N_SETS = 32
N_PANELS = 8
MIDDLE = (10, 50, 90)  # per cent of the rows: a band and its median


def heatmap_figure(
    examples: Sequence[ExampleSets], fits: Sequence[Coefficients | None]
) -> "Figure":
    """The paper's Figures 2 and 6: coefficients of the 16 largest keys of 32 sets.

    A column of panels per set size, a row of panels per fit; None is plain softmax.
    """
    chosen = np.linspace(0, len(examples) - 1, min(N_PANELS, len(examples))).round().astype(int)
    shown = [examples[i] for i in chosen]
    figure = new_figure(9.6, 0.7 + 1.9 * len(fits))
    axes = figure.subplots(len(fits), len(shown), squeeze=False)
    for row, fit in zip(axes, fits, strict=True):
        for ax, sets in zip(row, shown, strict=True):
            plot_coefficients(ax, sets, fit)
        name = "plain softmax" if fit is None else f"with {short(fit.reference)}"
        row[0].set_ylabel(name, fontsize=9)
    for ax, sets in zip(axes[0], shown, strict=True):
        ax.set_title(f"n = {sets.size:,}", fontsize=9)
    figure.supxlabel("the 16 items with the largest keys, the target rightmost", fontsize=9)
    figure.supylabel(f"{N_SETS} sets", fontsize=9)
    image = axes[0, 0].images[0]
    figure.colorbar(image, ax=axes, label="attention coefficient", shrink=0.9, pad=0.01)
    return figure


def plot_coefficients(ax: "Axes", sets: ExampleSets, fit: Coefficients | None) -> "Axes":
    """One panel of a heatmap."""
    part = sets.coefficients(fit)[:N_SETS]
    largest = np.take_along_axis(part, sets.largest[:N_SETS], axis=1)
    ax.imshow(largest, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    return ax


def plot_entropy_by_size(
    ax: "Axes", examples: Sequence[ExampleSets], fits: dict[str, Coefficients | None]
) -> "Axes":
    """Entropy of the coefficients against set size: the median, and the middle 80 %."""
    sizes = [sets.size for sets in examples]
    styles = (("-", PAPER, "o"), ("--", SHADE, "s"), ("-", OURS, "^"))
    for (name, fit), (style, colour, marker) in zip(fits.items(), styles, strict=False):
        H = [entropy(sets.logits * sets.beta(fit)[:, None]) for sets in examples]
        low, middle, high = np.array([np.percentile(h, MIDDLE) for h in H]).T
        ax.plot(sizes, middle, style, color=colour, marker=marker, ms=4, label=short(name))
        ax.fill_between(sizes, low, high, color=colour, alpha=0.15, lw=0)
    ax.plot(sizes, np.log(sizes), ":", color="#777777", label="log n: uniform attention")
    sizes_axis(ax, sizes)
    ax.set_ylabel("Shannon entropy of the coefficients (nats)")
    ax.legend(framealpha=0.9)
    return ax


def plot_beta_applied(ax: "Axes", examples: Sequence[ExampleSets], fit: Coefficients) -> "Axes":
    """beta against entropy, or set size, and on it the rows of every set size.

    A fit by entropy and size has a curve for each of some of these sizes.
    """
    entry, sizes = fit.only, [sets.size for sets in examples]
    some = sizes[:: max(1, len(sizes) // 6)]
    on_axis = np.asarray if fit.rule.by_entropy else np.exp
    x_rows = np.concatenate([sets.rule_input(fit) for sets in examples])
    end = 1.05 * max(entry.domain[1], float(x_rows.max()))
    if of_both(fit.rule):
        end = 1.05 * float(np.log(sizes[-1]))
        draw_size_curves(ax, size_curves(fit, entry, some), sizes, lw=0.8)
    else:
        curve = rule_curve(fit, entry, np.linspace(0, end, 800))
        ax.plot(*curve, color=OURS, lw=2, label=f"beta({argument(fit.rule)})", zorder=2)
    domain = on_axis(entry.domain[:2])
    ax.axvspan(*domain, color=SHADE, alpha=0.15, lw=0, label="domain of the fit")
    applied = np.concatenate([sets.beta(fit) for sets in examples])
    noise = np.random.default_rng(0).uniform(-0.02, 0.02, len(x_rows)) * np.ptp(applied)
    size = np.concatenate([np.full(len(sets.entropy), sets.size) for sets in examples])
    scatter_by_size(ax, on_axis(x_rows), applied + noise, size, sizes, s=6, alpha=0.5, zorder=6)
    rule_axis(ax, fit.rule, some)
    ax.set(xlim=on_axis([0.0, end]), ylabel=BETA_LABEL)
    if of_both(fit.rule):
        legend_below(ax)
    else:
        ax.legend(framealpha=0.9)
    return ax


def plot_shares(ax: "Axes", examples: Sequence[ExampleSets], fit: Coefficients) -> "Axes":
    """Shares of the rows of each size that are gated, in the domain, or outside it."""
    by_size = shares(examples, fit)
    parts = [
        ("gated", f"H up to {fit.rule.min_entropy:g}: beta is 1", GATED, ""),
        ("below", f"below the domain: {_outside(fit)}", SHADE, "//"),
        ("inside", "in the domain", OURS, ""),
        ("above", f"above the domain: {_outside(fit)}", PAPER, ""),
        ("other_size", "size not fitted", HEAD_STYLES[3][0], "\\\\"),
    ]
    if not fit.rule.min_entropy:
        del parts[0]  # without a gate
    if not of_both(fit.rule):
        del parts[-1]
    bottom = np.zeros(len(by_size))
    for key, label, colour, hatch in parts:
        height = np.array([100 * getattr(share, key) for share in by_size])
        ax.bar(
            range(len(by_size)), height, bottom=bottom, color=colour, label=label, width=0.8,
            hatch=hatch, edgecolor="white", lw=0.5,
        )  # fmt: skip
        bottom += height
    ax.set_xticks(range(len(by_size)), [f"{share.size:,}" for share in by_size], rotation=45)
    ax.set(xlabel="set size n", ylabel="share of the sets (%)", ylim=(0, 100))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.24), ncols=2, fontsize=8, frameon=False)
    return ax


def _outside(fit: Coefficients) -> str:
    """What happens to beta outside the domain of x along the figures' axis, in a few words."""
    if not fit.rule.by_entropy:
        return "beta is held" if fit.only.coefficients[0] < 0 else "the line goes on"
    return "H is clamped" if fit.rule.outside == "clamp" else "beta is 1"


def plot_reach(ax: "Axes", examples: Sequence[ExampleSets]) -> "Axes":
    """The target's coefficient against set size, the estimate, and the bound of Lemma 2.1."""
    sizes = [sets.size for sets in examples]
    got = [np.percentile(sets.target_coefficient(None), MIDDLE) for sets in examples]
    low, middle, high = np.array(got).T
    half = estimated_dispersal(examples)
    n = np.geomspace(sizes[0], max(sizes[-1], 2), 200)
    ax.plot(sizes, middle, color=PAPER, marker="o", ms=4, label="measured: median, middle 80 %")
    ax.fill_between(sizes, low, high, color=PAPER, alpha=0.15, lw=0)
    if 1 < half < np.inf:
        estimate = 1 / (1 + (n - 1) / (half - 1))
        ax.plot(n, estimate, "--", color=OURS, lw=2, label=f"estimate from n = {sizes[-1]:,}")
    bounds = [row.highest_bound for row in reach(examples)]
    ax.plot(sizes, bounds, ":", color=SHADE, lw=2, label="Lemma 2.1: at most")
    ax.axhline(0.5, color="#777777", lw=0.8)
    sizes_axis(ax, sizes)
    ax.set(ylabel="coefficient of the target, plain softmax", ylim=(0, 1.05))
    ax.legend(framealpha=0.9, loc="upper right", bbox_to_anchor=(1, 0.93))
    return ax
