"""Figures: each function draws on an `ax` and returns it."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrate.files.coefficients import Coefficients
from calibrate.files.whole import write_whole
from calibrate.maths.rule import beta_of_entropy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from calibrate.pipeline.fit import Rows

# Okabe and Ito's palette: told apart by the colour-blind.
OURS, PAPER, SHADE, GATED = "#D55E00", "#000000", "#56B4E9", "#BBBBBB"


def save_fit_figure(
    path: Path, rows: "Rows", coefficients: Coefficients, paper: Coefficients
) -> None:
    """The paper's Figure 5 for this fit, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    plot_fit(figure.add_subplot(), rows, coefficients, paper)
    save_figure(path, figure)


def save_beta_figure(path: Path, coefficients: Coefficients) -> None:
    """beta over entropy, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    plot_beta(figure.add_subplot(), coefficients)
    save_figure(path, figure)


def save_figure(path: Path, figure: "Figure") -> None:
    """Writes a figure as PNG, whole or not at all."""
    write_whole(path, png(figure))


def png(figure: "Figure") -> bytes:
    """A figure as PNG; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def plot_fit(ax: "Axes", rows: "Rows", coefficients: Coefficients, paper: Coefficients) -> "Axes":
    """Optimal theta of every interior row against entropy, with the fitted curves."""
    used = rows.interior()
    lo, hi = coefficients.only.domain
    right = max(hi, float(used.entropy.max())) * 1.08
    ax.axvspan(lo, hi, color=SHADE, alpha=0.15, lw=0, label="domain of the fit")
    points = ax.scatter(
        used.entropy, 1 / used.beta, c=np.log2(used.size), s=5, alpha=0.4, lw=0, cmap="viridis_r",
        rasterized=True,
    )  # fmt: skip
    sizes = np.unique(used.size)
    shown = sizes[:: max(1, len(sizes) // 6)]
    bar = ax.figure.colorbar(points, ax=ax, ticks=np.log2(shown), label="set size n", pad=0.02)
    bar.ax.set_yticklabels([f"{n:,}" for n in shown])
    if bar.solids is not None:
        bar.solids.set_alpha(1)
    H = np.linspace(0, right, 600)
    for fit, colour, style, label in (
        (coefficients, OURS, "-", f"this fit ({coefficients.reference})"),
        (paper, PAPER, "--", "the paper's fit"),
    ):
        beta = beta_of_entropy(H, fit.only.coefficients, fit.only.domain, fit.rule, np)
        ax.plot(H, 1 / beta, style, color=colour, lw=2, label=label)
    top = max(1.25, float(np.percentile(1 / used.beta, 98)))
    hidden = int((1 / used.beta > top).sum())
    ax.set(
        xlim=(0, right), ylim=(0, top),
        xlabel="Shannon entropy H of softmax(z) (nats)",
        ylabel=r"optimal temperature $\theta^* = 1/\beta^*$",
        title=f"{len(used.beta):,} misranked rows"
        + (f"; {hidden:,} with $\\theta^*$ > {top:.2f} lie above" if hidden else ""),
    )  # fmt: skip
    ax.legend(loc="upper right", framealpha=0.9)
    return ax


def plot_beta(ax: "Axes", coefficients: Coefficients) -> "Axes":
    """beta of every entry against entropy, past both ends of the domain."""
    entries, rule = coefficients.entries, coefficients.rule
    H = np.linspace(0, 1.15 * max(entry.domain[1] for entry in entries), 1200)
    for i, entry in enumerate(entries):
        beta = beta_of_entropy(H, entry.coefficients, entry.domain, rule, np)
        inside = (entry.domain[0] <= H) & (entry.domain[1] >= H)
        label = None if i else ("beta" if len(entries) == 1 else f"beta, {len(entries)} heads")
        ax.plot(H, beta, color=OURS, lw=1, alpha=0.6, label="outside the domain" if not i else None)
        ax.plot(H[inside], beta[inside], color=OURS, lw=2.5, label=label)
    ax.axhline(1, color=PAPER, ls="--", lw=1, label="plain softmax")
    ax.axvline(rule.min_entropy, color=SHADE, ls=":", lw=1.5, label="gate: beta = 1 up to here")
    ax.set(
        xlim=(0, H[-1]),
        xlabel="Shannon entropy H of softmax(z) (nats)",
        ylabel=r"inverse temperature $\beta = 1/\theta$",
        title=coefficients.reference,
    )
    ax.legend(framealpha=0.9)
    return ax


def sizes_axis(ax: "Axes", sizes: Sequence[int]) -> None:
    """Set sizes along x, doubling from tick to tick."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [f"{n:,}" for n in sizes], rotation=45)
    ax.minorticks_off()
    ax.set_xlabel("set size n")
