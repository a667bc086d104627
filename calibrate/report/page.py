"""What every page is made of: templates that share their look, and figures in the page itself."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from calibrate.files.atomic_io import write_atomically
from calibrate.report import plot_style
from calibrate.report.comparison_views import NOTHING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NARROW = (5.4, 4.2)  # inches: two side by side on a wide screen


class Picture(NamedTuple):
    """A figure of the page."""

    source: str  # a data: URL
    title: str
    caption: str
    wide: bool


def write_page(path: Path, template: str, **values: Any) -> None:
    """Writes what a template of this folder makes of values, whole or not at all.

    Values are text, and no HTML; letters that UTF-8 has not, as a file may have in its name, are
    written as question marks.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["thousands"] = lambda value: f"{value:,.0f}"
    environment.filters["number"] = lambda value: NOTHING if value is None else f"{value:.3g}"
    html = environment.get_template(template).render(values)
    write_atomically(path, html.encode(errors="replace"))


def draw(plot: "Callable[..., Axes]", *arguments: Any, title: str, caption: str) -> Picture:
    """A picture of what `plot` draws on its first argument, an `ax`."""
    figure = plot_style.draw(plot, *arguments, size=NARROW)
    return Picture(encode(figure), title, caption, wide=False)


def encode(figure: "Figure") -> str:
    """A figure as a data: URL."""
    return "data:image/png;base64," + base64.b64encode(plot_style.png(figure)).decode()
