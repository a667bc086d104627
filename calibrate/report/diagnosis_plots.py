"""The plot of a diagnosis: entropy by set size."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrate.report.plot_style import (
    GATED,
    HEAD_STYLES,
    PAPER,
    draw,
    save_figure,
    short,
    sizes_axis,
)
from calibrate.rows.diagnosis import Diagnosis, HeadDiagnosis

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def save_figures(folder: Path, diagnosis: Diagnosis) -> list[Path]:
    """Writes the figure of a diagnosis into a folder as PNG; returns its path in a list."""
    path = folder / "entropy.png"
    save_figure(path, draw(plot_entropy, diagnosis.heads))
    return [path]


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
