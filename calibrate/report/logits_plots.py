"""Figures of scores on logits; each function draws on an `ax` and returns it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from calibrate.evaluation.baselines import label
from calibrate.evaluation.score_logits import LogitScores
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.fitting.solved_rows import head_in_words
from calibrate.maths.rule import LOG_SIZE, beta_of
from calibrate.report.diagnose_plots import STYLES as HEAD_STYLES
from calibrate.report.plots import ENTROPY_LABEL, GATED, PAPER, plot_head_map, short, sizes_axis
from calibrate.report.score_plots import STYLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_TOLD_APART = 10  # curves: more are a crowd, of which five are
WIDE_RANGE = 10  # of beta: from there on its axis is logarithmic


def plot_by_size(ax: "Axes", scores: LogitScores, rule: int, measure: str) -> "Axes":
    """One measure against set size, in nats: plain softmax, the paper's numbers and one fit.

    Bars are two standard errors long on either side.
    """
    found = [scores.estimate(size=i) for i in range(len(scores.sizes))]
    for name, i in (("plain", 0), ("paper", 1), ("own", rule)):
        colour, marker, dash = STYLES[name]
        mean, error = np.array([one.of(i, measure) for one in found]).T
        ax.errorbar(
            scores.sizes, mean, 2 * error, ls=dash, color=colour, marker=marker, ms=5, lw=1.4,
            capsize=3, label=short(label(scores.rules[i])),
        )  # fmt: skip
    sizes_axis(ax, scores.sizes)
    gain = measure.endswith("_gain")
    ax.set_ylabel("gain in log p of the target (nats)" if gain else "log p of the target (nats)")
    ax.grid(alpha=0.25, lw=0.5)
    ax.legend(fontsize=8, framealpha=0.9)
    return ax


def plot_gain_map(ax: "Axes", scores: LogitScores, rule: int) -> "Axes":
    """A map of layers and heads: what a fit adds to log p; x where it leaves a head as it is."""
    gains = {
        name: scores.estimate(head=i).of(rule, "log_p_gain")[0] if scores.names(rule, i) else None
        for i, name in enumerate(scores.heads)
    }
    found = [abs(gain) for gain in gains.values() if gain is not None]
    most = float(np.nanmax([0.0, *found])) or 1.0  # NaN: of a head none of whose rows counts
    image = plot_head_map(ax, gains, "-", cmap="PuOr_r", vmin=-most, vmax=most)
    ax.figure.colorbar(image, ax=ax, label="gain in log p of the target (nats)")
    return ax


def plot_betas(ax: "Axes", fit: Coefficients, order: Sequence[Entry]) -> "Axes":
    """beta of every entry over its domain; the first of `order` are told apart, others grey."""
    told = len(order) if len(order) <= MOST_TOLD_APART else len(HEAD_STYLES)
    for entry in order[told:]:
        ax.plot(*curve(fit, entry), color=GATED, lw=0.8, alpha=0.8, zorder=1)
    for i, entry in enumerate(order[:told]):
        colour, marker = HEAD_STYLES[i % len(HEAD_STYLES)]
        ax.plot(
            *curve(fit, entry), "--" if i >= len(HEAD_STYLES) else "-", color=colour,
            marker=marker, markevery=(i * 5, 50), ms=5, lw=1.5, zorder=3,
            label=head_in_words(entry.layer, entry.head) or short(fit.reference),
        )  # fmt: skip
    if len(order) > told:
        ax.plot([], [], color=GATED, lw=0.8, label=f"{len(order) - told:,} other heads")
    ax.axhline(1, color=PAPER, ls=":", lw=1, label="plain softmax", zorder=2)
    betas = np.concatenate([curve(fit, entry)[1] for entry in order])
    if betas.max() > WIDE_RANGE * min(1.0, betas.min()):
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter("{x:g}")
    if fit.rule.kind == LOG_SIZE:
        ends = [np.exp(end) for entry in order for end in entry.domain]
        first, last = (round(np.log2(end)) for end in (min(ends), max(ends)))
        sizes_axis(ax, [2**k for k in range(first, last + 1, max(1, (last - first) // 8))])
    else:
        ax.set_xlabel(ENTROPY_LABEL)
    ax.set_ylabel(r"inverse temperature $\beta$ (no unit)")
    figure = ax.get_figure(root=True)
    if figure is not None:
        handles = ax.get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return ax


def curve(fit: Coefficients, entry: Entry) -> tuple[np.ndarray, np.ndarray]:
    """(what beta is a function of, beta) over the domain of an entry."""
    x = np.linspace(*entry.domain, 201)
    beta = beta_of(x, x, entry.coefficients, entry.domain, fit.rule, np)
    return np.exp(x) if fit.rule.kind == LOG_SIZE else x, beta
