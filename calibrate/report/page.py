"""HTML pages: one self-contained file of blocks and figures."""

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from calibrate.files.atomic_io import write_atomically
from calibrate.report import plot_style
from calibrate.report.blocks import Block

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NARROW = (5.4, 4.2)  # inches: two side by side on a wide screen


@dataclass(frozen=True)
class Picture:
    """A figure with its caption."""

    source: str  # a data: URL
    title: str
    caption: str


@dataclass(frozen=True)
class Figures:
    """Figures side by side."""

    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Page:
    """The text and figures of a page, in reading order."""

    title: str
    subtitle: str
    verdict: str
    blocks: Sequence[Block | Figures]


def write_page(path: Path, page: Page) -> None:
    """Writes a page, whole or not at all.

    All text is escaped, `code` in backquotes is set as code, and characters that UTF-8 cannot
    encode, as a file name may have, become question marks.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["prose"] = _prose
    environment.filters["kind"] = lambda block: type(block).__name__
    html = environment.get_template("page.html.j2").render(page=page)
    write_atomically(path, html.encode(errors="replace"))


def _prose(text: str) -> Markup:
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def draw(
    plot: "Callable[..., Axes]", *arguments: Any, title: str, caption: str, **options: Any
) -> Picture:
    """A picture of what `plot` draws on its first argument, an `ax`."""
    figure = plot_style.draw(plot, *arguments, size=NARROW, **options)
    source = "data:image/png;base64," + base64.b64encode(plot_style.png(figure)).decode()
    return Picture(source, title, caption)
