"""Blocks of a result: headings, sentences, facts, tables, curves and code to be shown.

Each command makes one record, a frozen dataclass with `blocks()`. `as_json` is what --json prints
of it: its fields, or what its own `as_json()` returns.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

SHOWN_HEADS = 20  # in a table; --json lists all
WIDEST = 100  # letters of a printed table
GAP = 2  # letters between its columns


@dataclass(frozen=True)
class Heading:
    """The title of the blocks that follow."""

    text: str


@dataclass(frozen=True)
class Text:
    """A sentence."""

    text: str


@dataclass(frozen=True)
class Code:
    """Lines of Python, and what they are for."""

    purpose: str
    text: str


@dataclass(frozen=True)
class Curve:
    """A small line plot; x rises, one point per half character."""

    x: Sequence[float]
    y: Sequence[float]
    x_label: str
    y_label: str


@dataclass(frozen=True)
class Facts:
    """Labelled values, a line each; equal labels may repeat."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """Formatted cells, of one line or several; every row has a cell for each column."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""  # below the table
    left: Sequence[str] = ()  # columns of text, aligned to the left
    dim: Sequence[int] = ()  # indices of rows that are shown dimmed
    marked: Sequence[int] = ()  # indices of rows that are shown highlighted
    bold: Collection[tuple[int, int]] = ()  # (row, column) of cells shown bold
    sections: Sequence[int] = ()  # indices of rows that end a section
    keys: int = 1  # the first columns, which say what a row is of
    together: int = 1  # the others come in groups of so many

    def widths(self) -> list[int]:
        """Letters of the widest line in each column."""
        columns = zip(self.columns, *self.rows, strict=True)
        return [max(len(line) for cell in c for line in cell.split("\n")) for c in columns]

    def split(self, widest: int = WIDEST) -> "list[Table]":
        """Tables of at most that many letters, as far as columns allow; keys are in each."""
        widths, parts = [width + GAP for width in self.widths()], [list[int]()]
        room = widest - sum(widths[: self.keys])
        for first in range(self.keys, len(widths), self.together):
            group = range(len(widths))[first : first + self.together]
            if parts[-1] and sum(widths[i] for i in [*parts[-1], *group]) > room:
                parts.append([])
            parts[-1] += group
        tables = [self._of([*range(self.keys), *part]) for part in parts]
        tables[0] = dataclasses.replace(tables[0], title=self.title)
        tables[-1] = dataclasses.replace(tables[-1], note=self.note)
        return tables

    def _of(self, columns: Sequence[int]) -> "Table":
        """Some columns, without title and note."""
        return dataclasses.replace(
            self,
            columns=[self.columns[i] for i in columns],
            rows=[[row[i] for i in columns] for row in self.rows],
            bold={(row, columns.index(i)) for row, i in self.bold if i in columns},
            title="",
            note="",
        )


Block = Heading | Text | Code | Curve | Facts | Table


class Record(Protocol):
    """The result of one command."""

    def blocks(self) -> Iterable[Block]:
        """The result for people, in reading order."""


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
