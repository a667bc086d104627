"""HTML pages: one self-contained file of blocks and figures, and the sections of every page."""

import base64
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from calibrate.files.atomic_io import write_atomically
from calibrate.files.coefficients import Coefficients
from calibrate.maths.rule import ENTROPY_AND_SIZE, ENTROPY_POLYNOMIAL, LOG_SIZE
from calibrate.report import plot_style
from calibrate.report.blocks import Block, Code, Facts, Heading, Text
from calibrate.report.rule_curves import all_constant, constant_text, joint_domain
from calibrate.report.usage import usage
from calibrate.report.wording import (
    argument,
    facts,
    guards,
    outside,
    polynomial,
    span,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NARROW = (5.4, 4.2)  # inches: two side by side on a wide screen
_ENTROPY = "H the Shannon entropy, in nats, of softmax(z) over the unmasked items"
_SIZE = "n the number of unmasked items (log is the natural logarithm)"
_FORMS = {
    LOG_SIZE: "kappa log n + b",
    ENTROPY_POLYNOMIAL: "a polynomial of degree 4 in H",
    ENTROPY_AND_SIZE: "p(H) + (a H + b log n + c) log n, p of degree 4",
}


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


def usage_section(fit: Coefficients) -> Iterable[Block]:
    """The Python that uses the fit."""
    yield Heading("How to use it")
    yield usage(fit)
    if fit.has_heads:
        yield Text("A head that the fit does not name keeps beta = 1.")


def rule_section(fit: Coefficients) -> Iterable[Block]:
    """The rule of the only entry, or what the rules of several have in common."""
    rule = fit.rule
    yield Heading("The rule")
    if all_constant(fit):
        first, *others = fit.entries
        yield Text("A constant for each head." if others else f"{constant_text(first)}.")
        return
    if len(fit.entries) == 1:
        formula = polynomial(fit.entries[0].coefficients)
    else:
        formula = f"{_FORMS[rule.kind]}, with coefficients of its own for each head"
    symbols = [_ENTROPY] * rule.by_entropy + [_SIZE] * rule.by_size
    bounds = guards(rule)
    yield Code(f"With {', and '.join(symbols)}:", f"beta({argument(rule)}) = {formula}")
    yield Text(
        f"Fitted on {'entropies from' if rule.by_entropy else 'sets of'} {domain_text(fit)}; "
        f"{outside(rule, fit.entries)}. {bounds[0].upper()}{bounds[1:]}."
    )


def domain_text(fit: Coefficients) -> str:
    """The domain, or the range that the domains of several entries span."""
    return span(joint_domain(fit.entries), fit.rule.kind).replace("..", "to")


def provenance_section(fit: Coefficients, scored_on: str) -> Iterable[Block]:
    """What the file says of its making, and what the page was scored on."""
    yield Heading("Provenance")
    yield Facts([*facts(fit), ("scored on", scored_on)])
