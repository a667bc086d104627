"""A result as blocks: what the terminal prints and a page shows, made once from one record.

Each command makes one record: a frozen dataclass with `blocks()`. `as_json` is what --json prints
of it: its fields, or what its own `as_json()` gives.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Heading:
    """What the blocks after it are about."""

    text: str


@dataclass(frozen=True)
class Text:
    """A sentence, or lines of code."""

    text: str


@dataclass(frozen=True)
class Facts:
    """Labels, each with what is to be said of it."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """Cells that are formatted already; every row has a cell for each column."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""  # below the table
    left: Sequence[str] = ()  # columns of text, aligned to the left
    dim: Sequence[int] = ()  # rows of lesser weight, by position
    sections: Sequence[int] = ()  # rows that a section ends with


Block = Heading | Text | Facts | Table


class Record(Protocol):
    """What one command has to say."""

    def blocks(self) -> Iterable[Block]:
        """The same for people."""


def as_json(value: Any) -> Any:
    """Plain JSON of a record: paths as text, arrays as lists, null for what is not finite."""
    if hasattr(value, "as_json"):
        return as_json(value.as_json())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return as_json(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): as_json(one) for key, one in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return as_json(value.tolist())
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
