"""Plots of scores: accuracy of a head, or probability of the target, under several rules."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from calibrate.evidence.baselines import LABELS, label
from calibrate.evidence.evidence import LOG_P, PLAIN, Evidence
from calibrate.evidence.evidence import Evidence as Comparison
from calibrate.report import plot_style
from calibrate.report.plot_style import OURS, PAPER, legend_below, short, sizes_axis

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
    "entropy-and-size": ("#882255", ">", "-"),
    "polynomial": ("#F0E442", "<", "-"),
    "log-n": ("#009E73", "D", "--"),
    "kappa-log-n": ("#009E73", "P", ":"),
    "constant": ("#CC79A7", "X", "--"),
    "hard": ("#777777", "*", "-."),
    "hindsight": ("#777777", "_", "-"),
}
# What people compare, in this order: of more curves than these, none can be told from another.
COMPARED = ("own", "plain", "paper", "hard", "log-n", "constant", "kappa-log-n")
MOST_CURVES = 5
BANDS = ("plain", "own")  # bands of all rules would overlap
OTHERS = (("#999933", "h", "--"), ("#332288", "p", "--"), ("#44AA99", "d", "--"))


def plot_accuracy(ax: "Axes", comparison: Comparison, own: str = LABELS["own"]) -> "Axes":
    """Accuracy against set size, with bands of two standard errors; legend below."""
    _plot_rules(ax, comparison, comparison.accuracy, comparison.error, own)
    ax.set_ylabel("accuracy (%)")
    return ax


def plot_gain(ax: "Axes", comparison: Comparison, own: str = LABELS["own"]) -> "Axes":
    """Accuracy less that of plain softmax, in points, with bands as above; legend below."""
    _plot_rules(ax, comparison, comparison.gain, comparison.gain_error, own)
    ax.set_ylabel("points of accuracy above plain")
    return ax


def _plot_rules(
    ax: "Axes", comparison: Comparison, values: np.ndarray, errors: np.ndarray, own: str
) -> None:
    for rule in _compared(comparison.rules):
        i, (colour, marker, dash) = comparison.rules.index(rule), STYLES[rule]
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
    legend_below(ax)


def _compared(rules: Sequence[str]) -> list[str]:
    """The rules that are drawn, in their own order."""
    shown = [rule for rule in COMPARED if rule in rules][:MOST_CURVES]
    return [rule for rule in rules if rule in shown]


def plot_by_size(ax: "Axes", evidence: Evidence, rule: str, gain: bool = True) -> "Axes":
    """log p, or its gain, against set size: plain softmax, the paper's numbers and one fit.

    Bars are two standard errors long on either side.
    """
    by_size = evidence.by("size")
    for style, name in (("plain", PLAIN), ("paper", "paper"), ("own", rule)):
        colour, marker, dash = STYLES[style]
        estimates = [
            part.gain(name, LOG_P) if gain else part.mean(name, LOG_P) for part in by_size.values()
        ]
        mean, error = np.array([(one.mean, one.error) for one in estimates]).T
        ax.errorbar(
            list(by_size), mean, 2 * error, ls=dash, color=colour, marker=marker, ms=5, lw=1.4,
            capsize=3, label=short(label(name)),
        )  # fmt: skip
    sizes_axis(ax, list(by_size))
    ax.set_ylabel(f"{'gain in ' * gain}log p of the target (nats)")
    ax.grid(alpha=0.25, lw=0.5)
    ax.legend(fontsize=8, framealpha=0.9)
    return ax


def plot_gain_map(ax: "Axes", evidence: Evidence, rule: str) -> "Axes":
    """A map of layers and heads: what a fit adds to log p; x where it has no rule for a head."""
    gains = {
        head: float(part.gain(rule, LOG_P).mean) if evidence.names(rule, head) else None
        for head, part in evidence.by("head").items()
    }
    return plot_style.plot_gain_map(ax, gains, "-", "gain in log p of the target (nats)")
