"""Plots of a diagnosis: entropy by set size, optimal beta, and which heads disperse."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrate.report.plot_style import (
    GATED,
    HEAD_STYLES,
    OURS,
    PAPER,
    SHADE,
    draw,
    new_figure,
    plot_head_map,
    save_figure,
    scatter_by_size,
    short,
    sizes_axis,
)
from calibrate.rows.diagnosis import Diagnosis, HeadDiagnosis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

N_PLANES = 4
N_QUANTILES = 16
MOST_POINTS = 4_000  # in a plane: more would overlap


def save_figures(folder: Path, diagnosis: Diagnosis) -> list[Path]:
    """Writes the figures of a diagnosis into a folder as PNG; returns their paths."""
    heads = diagnosis.heads
    ranked = heads[:N_QUANTILES]
    figures = {
        "entropy": draw(plot_entropy, heads),
        "plane": _planes(heads[:N_PLANES]),
        "beta": draw(plot_beta_quantiles, ranked, size=(7.2, 2.2 + 0.3 * len(ranked))),
    }
    if len(heads) > 1 and any(head.slope for head in heads):
        figures["slope"] = draw(plot_slope_map, heads)
    for name, figure in figures.items():
        save_figure(folder / f"{name}.png", figure)
    return [folder / f"{name}.png" for name in figures]


def _planes(heads: Sequence[HeadDiagnosis]) -> "Figure":
    """The plane of each of some heads, in a grid."""
    across = min(len(heads), 2)
    down = -(-len(heads) // across)
    figure = new_figure(7.2, 4.6) if across == 1 else new_figure(9.6, 4.0 * down)
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for ax, head in zip(axes, heads, strict=False):
        plot_plane(ax, head)
    for ax in axes[len(heads) :]:
        ax.remove()
    return figure


def plot_entropy(ax: "Axes", heads: Sequence[HeadDiagnosis]) -> "Axes":
    """Mean entropy against set size, the paper's Figure 3; the five of most gain are coloured.

    Of one head or two, the standard deviation over rows is shown as a band.
    """
    for head in heads[len(HEAD_STYLES) :]:
        n, H, _ = _by_size(head)
        ax.plot(n, H, "-", color=GATED, lw=0.8, alpha=0.7, zorder=1)
    for head, (colour, marker) in zip(heads, HEAD_STYLES, strict=False):
        n, H, spread = _by_size(head)
        ax.plot(n, H, "-", color=colour, marker=marker, ms=5, label=short(head.name), zorder=3)
        if len(heads) <= 2:
            ax.fill_between(n, H - spread, H + spread, color=colour, alpha=0.15, lw=0)
    if len(heads) > len(HEAD_STYLES):
        ax.plot([], [], "-", color=GATED, label=f"{len(heads) - len(HEAD_STYLES)} other heads")
    sizes = sorted({at.size for head in heads for at in head.sizes})
    ends = np.array([min(_by_size(head)[0][0] for head in heads), sizes[-1]])
    ax.plot(ends, np.log(ends), "--", color=PAPER, lw=1, label="log n: uniform attention", zorder=2)
    sizes_axis(ax, sizes)
    ax.set(xlabel="set size n (items)", ylabel="mean Shannon entropy H (nats)")
    ax.set_ylim(bottom=-0.02 * np.log(sizes[-1]))  # markers at 0 are shown whole
    ax.set_title("Entropy that grows with the set is dispersion")
    ax.legend(framealpha=0.9, fontsize=8)
    return ax


def _by_size(head: HeadDiagnosis) -> np.ndarray:
    """(3, sizes): items, mean entropy and its spread."""
    return np.array([(at.items, at.entropy, at.entropy_spread) for at in head.sizes]).T


def plot_plane(ax: "Axes", head: HeadDiagnosis) -> "Axes":
    """The commitment-susceptibility plane of one head: a point for each row, coloured by size."""
    of = head.contexts
    some = np.random.default_rng(0).permutation(len(of.size))[:MOST_POINTS]
    scatter_by_size(
        ax, of.commitment[some], of.susceptibility[some], of.size[some],
        np.unique(of.size).tolist(), s=6, alpha=0.5,
    )  # fmt: skip
    ax.set(
        xlabel="commitment log n - H (nats)",
        ylabel="susceptibility Var_p(z) (logits squared)",
        title=short(head.name),
    )
    return ax


def plot_slope_map(ax: "Axes", heads: Sequence[HeadDiagnosis]) -> "Axes":
    """A map of layers and heads: how commitment grows with log n. Without a slope: x."""
    slopes = {(head.layer, head.head): head.slope and head.slope.value for head in heads}
    values = [slope for slope in slopes.values() if slope is not None]
    below, above = min(values, default=0) < 0, max(values, default=1) > 1
    ends = {(False, False): "neither", (True, False): "min", (False, True): "max"}
    ax.set_title("Which heads disperse")
    return plot_head_map(
        ax, slopes, "-", "growth of commitment with log n\n(0: disperses, 1: robust)",
        extend=ends.get((below, above), "both"), cmap="cividis", vmin=0, vmax=1,
    )  # fmt: skip


def plot_beta_quantiles(ax: "Axes", heads: Sequence[HeadDiagnosis]) -> "Axes":
    """Optimal beta of the interior rows of each head: the median, and 10 to 90 %."""
    ax.axvline(1, color=PAPER, ls="--", lw=1, label="plain softmax")
    names = []
    for place, head in enumerate(heads):
        names.append(f"{short(head.name)}\n{head.shares['interior']:.0%} interior")
        if head.beta:
            low, middle, high = head.beta
            ax.plot([low, high], [place, place], color=SHADE, lw=5, solid_capstyle="butt")
            ax.plot(middle, place, "o", color=PAPER, ms=5)
        ax.plot(head.headroom.beta, place, "D", mfc="none", color=OURS, ms=7)
    ax.plot([], [], color=SHADE, lw=5, label="10 to 90 % of the interior rows")
    ax.plot([], [], "o", color=PAPER, label="their median")
    ax.plot([], [], "D", mfc="none", color=OURS, label="best constant of all rows")
    _beta_axis(ax)
    ax.set_yticks(range(len(heads)), names, fontsize=8)
    ax.set_ylim(len(heads) - 0.5, -0.5)
    ax.set(xlabel=r"optimal inverse temperature $\beta^*$ (no unit)")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, fontsize=8, frameon=False)
    return ax


def _beta_axis(ax: "Axes") -> None:
    """beta along x, from a half to two at least, with a handful of powers of two."""
    ax.set_xscale("log", base=2)
    low, high = ax.get_xlim()
    low, high = min(low, 0.5), max(high, 2.0)
    exponents = np.arange(np.ceil(np.log2(low)), np.floor(np.log2(high)) + 1)
    ticks = 2.0 ** exponents[:: max(1, len(exponents) // 7)]
    ax.set_xlim(low, high)
    ax.set_xticks(ticks, [f"{beta:.3g}" for beta in ticks])
    ax.minorticks_off()
