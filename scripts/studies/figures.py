#!/usr/bin/env python
"""The figures of max-retrieval-0 with its first fit, in scripts/results/; and dispersal.json.

Accuracy against set size, over ten heads, is drawn from scripts/results/table1.json.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from example_sets import (
    ExampleSets,
    coefficient_bounds,
    draw_examples,
    entropy_of,
    estimated_dispersal,
    measured_dispersal,
)
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from scipy.special import softmax
from table1_comparison import HeadsComparison, comparison_of, label

import calibrate
from calibrate.report import plot_style
from calibrate.report.plot_polynomial import plot_optimal_beta
from calibrate.report.plot_style import (
    BETA_LABEL,
    ENTROPY_LABEL,
    GATED,
    OURS,
    PAPER,
    SHADE,
    STYLES,
    legend_below,
    new_figure,
    sizes_axis,
)
from calibrate.rows.heads import load_head
from calibrate.storage.atomic_io import write_atomically
from calibrate.store.coefficients import Coefficients
from calibrate.store.fits_store import published_store

RESULTS = Path(__file__).parents[1] / "results"
SIZES = [16 << i for i in range(11)]
SETS = 256
MOST, SOLVED_SETS = 4_096, 200  # items, and sets of each size, of the optimal temperatures
N_SETS, N_PANELS = 32, 8  # of heat maps
MIDDLE = (10, 50, 90)  # per cent of the sets: a band and its median
COMPARED = ("plain", "paper", "own", "log-n", "hard")  # more would be hard to tell apart
BANDS = ("plain", "own")  # bands of all rules would overlap

Examples = Sequence[ExampleSets]


def draw(name: str, plot: Callable[..., Axes], *arguments: Any) -> None:
    save(name, plot_style.draw(plot, *arguments, size=(6.4, 4.6)))


def save(name: str, figure: Figure) -> None:
    plot_style.save_figure(RESULTS / f"{name}.png", figure)
    print(RESULTS / f"{name}.png")


def heatmap_figure(examples: Examples, fits: Sequence[Coefficients | None]) -> Figure:
    """The paper's Figures 2 and 6: coefficients of the 16 largest keys of 32 sets.

    A column of panels per set size, a row of panels per fit; None is the baseline.
    """
    chosen = np.linspace(0, len(examples) - 1, min(N_PANELS, len(examples))).round().astype(int)
    shown = [examples[i] for i in chosen]
    figure = new_figure(9.6, 0.7 + 1.9 * len(fits))
    axes = figure.subplots(len(fits), len(shown), squeeze=False)
    for row, fit in zip(axes, fits, strict=True):
        for ax, sets in zip(row, shown, strict=True):
            plot_coefficients(ax, sets, fit)
        row[0].set_ylabel(f"with {fit.reference}" if fit else "baseline", fontsize=9)
    for ax, sets in zip(axes[0], shown, strict=True):
        ax.set_title(f"n = {sets.size:,}", fontsize=9)
    figure.supxlabel("the 16 items with the largest keys, the target rightmost", fontsize=9)
    figure.supylabel(f"{N_SETS} sets", fontsize=9)
    image = axes[0, 0].images[0]
    figure.colorbar(image, ax=axes, label="attention coefficient", shrink=0.9, pad=0.01)
    return figure


def plot_coefficients(ax: Axes, sets: ExampleSets, fit: Coefficients | None) -> None:
    largest = np.take_along_axis(sets.coefficients(fit), sets.largest, axis=1)[:N_SETS]
    ax.imshow(largest, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
    ax.set(xticks=[], yticks=[])


def plot_power_series(ax: Axes, n: int = 10) -> Axes:
    """Entropy of softmax over z_i = lambda^i, i = 1..n, at temperature theta."""
    lam, theta = np.linspace(0, 1, 201), np.geomspace(0.01, 10, 201)
    z = lam[:, None] ** np.arange(1, n + 1)
    H = np.stack([entropy_of(softmax(z / t, axis=1)) for t in theta])
    image = ax.pcolormesh(lam, theta, H, cmap="viridis", vmin=0, vmax=np.log(n), rasterized=True)
    lines = ax.contour(lam, theta, H, levels=[0.5, 1, 1.5, 2], colors="white", linewidths=0.8)
    ax.clabel(lines, fmt="%.1f", fontsize=8)
    ax.set_yscale("log")
    ax.set(
        xlabel=rf"$\lambda$ (the logits are $\lambda^1$ to $\lambda^{{{n}}}$)",
        ylabel=r"temperature $\theta$",
    )
    ax.figure.colorbar(image, ax=ax, label="Shannon entropy (nats)", pad=0.02)
    return ax


def scatter_by_size(ax: Axes, x: np.ndarray, y: np.ndarray, size: np.ndarray, **look: Any) -> None:
    """Dots coloured by set size, with a colour bar."""
    sizes = np.unique(size)
    norm = LogNorm(0.9 * sizes[0], 1.1 * sizes[-1])
    points = ax.scatter(x, y, c=size, lw=0, rasterized=True, norm=norm, cmap="viridis_r", **look)
    bar = ax.figure.colorbar(points, ax=ax, label="set size n", pad=0.02)
    bar.ax.minorticks_off()
    ticks = sizes[:: max(1, len(sizes) // 6)]
    bar.set_ticks(ticks, labels=[f"{n:,}" for n in ticks])
    bar.solids.set_alpha(1)


def plot_entropy_by_size(
    ax: Axes, examples: Examples, fits: dict[str, Coefficients | None]
) -> Axes:
    """Entropy of the coefficients against set size: the median, and the middle 80 %."""
    sizes = [sets.size for sets in examples]
    styles = (("-", PAPER, "o"), ("--", SHADE, "s"), ("-", OURS, "^"))
    for (name, fit), (style, colour, marker) in zip(fits.items(), styles, strict=True):
        H = [entropy_of(sets.coefficients(fit)) for sets in examples]
        low, middle, high = np.array([np.percentile(h, MIDDLE) for h in H]).T
        ax.plot(sizes, middle, style, color=colour, marker=marker, ms=4, label=name)
        ax.fill_between(sizes, low, high, color=colour, alpha=0.15, lw=0)
    ax.plot(sizes, np.log(sizes), ":", color="#777777", label="log n: uniform attention")
    sizes_axis(ax, sizes)
    ax.set_ylabel("Shannon entropy of the coefficients (nats)")
    ax.legend(framealpha=0.9)
    return ax


def plot_beta_applied(ax: Axes, examples: Examples, fit: Coefficients) -> Axes:
    """beta against entropy, and on it the sets of every size."""
    H = np.concatenate([sets.entropy for sets in examples])
    applied = np.concatenate([sets.beta(fit) for sets in examples])
    size = np.concatenate([np.full(len(sets.entropy), sets.size) for sets in examples])
    x = np.linspace(0, 1.05 * max(fit.only.domain[1], float(H.max())), 800)
    curve = np.asarray(calibrate.inverse_temperature(x, fit))
    ax.plot(x, curve, color=OURS, lw=2, label="beta(H)", zorder=2)
    ax.axvspan(*fit.only.domain, color=SHADE, alpha=0.15, lw=0, label="domain of the fit")
    noise = np.random.default_rng(0).uniform(-0.02, 0.02, len(H)) * np.ptp(applied)
    scatter_by_size(ax, H, applied + noise, size, s=6, alpha=0.5, zorder=6)
    ax.set(xlim=(x[0], x[-1]), xlabel=ENTROPY_LABEL, ylabel=BETA_LABEL)
    ax.legend(framealpha=0.9)
    return ax


def plot_shares(ax: Axes, examples: Examples, fit: Coefficients) -> Axes:
    """Shares of the sets of each size that are gated, in the domain of a fit, or outside it."""
    gate, (low, high) = fit.rule.min_entropy, fit.only.domain
    parts = {
        f"H up to {gate:g}: beta is 1": ((-np.inf, gate), GATED, ""),
        "below the domain: H is clamped": ((gate, low), SHADE, "//"),
        "in the domain": ((low, high), OURS, ""),
        "above the domain: H is clamped": ((high, np.inf), PAPER, ""),
    }
    bottom, places = np.zeros(len(examples)), range(len(examples))
    for name, ((above, up_to), colour, hatch) in parts.items():
        inside = [(sets.entropy > above) & (sets.entropy <= up_to) for sets in examples]
        height = np.array([100 * part.mean() for part in inside])
        ax.bar(
            places, height, bottom=bottom, color=colour, label=name, width=0.8, hatch=hatch,
            edgecolor="white", lw=0.5,
        )  # fmt: skip
        bottom += height
    ax.set_xticks(places, [f"{sets.size:,}" for sets in examples], rotation=45)
    ax.set(xlabel="set size n", ylabel="share of the sets (%)", ylim=(0, 100))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.24), ncols=2, fontsize=8, frameon=False)
    return ax


def plot_reach(ax: Axes, examples: Examples) -> Axes:
    """The target's coefficient against set size, the estimate, and the bound of Lemma 2.1."""
    sizes = [sets.size for sets in examples]
    got = [np.percentile(sets.target_coefficient(), MIDDLE) for sets in examples]
    low, middle, high = np.array(got).T
    n, half = np.geomspace(sizes[0], sizes[-1], 200), estimated_dispersal(examples[-1])
    bounds = [coefficient_bounds(sets.spread(), sets.size)[1].max() for sets in examples]
    ax.plot(sizes, middle, color=PAPER, marker="o", ms=4, label="measured: median, middle 80 %")
    ax.fill_between(sizes, low, high, color=PAPER, alpha=0.15, lw=0)
    estimate = 1 / (1 + (n - 1) / (half - 1))
    ax.plot(n, estimate, "--", color=OURS, lw=2, label=f"estimate from n = {sizes[-1]:,}")
    ax.plot(sizes, bounds, ":", color=SHADE, lw=2, label="Lemma 2.1: at most")
    ax.axhline(0.5, color="#777777", lw=0.8)
    sizes_axis(ax, sizes)
    ax.set(ylabel="coefficient of the target, baseline", ylim=(0, 1.05))
    ax.legend(framealpha=0.9, loc="upper right", bbox_to_anchor=(1, 0.93))
    return ax


def plot_rules(ax: Axes, comparison: HeadsComparison, values: str, errors: str, name: str) -> Axes:
    """A measure of five rules against set size, with bands of two standard errors."""
    for rule in COMPARED:
        i, (colour, marker, dash) = comparison.rules.index(rule), STYLES[rule]
        middle, error = 100 * getattr(comparison, values)[i], 200 * getattr(comparison, errors)[i]
        ax.plot(
            comparison.sizes, middle, dash, color=colour, marker=marker, ms=5, lw=1.4,
            label=label(rule), zorder=3 if rule == "own" else 2,
        )  # fmt: skip
        if rule in BANDS:
            low, high = middle - error, middle + error
            ax.fill_between(comparison.sizes, low, high, color=colour, alpha=0.2, lw=0)
    sizes_axis(ax, comparison.sizes)
    ax.set_ylabel(name)
    ax.grid(alpha=0.25, lw=0.5)
    legend_below(ax)
    return ax


def save_dispersal(examples: Examples) -> None:
    """Where the target falls below eps: as estimated from ever longer sets, and as measured."""
    sizes = {
        f"{eps:g}": {
            "estimate": {
                f"{sets.size}": round(estimated_dispersal(sets, eps))
                for sets in examples if sets.size >= 256
            },
            "measured": round(measured_dispersal(examples, eps) or 0),
        }
        for eps in (0.5, 0.25, 0.1)
    }  # fmt: skip
    write_atomically(RESULTS / "dispersal.json", (json.dumps(sizes, indent=1) + "\n").encode())


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    draw_figures()


def draw_figures() -> None:
    head, store = load_head("max-retrieval"), published_store()
    fit, paper = (calibrate.load(name, store) for name in ("max-retrieval@1", "paper@1"))
    examples = draw_examples(head, SIZES, SETS, 0)
    save("figure-2-plain", heatmap_figure(examples, [None]))
    save("figure-6-plain-and-adaptive", heatmap_figure(examples, [None, fit]))
    draw("power-series", plot_power_series)
    solved = calibrate.solve(calibrate.collect(head, [n for n in SIZES if n <= MOST], SOLVED_SETS))
    others = {"published": paper, "selected": calibrate.load("max-retrieval", store)}
    own = calibrate.fit_polynomial(solved)
    draw("optimal-temperature", plot_optimal_beta, solved.rows, own, others)
    fits = {"baseline": None, "the paper's published polynomial": paper, fit.reference: fit}
    draw("entropy-by-size", plot_entropy_by_size, examples, fits)
    draw("beta-applied", plot_beta_applied, examples, fit)
    draw("shares", plot_shares, examples, fit)
    draw("reach", plot_reach, examples)
    save_dispersal(examples)
    spread = max(sets.spread().max() for sets in examples)
    bound = max(sets.spread_bound.max() for sets in examples)
    print(f"largest spread of the logits: {spread:.0f}, by Proposition 3.1 at most {bound:.0f}")
    comparison = comparison_of(json.loads((RESULTS / "table1.json").read_text()))
    accuracy = ("accuracy", "error", "accuracy (%)")
    draw("accuracy-by-size", plot_rules, comparison, *accuracy)
    gain = ("gain", "gain_error", "points of accuracy above the baseline")
    draw("gain-by-size", plot_rules, comparison, *gain)


if __name__ == "__main__":
    main()
