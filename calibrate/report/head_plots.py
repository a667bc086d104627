"""Figures of a head at work: its coefficients, entropies and temperatures on single sets."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from calibrate.evaluation.examples import Closeup, estimated_dispersal, reach, shares
from calibrate.files.coefficients import Coefficients
from calibrate.maths.reference import entropy
from calibrate.maths.rule import LOG_SIZE, beta_of
from calibrate.report.plots import ENTROPY_LABEL, GATED, OURS, PAPER, SHADE, short, sizes_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

N_SETS = 32
N_PANELS = 8
MIDDLE = (10, 50, 90)  # per cent of the rows: a band and its median


def heatmap_figure(closeups: Sequence[Closeup], fits: Sequence[Coefficients | None]) -> "Figure":
    """The paper's Figures 2 and 6: coefficients of the 16 largest keys of 32 sets.

    A column of panels per set size, a row of panels per fit; None is plain softmax.
    """
    from matplotlib.figure import Figure

    chosen = np.linspace(0, len(closeups) - 1, min(N_PANELS, len(closeups))).round().astype(int)
    shown = [closeups[i] for i in chosen]
    figure = Figure(figsize=(9.6, 0.7 + 1.9 * len(fits)), layout="constrained")
    axes = figure.subplots(len(fits), len(shown), squeeze=False)
    for row, fit in zip(axes, fits, strict=True):
        for ax, closeup in zip(row, shown, strict=True):
            image = plot_coefficients(ax, closeup, fit)
        name = "plain softmax" if fit is None else f"with {short(fit.reference)}"
        row[0].set_ylabel(name, fontsize=9)
    for ax, closeup in zip(axes[0], shown, strict=True):
        ax.set_title(f"n = {closeup.size:,}", fontsize=9)
    figure.supxlabel("the 16 items with the largest keys, the target rightmost", fontsize=9)
    figure.supylabel(f"{N_SETS} sets", fontsize=9)
    figure.colorbar(image, ax=axes, label="attention coefficient", shrink=0.9, pad=0.01)
    return figure


def plot_coefficients(ax: "Axes", closeup: Closeup, fit: Coefficients | None):
    """One panel of a heatmap; returns the image, which gives the scale."""
    part = closeup.coefficients(fit)[:N_SETS]
    largest = np.take_along_axis(part, closeup.largest[:N_SETS], axis=1)
    image = ax.imshow(
        largest, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest"
    )
    ax.set(xticks=[], yticks=[])
    return image


def plot_entropy_by_size(
    ax: "Axes", closeups: Sequence[Closeup], fits: dict[str, Coefficients | None]
) -> "Axes":
    """Entropy of the coefficients against set size: the median, and the middle 80 %."""
    sizes = [closeup.size for closeup in closeups]
    styles = (("-", PAPER, "o"), ("--", SHADE, "s"), ("-", OURS, "^"))
    for (name, fit), (style, colour, marker) in zip(fits.items(), styles, strict=False):
        H = [entropy(c.logits * c.beta(fit)[:, None]) for c in closeups]
        low, middle, high = np.array([np.percentile(h, MIDDLE) for h in H]).T
        ax.plot(sizes, middle, style, color=colour, marker=marker, ms=4, label=short(name))
        ax.fill_between(sizes, low, high, color=colour, alpha=0.15, lw=0)
    ax.plot(sizes, np.log(sizes), ":", color="#777777", label="log n: all items alike")
    sizes_axis(ax, sizes)
    ax.set_ylabel("Shannon entropy of the coefficients (nats)")
    ax.legend(framealpha=0.9)
    return ax


def plot_beta_applied(ax: "Axes", closeups: Sequence[Closeup], fit: Coefficients) -> "Axes":
    """beta against entropy, or set size, and on it the rows of every set size."""
    from matplotlib.colors import LogNorm

    entry, by_size = fit.only, fit.rule.kind == LOG_SIZE
    on_axis = np.exp if by_size else np.asarray
    every = np.concatenate([c.looked_at(fit) for c in closeups])
    x = np.linspace(0, 1.05 * max(entry.domain[1], float(every.max())), 800)
    beta = beta_of(x, x, entry.coefficients, entry.domain, fit.rule, np)
    ax.axvspan(*on_axis(entry.domain), color=SHADE, alpha=0.15, lw=0, label="domain of the fit")
    ax.plot(on_axis(x), beta, color=OURS, lw=2, label="beta(n)" if by_size else "beta(H)", zorder=2)
    sizes = np.concatenate([np.full(len(c.entropy), c.size) for c in closeups])
    noise = np.random.default_rng(0).uniform(-0.02, 0.02, len(every))
    applied = np.concatenate([c.beta(fit) for c in closeups]) + noise * np.ptp(beta)
    points = ax.scatter(
        on_axis(every), applied, c=sizes, norm=LogNorm(), s=6, alpha=0.5, lw=0, cmap="viridis_r",
        zorder=3, rasterized=True,
    )  # fmt: skip
    bar = ax.figure.colorbar(points, ax=ax, label="set size n", pad=0.02)
    bar.ax.minorticks_off()
    ticks = [c.size for c in closeups][:: max(1, len(closeups) // 6)]
    bar.set_ticks(ticks, labels=[f"{n:,}" for n in ticks])
    if bar.solids is not None:
        bar.solids.set_alpha(1)
    if by_size:
        sizes_axis(ax, ticks)
    else:
        ax.set_xlabel(ENTROPY_LABEL)
    ax.set(xlim=on_axis(x[[0, -1]]), ylabel=r"inverse temperature $\beta$ applied")
    ax.legend(framealpha=0.9)
    return ax


def plot_shares(ax: "Axes", closeups: Sequence[Closeup], fit: Coefficients) -> "Axes":
    """What becomes of the rows of each size: left alone, in the domain, or beyond it."""
    found = shares(closeups, fit)
    outside = "clamped" if fit.rule.outside == "clamp" else "left alone"
    if fit.rule.kind == LOG_SIZE:
        outside = "the line goes on"
    parts = [
        ("gated", f"H up to {fit.rule.min_entropy:g}: beta is 1", GATED, ""),
        ("below", f"below the domain: {outside}", SHADE, "//"),
        ("inside", "in the domain", OURS, ""),
        ("above", f"above the domain: {outside}", PAPER, ""),
    ][fit.rule.kind == LOG_SIZE :]  # without a gate
    bottom = np.zeros(len(found))
    for key, label, colour, hatch in parts:
        height = np.array([100 * getattr(share, key) for share in found])
        ax.bar(
            range(len(found)), height, bottom=bottom, color=colour, label=label, width=0.8,
            hatch=hatch, edgecolor="white", lw=0.5,
        )  # fmt: skip
        bottom += height
    ax.set_xticks(range(len(found)), [f"{share.size:,}" for share in found], rotation=45)
    ax.set(xlabel="set size n", ylabel="share of the sets (%)", ylim=(0, 100))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.24), ncols=2, fontsize=8, frameon=False)
    return ax


def plot_reach(ax: "Axes", closeups: Sequence[Closeup]) -> "Axes":
    """The target's coefficient against set size, the estimate, and the bound of Lemma 2.1."""
    sizes = [closeup.size for closeup in closeups]
    got = [np.percentile(c.target_coefficient(None), MIDDLE) for c in closeups]
    low, middle, high = np.array(got).T
    half = estimated_dispersal(closeups)
    n = np.geomspace(sizes[0], max(sizes[-1], 2), 200)
    ax.plot(sizes, middle, color=PAPER, marker="o", ms=4, label="measured: median, middle 80 %")
    ax.fill_between(sizes, low, high, color=PAPER, alpha=0.15, lw=0)
    if 1 < half < np.inf:
        estimate = 1 / (1 + (n - 1) / (half - 1))
        ax.plot(n, estimate, "--", color=OURS, lw=2, label=f"estimate from n = {sizes[-1]:,}")
    bounds = [found.highest_bound for found in reach(closeups)]
    ax.plot(sizes, bounds, ":", color=SHADE, lw=2, label="Lemma 2.1: at most")
    ax.axhline(0.5, color="#777777", lw=0.8)
    sizes_axis(ax, sizes)
    ax.set(ylabel="coefficient of the target, plain softmax", ylim=(0, 1.05))
    ax.legend(framealpha=0.9, loc="upper right", bbox_to_anchor=(1, 0.93))
    return ax


def plot_power_series(ax: "Axes", n: int = 10) -> "Axes":
    """Entropy of softmax over z_i = lambda^i, i = 1..n, at temperature theta."""
    lam, theta = np.linspace(0, 1, 201), np.geomspace(0.01, 10, 201)
    z = lam[:, None] ** np.arange(1, n + 1)
    H = np.stack([entropy(z / t) for t in theta])
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
