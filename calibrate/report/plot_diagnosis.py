"""The figure of a diagnosis: inputs in the plane of commitment and susceptibility."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from calibrate.report.plot_style import (
    add_size_bar,
    new_figure,
    own_style,
    short,
    size_colours,
)
from calibrate.rows.diagnosis import Diagnosis, HeadDiagnosis, Inputs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

MAX_SHOWN_INPUTS = 2_000  # of a head: a random sample of more inputs
SEED = 0  # of that sample
MAX_PANELS = 6  # of more heads, half with the lowest slopes and half with the highest
MAX_COLUMNS = 3
PANEL, ONLY_PANEL = (2.9, 2.5), (5.2, 3.9)  # inches, of several heads and of one
RHO_LABEL = r"commitment $\rho = \log n - H$ (nats)"
CHI_LABEL = r"susceptibility $\partial\rho/\partial\beta = \mathrm{Var}(z)$ (nats)"


@own_style()
def draw_diagnosis(diagnosis: Diagnosis) -> "Figure":
    """Draws a panel for each head: a point for each input, and a circle for the means of each n.

    Of many heads, those with the lowest and those with the highest slopes are shown.
    """
    shown = shown_heads(diagnosis.heads)
    columns = min(MAX_COLUMNS, math.ceil(math.sqrt(len(shown))))
    rows = math.ceil(len(shown) / columns)
    width, height = PANEL if len(shown) > 1 else ONLY_PANEL
    figure = new_figure(1.2 + width * columns, 0.9 + height * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    n = np.unique(np.concatenate([diagnosis.inputs[i].n for i in shown]))
    image = size_colours(n[0], n[-1])
    for ax, i in zip(axes, shown, strict=False):
        plot_plane(ax, diagnosis.heads[i], diagnosis.inputs[i], image)
    axes[0].set_xlim(left=-0.02 * axes[0].get_xlim()[1])  # 0 is uniform attention
    for ax in axes[len(shown) :]:
        ax.remove()
    for ax in axes[len(shown) - columns : len(shown)]:
        ax.tick_params(labelbottom=True)  # also above an empty place
    title = "Inputs (points) and their means at each n (circles)"
    if len(shown) < len(diagnosis.heads):
        title += f"; {len(shown)} of {len(diagnosis.heads):,} heads"
    figure.suptitle(title, fontsize=10)
    figure.supxlabel(RHO_LABEL, fontsize=10)
    figure.supylabel(CHI_LABEL, fontsize=10)
    add_size_bar(figure, image, n, ax=figure.axes)
    return figure


def shown_heads(heads: Sequence[HeadDiagnosis]) -> list[int]:
    """The indices of the heads that have panels; heads are in order of rising slope."""
    with_slope = sum(head.slope is not None for head in heads)
    if with_slope <= MAX_PANELS:
        return list(range(min(len(heads), MAX_PANELS)))
    half = MAX_PANELS // 2
    return [*range(half), *range(with_slope - half, with_slope)]


def plot_plane(ax: "Axes", head: HeadDiagnosis, inputs: Inputs, image: "ScalarMappable") -> None:
    """Draws inputs of one head, coloured by n, and the means of each set size."""
    order = np.random.default_rng(SEED).permutation(len(inputs.n))  # so that no n hides the others
    points = inputs.take(order[:MAX_SHOWN_INPUTS])
    ax.scatter(
        points.commitment,
        points.susceptibility,
        color=image.to_rgba(points.n),
        s=6,
        alpha=0.45,
        lw=0,
        rasterized=True,
    )
    rho, chi = np.array([(at.commitment.mean, at.susceptibility) for at in head.sizes]).T
    ax.plot(rho, chi, "-", color="black", lw=1, zorder=3)
    of_n = image.to_rgba(np.array([at.most_n for at in head.sizes]))
    ax.scatter(rho, chi, color=of_n, s=34, ec="black", lw=0.9, zorder=4)
    title = short(head.name)
    if head.slope is not None:
        title += f": slope {head.slope.shown('.3f')}"
    ax.set_title(title, fontsize=9)
