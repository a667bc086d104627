"""Figures of a comparison: accuracy against set size under every rule."""

from typing import TYPE_CHECKING

import numpy as np

from calibrate.evaluation.baselines import LABELS, label
from calibrate.evaluation.comparison import Comparison
from calibrate.report.plots import OURS, PAPER, short, sizes_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, and a marker and dash of its own for every rule.
STYLES = {
    "plain": (PAPER, "o", "-"),
    "paper": ("#0072B2", "s", "-"),
    "rounded": ("#56B4E9", "s", ":"),
    "procedure": ("#0072B2", "d", "--"),
    "own": (OURS, "^", "-"),
    "own-512": ("#E69F00", "v", "--"),
    "polynomial": ("#F0E442", "<", "-"),
    "log-n": ("#009E73", "D", "--"),
    "kappa-log-n": ("#009E73", "P", ":"),
    "constant": ("#CC79A7", "X", "--"),
    "hard": ("#777777", "*", "-."),
    "hindsight": ("#777777", "_", "-"),
}
BANDS = ("plain", "own")  # of all rules they would hide each other
OTHERS = (("#999933", "h", "--"), ("#882255", "p", "--"), ("#44AA99", "d", "--"))


def plot_accuracy(ax: "Axes", comparison: Comparison, own: str = LABELS["own"]) -> "Axes":
    """Accuracy against set size, with bands of two standard errors; legend below."""
    _plot_rules(ax, comparison, comparison.accuracy, comparison.error, own)
    ax.set_ylabel("accuracy (%)")
    return ax


def plot_gain(ax: "Axes", comparison: Comparison, own: str = LABELS["own"]) -> "Axes":
    """Accuracy less that of plain softmax, in points, with bands as above; legend below."""
    _plot_rules(ax, comparison, comparison.gain, comparison.gain_error, own)
    ax.set_ylabel("accuracy, points above plain softmax")
    return ax


def _plot_rules(
    ax: "Axes", comparison: Comparison, values: np.ndarray, errors: np.ndarray, own: str
) -> None:
    styles = [STYLES.get(rule) for rule in comparison.rules]
    others = iter(OTHERS * len(styles))
    for i, rule in enumerate(comparison.rules):
        colour, marker, dash = styles[i] or next(others)
        middle, error = 100 * values[i], 200 * errors[i]
        ax.plot(
            comparison.sizes, middle, dash, color=colour, marker=marker, ms=5, lw=1.4,
            label=label(rule, short(own)), zorder=3 if rule == "own" else 2,
        )  # fmt: skip
        if rule in BANDS:
            ax.fill_between(
                comparison.sizes, middle - error, middle + error, color=colour, alpha=0.2, lw=0
            )
    sizes_axis(ax, comparison.sizes)
    ax.grid(alpha=0.25, lw=0.5)
    handles = ax.get_legend_handles_labels()
    figure = ax.get_figure(root=True)
    if figure is not None:
        figure.legend(
            *handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False,
            columnspacing=1.2, handlelength=1.8,
        )  # fmt: skip
