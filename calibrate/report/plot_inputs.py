"""Inputs in the plane of entropy and optimal beta: points, and a density where there are many."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from calibrate.report.plot_style import size_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

MAX_POINTS = 2_000  # of more inputs, those in crowded cells are shown by their number
N_CELLS = 48, 40  # along the entropies, and along log beta
MIN_CROWDED = 4  # inputs of a cell
ALPHAS = 0.25, 0.95  # opacity of the emptiest and of the fullest crowded cell
N_TICKS = 6  # of the sizes that colours stand for, at most


class PlaneGrid(NamedTuple):
    """A grid over the plane; arrays are (entropies, betas) unless noted otherwise."""

    entropy: np.ndarray  # (entropies + 1,) edges
    beta: np.ndarray  # (betas + 1,) edges
    inputs: np.ndarray  # their number
    items: np.ndarray  # geometric mean n of the inputs, 1 without any
    crowded: np.ndarray  # bool
    in_crowded: np.ndarray  # (inputs,) bool: whether an input is in a crowded cell


def count_in_cells(
    entropy: np.ndarray, beta: np.ndarray, items: np.ndarray, bounds: tuple[float, float]
) -> PlaneGrid:
    """The inputs of each cell; betas lie within the bounds."""
    edges = (
        np.linspace(0, entropy.max(initial=1e-9), N_CELLS[0] + 1),
        np.geomspace(*bounds, N_CELLS[1] + 1),
    )
    places = [
        np.clip(np.searchsorted(edge, value, "right") - 1, 0, n - 1)
        for edge, value, n in zip(edges, (entropy, beta), N_CELLS, strict=True)
    ]
    cell = np.ravel_multi_index(places, N_CELLS)
    n = N_CELLS[0] * N_CELLS[1]
    count = np.bincount(cell, minlength=n)
    mean = np.exp(np.bincount(cell, np.log(items), n) / np.maximum(count, 1))
    crowded = count >= MIN_CROWDED
    inputs, mean_items, is_crowded = (x.reshape(N_CELLS) for x in (count, mean, crowded))
    return PlaneGrid(*edges, inputs, mean_items, is_crowded, crowded[cell])


def plot_inputs(
    ax: "Axes",
    entropy: np.ndarray,
    beta: np.ndarray,
    items: np.ndarray,
    bounds: tuple[float, float],
    max_points: int = MAX_POINTS,
) -> None:
    """Points coloured by n; of more than `max_points`, cells instead where they are crowded.

    The colour of a cell is the mean n of its inputs, and its opacity grows with their number.
    """
    image = size_colours(items.min(initial=1 << 30), items.max(initial=1))
    norm: Any = image.norm  # its declared type is wider than the one that `scatter` takes
    alone = np.ones(len(items), bool)
    if len(items) > max_points:
        cells = count_in_cells(entropy, beta, items, bounds)
        _plot_cells(ax, cells, image)
        alone = ~cells.in_crowded
    ax.scatter(
        entropy[alone],
        beta[alone],
        c=items[alone],
        norm=norm,
        cmap=image.cmap,
        s=7,
        alpha=0.55,
        lw=0,
        zorder=2,
    )
    _add_colour_bar(ax, image, items)


def _plot_cells(ax: "Axes", cells: PlaneGrid, image: "ScalarMappable") -> None:
    """The crowded cells."""
    colours = image.to_rgba(cells.items)
    fullness = np.log(np.maximum(cells.inputs, MIN_CROWDED) / MIN_CROWDED)
    share = fullness / max(fullness.max(), 1e-9)
    colours[..., 3] = np.where(cells.crowded, ALPHAS[0] + share * (ALPHAS[1] - ALPHAS[0]), 0)
    mesh = colours.transpose(1, 0, 2)
    ax.pcolormesh(cells.entropy, cells.beta, mesh, zorder=1.5, rasterized=True)


def _add_colour_bar(ax: "Axes", image: "ScalarMappable", items: np.ndarray) -> None:
    sizes = np.unique(items)
    if len(sizes) > N_TICKS:  # of many, powers of two
        sizes = 2 ** np.arange(np.ceil(np.log2(sizes[0])), np.log2(sizes[-1]) + 1e-9).astype(int)
        sizes = sizes[:: max(1, -(-len(sizes) // N_TICKS))]
    bar = ax.figure.colorbar(
        image, ax=ax, label="items n", location="top", pad=0.02, aspect=40, fraction=0.04
    )
    bar.ax.minorticks_off()
    bar.set_ticks(sizes.tolist(), labels=[f"{n:,}" for n in sizes])
