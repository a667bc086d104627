"""What every page is made of: templates that share their look, and figures in the page itself."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from calibrate.faces import plots
from calibrate.faces.comparison_views import NOTHING

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


def render(template: str, **values: Any) -> str:
    """The page that a template of this folder makes of some values, which are text and no HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["thousands"] = lambda value: f"{value:,.0f}"
    environment.filters["number"] = lambda value: NOTHING if value is None else f"{value:.3g}"
    return environment.get_template(template).render(values)


def draw(plot: "Callable[..., Axes]", *arguments: Any, title: str, caption: str) -> Picture:
    """A picture of what `plot` draws on its first argument, an `ax`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=NARROW, layout="constrained")
    plot(figure.add_subplot(), *arguments)
    return Picture(encode(figure), title, caption, wide=False)


def encode(figure: "Figure") -> str:
    """A figure as a data: URL."""
    return "data:image/png;base64," + base64.b64encode(plots.png(figure)).decode()
