"""Figures of a page, as images that the page itself contains."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from calibrate.report import plot_style

# Inches. Text of ten points has nine pixels where a figure is as wide as a phone.
NARROW = (4.6, 4.0)  # two side by side on a wide screen
WIDE = (5.2, 4.9)


class Picture(NamedTuple):
    """A figure with its caption."""

    source: str  # a data: URL
    title: str
    caption: str


@dataclass(frozen=True)
class Figures:
    """Figures side by side, or one that is wider."""

    pictures: Sequence[Picture]
    wide: bool = False


def draw_picture(
    title: str,
    caption: str,
    plot: Any,
    *arguments: Any,
    size: tuple[float, float] = NARROW,
    **options: Any,
) -> Picture:
    """A picture of what `plot` draws on its first argument, an `ax`."""
    figure = plot_style.draw(plot, *arguments, size=size, **options)
    source = "data:image/png;base64," + base64.b64encode(plot_style.png(figure)).decode()
    return Picture(source, title, caption)
