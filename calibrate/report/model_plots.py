"""Plots of a model's scores: answers and text under several rules, and beta of its heads."""

import math
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrate.evidence.baselines import label
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths.rule import beta_of
from calibrate.model.comparison import PLAIN, RIGHT, Estimate, ExampleComparison
from calibrate.report.plot_style import legend_below, new_figure, plot_head_map, save_figure, short
from calibrate.report.score_plots import OTHERS, STYLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Head = tuple[int | None, int | None]  # (layer, head); None: all
Groups = Sequence[tuple[str, Sequence[int]]]  # what stands below a place on the axis, and its cells
SPREAD = 0.4  # of the rules around their place
FAR = 10.0  # times the largest gain of the fit


def plot_scores(
    ax: "Axes", comparison: ExampleComparison, measure: str, groups: Groups, own: str, gain: bool
) -> "Axes":
    """A measure of every rule in each group; bars of two standard errors on either side.

    Args:
      ax: where to draw.
      comparison: of the rules.
      measure: "log_p" or "right".
      groups: of cells, from left to right.
      own: the rule that is highlighted.
      gain: whether differences to plain softmax are drawn, and not means.
    """
    factor = 100 if measure == RIGHT else 1
    rules = [rule for rule in comparison.rules if not (gain and rule == PLAIN)]
    others = iter(OTHERS * len(rules))
    are_lengths = all(name.replace(",", "").isdigit() for name, _ in groups)  # a line may join them
    for i, rule in enumerate(rules):
        colour, marker, dash = STYLES.get("own" if rule == own else rule) or next(others)
        estimate = comparison.gain if gain else comparison.mean
        means, errors = np.array([estimate(rule, measure, cells) for _, cells in groups]).T
        at = np.arange(len(groups)) + SPREAD * ((i + 0.5) / len(rules) - 0.5)
        ax.errorbar(
            at, factor * means, 2 * factor * np.nan_to_num(errors), color=colour, marker=marker,
            ls=dash if are_lengths else "", ms=5, lw=1.2, capsize=2,
            label=short(label(rule)), zorder=3 if rule == own else 2,
        )  # fmt: skip
    ax.set_xticks(range(len(groups)), [name for name, _ in groups])
    ax.set_xlim(-0.5, len(groups) - 0.5)
    ax.grid(alpha=0.25, lw=0.5, axis="y")
    if gain:
        ax.axhline(0, color="#777777", lw=0.8)
        _limit(ax, [comparison.gain(own, measure, cells) for _, cells in groups])
    unit = "answers right (%)" if measure == RIGHT else "log p (nats)"
    ax.set_ylabel(f"{unit}{', above plain softmax' * gain}")
    legend_below(ax)
    return ax


def _limit(ax: "Axes", gains: Sequence[Estimate]) -> None:
    """Leaves what is far beyond the fit's own gains out of the axis: it would hide them."""
    reach = max(abs(gain.mean) + 2 * np.nan_to_num(gain.error) for gain in gains)
    low, high = ax.get_ylim()
    if reach > 0:
        ax.set_ylim(max(low, -FAR * reach), min(high, FAR * reach))


def plot_head_betas(
    ax: "Axes", fit: Coefficients, n: int, heads: Iterable[Head] | None = None
) -> "Axes":
    """A map of log2 beta of the heads, as `typical_betas` has it; x: no rule.

    Args:
      ax: where to draw.
      fit: with entries for layers or heads.
      n: keys of a query.
      heads: of the model; None for as many as the fit shows there are.
    """
    if heads is None:
        layers, columns = ([getattr(e, x) for e in fit.entries] for x in ("layer", "head"))
        heads = product(_upto(layers), _upto(columns))
    betas = typical_betas(fit, n, heads)
    values = {name: None if beta is None else math.log2(beta) for name, beta in betas.items()}
    most = max([0.1, *(abs(value) for value in values.values() if value is not None)])
    plot_head_map(ax, values, "all", r"$\log_2 \beta$", cmap="RdBu_r", vmin=-most, vmax=most)
    return ax


def save_head_betas(
    path: Path, fit: Coefficients, n: int, heads: Sequence[tuple[int, int]]
) -> None:
    """The heads of a model, coloured by beta, as a PNG."""
    n_layers = len({layer for layer, _ in heads})
    figure = new_figure(6.0, min(max(3.6, 0.28 * n_layers), 12))
    ax = plot_head_betas(figure.subplots(), fit, n, heads)
    ax.set_title("red is sharper, blue more diffuse than plain softmax", fontsize=10)
    save_figure(path, figure)


def typical_betas(fit: Coefficients, n: int, heads: Iterable[Head]) -> dict[Head, float | None]:
    """beta of a query with n keys and half of the entropy that it can have; None: no rule."""
    log_n = np.log(np.float64(n))

    def beta(entry: Entry | None) -> float | None:
        if entry is None:
            return None
        of = (entry.coefficients, entry.domain, fit.rule, np)
        return float(beta_of(log_n / 2, log_n, *of))

    return {name: beta(fit.entry_of(*name)) for name in heads}


def _upto(numbers: list[int | None]) -> list[int | None]:
    """All numbers up to the largest; None alone if there is no number."""
    known = [number for number in numbers if number is not None]
    return [*range(max(known) + 1)] if known else [None]
