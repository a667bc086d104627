"""Plots of beta of a model's heads."""

import math
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths.rule import beta_of
from calibrate.report.plot_style import new_figure, plot_head_map, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Head = tuple[int | None, int | None]  # (layer, head); None: all


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
