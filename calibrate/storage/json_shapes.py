"""Shapes of JSON values: what a field may hold.

A shape is called with a value and returns it in its one canonical spelling (64 in place of a float
is 64.0, and 3.0 in place of an integer is 3), or raises Refusal, with the path from there.
`schema` holds keywords of JSON Schema for what is checked where the value is used;
scripts/tools/write_schemas.py makes the schema of a whole shape.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from calibrate.storage.strict_json import Refusal, check_free, refuse

FLOAT32_MAX = 3.4028234663852886e38

Shape = Callable[[Any], Any]
Keywords = Mapping[str, Any]


@dataclass(frozen=True)
class Integer:
    """A whole number within bounds, or null where that is allowed."""

    lowest: int
    highest: int
    null: bool = False

    def __call__(self, value: Any) -> int | None:
        if value is None and self.null:
            return None
        number = int(value) if type(value) is float and value.is_integer() else value
        if type(number) is int and self.lowest <= number <= self.highest:
            return number
        return refuse(value, f"give an integer from {self.lowest} to {self.highest}")


@dataclass(frozen=True)
class Number:
    """A number that float32 holds; or one of a few words, or null, where they are allowed."""

    schema: Keywords = field(default_factory=dict)
    words: tuple[str, ...] = ()
    null: bool = False

    def __call__(self, value: Any) -> Any:
        if (value is None and self.null) or (type(value) is str and value in self.words):
            return value
        if type(value) not in (int, float):
            refuse(value, " or ".join(["give a number", *map(json.dumps, self.words)]))
        if not abs(value) <= FLOAT32_MAX:
            raise Refusal((), "beyond float32", "give a number of at most 3.4e38")
        return float(value)


@dataclass(frozen=True)
class PrintableLine:
    """One printable line: it will appear in terminals."""

    longest: int = 1000

    def __call__(self, value: Any) -> str:
        if type(value) is not str or not value.isprintable() or not 0 < len(value) <= self.longest:
            refuse(value, f"give one line of 1 to {self.longest} printable characters")
        return value


@dataclass(frozen=True)
class Pattern:
    """Text that a pattern describes from end to end."""

    pattern: re.Pattern[str]
    remedy: str

    def __call__(self, value: Any) -> str:
        if type(value) is not str or not self.pattern.fullmatch(value):
            refuse(value, self.remedy)
        return value


@dataclass(frozen=True)
class Word:
    """One of a few words."""

    words: tuple[str, ...]
    remedy: str = ""

    def __call__(self, value: Any) -> str:
        if type(value) is not str or value not in self.words:
            choices = " or ".join(f'"{word}"' for word in self.words)
            refuse(value, self.remedy or f"write {choices}")
        return value


@dataclass(frozen=True)
class Scalar:
    """A text, a number, true, false or null; integers of 64 bits are not made floats."""

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or (kind is int and -(2**63) <= value < 2**64):
            return value
        if kind is str:
            return TEXT(value)
        if kind is int or kind is float:
            return NUMBER(value)
        return refuse(value, "give a text, a number, true, false or null")


@dataclass(frozen=True)
class List:
    """A list of values of one shape, at most or exactly so many."""

    item: Shape
    most: int | None = None
    exact: int | None = None
    items: str = "items"  # what they are called
    schema: Keywords = field(default_factory=dict)

    def __call__(self, value: Any) -> list[Any]:
        if type(value) is not list:
            refuse(value, "give a list")
        if self.exact is not None and len(value) != self.exact:
            refuse(value, f"give a list of {self.exact} {self.items}")
        if self.most is not None and len(value) > self.most:
            refuse(value, f"give at most {self.most}")
        made: list[Any] = []
        try:
            for item in value:
                made.append(self.item(item))
        except Refusal as refusal:
            raise refusal.within(len(made)) from None
        return made


@dataclass(frozen=True)
class Map:
    """An object whose field names are texts."""

    item: Shape

    def __call__(self, value: Any) -> dict[str, Any]:
        require_fields(value, ())
        return {TEXT(name): read_field(value, name, self.item) for name in value}


@dataclass(frozen=True)
class Object:
    """An object with named fields, which are all required or all optional."""

    fields: Mapping[str, Shape]
    required: bool = False
    others: str | None = None  # beginning of other names, whose values are free; None: refused
    remedy: str = "remove it, or upgrade calibrate if the file is newer"  # for these

    def __call__(self, value: Any) -> dict[str, Any]:
        require_fields(value, self.fields if self.required else ())
        return {name: read_field(value, name, self._shape_of(name)) for name in value}

    def _shape_of(self, name: str) -> Shape:
        if name in self.fields:
            return self.fields[name]
        if self.others is not None and name.startswith(self.others):
            return free
        raise Refusal((name,), "not a known field", self.remedy)


def free(value: Any) -> Any:
    """Any value that JSON can hold."""
    check_free(value)
    return value


def require_fields(value: Any, names: Iterable[str]) -> None:
    """Raises Refusal unless the value is an object with these fields."""
    if type(value) is not dict:
        refuse(value, "give an object")
    for name in names:
        if name not in value:
            raise Refusal((name,), "absent", "this field is required")


def read_field(value: Any, name: str, shape: Shape) -> Any:
    """One field of an object that may have others."""
    require_fields(value, (name,))
    try:
        return shape(value[name])
    except Refusal as refusal:
        raise refusal.within(name) from None


def numbers(count: int, schema: Keywords | None = None) -> List:
    """A list of so many numbers; `schema` is of each."""
    return List(Number(schema or {}), exact=count, items="numbers")


NUMBER = Number()
TEXT = PrintableLine()
