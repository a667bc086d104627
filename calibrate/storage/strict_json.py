"""Strict JSON: parsing, and refusals with the path in the file, the value and the remedy.

A path is a tuple of field names and positions, such as ("entries", 0, "domain"); it is put into
words only when something is refused.
"""

import json
import math
import re
from typing import Any, NoReturn

from calibrate.errors import CoefficientsError

MAX_DEPTH = 32  # of values of any structure
_MAX_VALUES = 1 << 21
_MAX_SHOWN = 80  # characters of a value in a message
_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")

Where = tuple[str | int, ...]


class Refusal(CoefficientsError):
    """WHERE is STATE; REMEDY. Where the value lies in a larger one, see `within`."""

    def __init__(self, where: Where, state: str, remedy: str):
        super().__init__(f"{spell(where)} is {state}; {remedy}")
        self.where, self.state, self.remedy = where, state, remedy

    def within(self, step: str | int) -> "Refusal":
        """The same of the value that has the refused one under that name or position."""
        return Refusal((step, *self.where), self.state, self.remedy)

    def __reduce__(self) -> Any:
        return CoefficientsError, (str(self),)


def refuse(value: Any, remedy: str, where: Where = ()) -> NoReturn:
    """Raises Refusal of a value, which is shortened and escaped."""
    raise Refusal(where, describe(value), remedy)


def spell(where: Where) -> str:
    """A path in words, such as entries[0].domain; the empty path is the file."""
    text = ""
    for step in where:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += "." + (step if _PLAIN_WORD.fullmatch(step) else describe(step))
    return text.removeprefix(".") or "the file"


def describe(value: Any) -> str:
    """A value in at most a line, without control characters."""
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if isinstance(value, list):
        if len(value) > 5 or any(isinstance(item, dict | list) for item in value):
            return f"a list of {len(value)}"
        return "[" + ", ".join(map(describe, value)) + "]"
    text = json.dumps(value[:_MAX_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _MAX_SHOWN + 2 else text[:_MAX_SHOWN] + "..."


def parse(data: bytes, remedy: str = "restore the file from where it was published") -> Any:
    """The value of a JSON text in UTF-8; `remedy` is for what is no JSON.

    Numbers beyond float64 come out as inf, which `check_free` and the shapes refuse.

    Raises:
      CoefficientsError: not UTF-8, a byte order mark, not JSON, nested too deeply, of millions of
        values, or with a duplicate key, NaN, an infinity or an integer of thousands of digits.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > _MAX_VALUES:  # each takes far more memory
        raise Refusal((), f"of more than {_MAX_VALUES:,} values", remedy)
    try:
        return json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_constant)
    except UnicodeDecodeError as failure:
        state, remedy = f"not UTF-8 at byte {failure.start}", "save it as UTF-8"
    except RecursionError:
        state = "nested too deeply"
    except ValueError as failure:
        said = str(failure).partition("; use sys.")[0]
        if b"\n" not in data.strip():  # whoever reads it line by line names the line
            said = re.sub(r": line 1 column [0-9]+(?= \(char)", "", said)
        state = f"not JSON ({said})"
    raise Refusal((), state, remedy)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return mapping


def _constant(word: str) -> None:
    raise ValueError(f"{word} is not a finite number")


def check_free(value: Any, depth: int = 0) -> None:
    """Any JSON value that can be written back: finite, and at most 32 levels deep."""
    if isinstance(value, float) and not math.isfinite(value):
        raise Refusal((), "beyond float64", "give a finite number")
    if not isinstance(value, dict | list):
        return
    if depth > MAX_DEPTH:
        raise Refusal((), f"nested more than {MAX_DEPTH} deep", "flatten it")
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        try:
            check_free(item, depth + 1)
        except Refusal as refusal:
            raise refusal.within(key) from None
