"""Results of commands, and their blocks: headings, sentences, facts, tables and code.

A command returns one `CommandResult`. The terminal prints its blocks or its JSON; the page on a fit
has blocks of the same kinds.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from calibrate.errors import CalibrateError

SHOWN_HEADS = 20  # in a table; --json lists all
BEST = "*"  # before the NLL of the best rules


@dataclass(frozen=True)
class Heading:
    """The title of the blocks that follow."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Code:
    """Lines of Python."""

    text: str


@dataclass(frozen=True)
class Facts:
    """Labelled values, a line each; equal labels may repeat."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """Formatted cells; every row has a cell for each column, and those of BEST are bold."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""  # below the table
    more: str = ""  # explains the columns: after the note, or folded on a page
    left: Sequence[str] = ()  # columns of text, aligned to the left
    marked: Sequence[int] = ()  # indices of rows that are means of others


Block = Heading | Text | Code | Facts | Table


def and_more(total: int) -> str:
    """A sentence on the heads that a table of SHOWN_HEADS rows leaves out; "" if there are none."""
    more = total - SHOWN_HEADS
    return f" And {more:,} more (all are in the JSON)." if more > 0 else ""


class CommandResult(Protocol):
    """The result of one command."""

    def blocks(self) -> Iterable[Block]:
        """The result for people, in reading order."""

    def as_json(self) -> Any:
        """The result as --json prints it."""


@dataclass(frozen=True)
class Result:
    """A result whose blocks and JSON are given.

    Attributes:
      shown: the blocks, in reading order.
      data: printed by --json; see `as_json`.
      failure: raised after the result is printed; None if the command succeeds.
    """

    shown: Sequence[Block]
    data: Any
    failure: CalibrateError | None = None

    def blocks(self) -> Iterable[Block]:
        """The result for people, in reading order."""
        return self.shown

    def as_json(self) -> Any:
        """The result as --json prints it."""
        return self.data


def as_json(value: Any) -> Any:
    """A value as plain JSON: paths as text, arrays as lists, null for NaN and infinities."""
    if hasattr(value, "as_json"):
        return as_json(value.as_json())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return as_json(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # NumPy
        return as_json(value.tolist())
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
