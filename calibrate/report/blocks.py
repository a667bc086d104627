"""Blocks of a result: headings, sentences, facts, tables and code to be shown.

Each command gives one `Result`, or a record that has `blocks()` and `as_json()` as well.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from calibrate.errors import CalibrateError

SHOWN_HEADS = 20  # in a table; --json lists all


@dataclass(frozen=True)
class Heading:
    """The title of the blocks that follow."""

    text: str
    detail: bool = False


@dataclass(frozen=True)
class Text:
    """A sentence."""

    text: str
    detail: bool = False


@dataclass(frozen=True)
class Code:
    """Lines of Python, and what they are for."""

    purpose: str
    text: str
    detail: bool = False


@dataclass(frozen=True)
class Facts:
    """Labelled values, a line each; equal labels may repeat."""

    rows: Sequence[tuple[str, str]]
    detail: bool = False


@dataclass(frozen=True)
class Table:
    """Formatted cells; every row has a cell for each column."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""  # below the table
    left: Sequence[str] = ()  # columns of text, aligned to the left
    marked: Sequence[int] = ()  # indices of rows that are means of others
    bold: Collection[tuple[int, int]] = ()  # (row, column) of cells shown bold
    detail: bool = False


# The terminal leaves out what is `detail`, unless it is asked for; pages have all.
Block = Heading | Text | Code | Facts | Table


def as_detail(blocks: Iterable[Block]) -> Iterable[Block]:
    """The same blocks, each a detail."""
    return (dataclasses.replace(block, detail=True) for block in blocks)


def and_more(total: int) -> str:
    """A sentence on the rows that a table leaves out; "" if it shows all."""
    more = total - SHOWN_HEADS
    return f" And {more:,} more (all are in the JSON)." if more > 0 else ""


class Record(Protocol):
    """The result of one command."""

    def blocks(self) -> Iterable[Block]:
        """The result for people, in reading order."""

    def as_json(self) -> Any:
        """The result as --json prints it."""


@dataclass(frozen=True)
class Result:
    """A record whose blocks and JSON are known.

    Attributes:
      shown: the blocks, in reading order.
      found: what --json prints; see `as_json`.
      failure: what the command fails with after it has shown this; None if it does not.
    """

    shown: Sequence[Block]
    found: Any
    failure: CalibrateError | None = None

    def blocks(self) -> Iterable[Block]:
        """The result for people, in reading order."""
        return self.shown

    def as_json(self) -> Any:
        """The result as --json prints it."""
        return self.found


def as_json(value: Any) -> Any:
    """Plain JSON of a record: paths as text, arrays as lists, null for what is not finite."""
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
