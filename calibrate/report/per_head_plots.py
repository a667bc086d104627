"""Figure of a fit per head: a map of layers and heads with the gain of each."""

from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.fitting.per_head import PerHeadResult
from calibrate.report.plot_style import draw, plot_head_map, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def save_gains_figure(path: Path, fits: PerHeadResult) -> None:
    """Writes the gain of each head as PNG."""
    save_figure(path, draw(plot_gains, fits))


def plot_gains(ax: "Axes", fits: PerHeadResult) -> "Axes":
    """Draws the gain of each head; heads without a rule are marked with an x."""
    gains = {(head.layer, head.head): head.gain if head.rule else None for head in fits.heads}
    n = len(fits.calibrated)
    ax.set_title(f"{n} of {len(fits.heads)} heads gain by a rule\n(x: plain softmax)")
    label = f"gain in {fits.unit}, held out"
    return plot_head_map(ax, gains, "all", label, cmap="viridis_r", vmin=0)
