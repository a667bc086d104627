"""Maps of a model's heads: their betas, and what a first look says they want."""

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
    from matplotlib.figure import Figure

    from calibrate.model.first_look import HeadLook, Look

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


def draw_first_look(look: "Look") -> "Figure":
    """The map of the answers, and that of plain text beside it."""
    shown = [kind for kind in ("answers", "text") if getattr(look, kind) is not None]
    n_layers = len({head.layer for head in look.heads})
    figure = new_figure(6.0 * len(shown), min(max(3.6, 0.28 * n_layers), 12))
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for ax, kind in zip(axes, shown, strict=True):
        wants = "wants" if kind == "answers" or len(shown) == 1 else "text_wants"
        plot_slopes(ax, look.heads, kind, wants)
    return figure


def plot_slopes(ax: "Axes", heads: "Sequence[HeadLook]", kind: str, wants: str) -> "Axes":
    """A map of slopes, red where a head wants to be sharper; a dot where that is beyond chance.

    Args:
      ax: where to draw.
      heads: of a model.
      kind: "answers" or "text".
      wants: the field of HeadLook that says what they want by it.
    """
    values: dict[tuple[int | None, int | None], float | None] = {
        (head.layer, head.head): getattr(head, kind)[0] for head in heads
    }
    most = max(map(abs, filter(None, values.values())), default=1.0)
    title = "answers" if kind == "answers" else "plain text, per token"
    label = r"d log p / d log $\beta$ (nats)"
    plot_head_map(ax, values, "all", label, cmap="RdBu_r", vmin=-most, vmax=most)
    rows, columns = sorted({h.layer for h in heads}), sorted({h.head for h in heads})
    clear = [head for head in heads if getattr(head, wants) != "unclear"]
    ax.plot(
        [columns.index(head.head) for head in clear], [rows.index(head.layer) for head in clear],
        "k.", ms=4, ls="",
    )  # fmt: skip
    ax.set_title(f"{title}: red wants to be sharper, blue more diffuse", fontsize=10)
    return ax
