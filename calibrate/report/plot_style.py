"""Style of all figures: colours, markers, axes, legends, and PNG files."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.errors import printable
from calibrate.storage.atomic_io import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which the colour-blind can tell apart.
OURS = "#D55E00"
BLACK = "#000000"
SHADE = "#56B4E9"
GREY = "#BBBBBB"
DOMAIN_SHADE = "#E4F0FA"  # opaque, and nearly as bright as the white around it
# Colour, marker and dash of every rule: the markers distinguish them without colour.
STYLES = {
    "baseline": (BLACK, "o", "-"),
    "paper": ("#0072B2", "s", "-"),
    "least-squares": ("#56B4E9", "d", "--"),
    "own": (OURS, "^", "-"),
    "entropy-and-size": ("#882255", ">", "-"),
    "polynomial": ("#F0E442", "<", "-"),
    "log-n": ("#009E73", "D", "--"),
    "log-size": ("#661100", "P", ":"),
    "constant": ("#CC79A7", "X", "--"),
    "hard": ("#777777", "*", "-."),
}
OTHERS = (("#999933", "h", "--"), ("#332288", "p", "--"), ("#44AA99", "d", "--"))
DPI = 200
MAX_LETTERS = 24  # of a name in the legend of a narrow figure
MAX_SIZE_TICKS = 6  # of a colour bar
ENTROPY_LABEL = "Shannon entropy H of softmax(z) (nats)"
BETA_LABEL = r"inverse temperature $\beta = 1/\theta$"


@contextmanager
def own_style() -> Iterator[None]:
    """Applies Matplotlib's default settings to a block, or to a function that it decorates.

    So a user's fonts and LaTeX change no figure. Settings take effect when a figure is made and
    when it is saved.
    """
    import matplotlib.style

    with matplotlib.style.context("default"):
        yield


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, in inches; call this in functions decorated with `own_style` only."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


@own_style()
def draw(
    plot: "Callable[..., Axes]",
    *arguments: Any,
    size: tuple[float, float] = (7.2, 4.6),
    **options: Any,
) -> "Figure":
    """A figure, in inches, of a function that draws on its first argument, an `ax`."""
    figure = new_figure(*size)
    plot(figure.add_subplot(), *arguments, **options)
    return figure


def save_figure(path: Path, figure: "Figure") -> None:
    """Writes a figure as a PNG file, whole or not at all."""
    write_atomically(path, png(figure))


@own_style()
def png(figure: "Figure") -> bytes:
    """A figure as PNG; drawing the same figure again gives the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    figure.set_dpi(DPI)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(buffer, metadata={"Software": None})  # savefig draws twice
    return buffer.getvalue()


def short(name: str) -> str:
    """A name for a legend: shortened in its middle, with escaped dollar signs."""
    name = printable(name)  # Matplotlib fails on lone surrogates
    if len(name) > MAX_LETTERS:
        name = f"{name[: MAX_LETTERS - 7]}…{name[-6:]}"
    return name.replace("$", r"\$")


def sizes_axis(ax: "Axes", sizes: Sequence[int]) -> None:
    """Puts set sizes along x, on a scale of base 2."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [f"{n:,}" for n in sizes], rotation=45)
    ax.minorticks_off()
    ax.set_xlabel("items n")


def size_colours(least: float, most: float) -> "ScalarMappable":
    """The colours of n, on a logarithmic scale: viridis without its ends.

    Yellow is hard to see on white; the dark end is white when a figure is inverted.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    colours = colormaps["viridis_r"](np.linspace(0.3, 0.85, 256))
    scale = LinearSegmentedColormap.from_list("n", colours.tolist())
    return ScalarMappable(LogNorm(0.9 * least, 1.1 * most), scale)


def add_size_bar(figure: Any, image: "ScalarMappable", n: np.ndarray, **placement: Any) -> None:
    """Adds the scale of `size_colours`, with ticks at each n, or at powers of 2 of many."""
    n = np.unique(n)
    if len(n) > MAX_SIZE_TICKS:
        powers = 2 ** np.arange(np.ceil(np.log2(n[0])), np.log2(n[-1]) + 1e-9).astype(int)
        n = powers[:: -(-len(powers) // MAX_SIZE_TICKS)] if len(powers) > 1 else n[[0, -1]]
    bar = figure.colorbar(image, label="items n", pad=0.02, aspect=40, **placement)
    bar.ax.minorticks_off()
    bar.set_ticks(n.tolist(), labels=[f"{size:,}" for size in n])


def legend_below(ax: "Axes") -> None:
    """Adds a legend of two columns under the axes, in its own part of the figure."""
    ax.figure.legend(
        *ax.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        frameon=False,
        columnspacing=1.0,
        handlelength=1.8,
    )
