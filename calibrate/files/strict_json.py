"""Strict JSON: parsing, and refusals with the path in the file, the value and the remedy.

A path is a tuple of field names and positions, such as ("entries", 0, "domain"); it is put into
words only when something is refused.
"""

import codecs
import json
import math
import re
from typing import Any, NoReturn

from calibrate.errors import CoefficientsError

MAX_DEPTH = 32  # of values of any structure
_MAX_SHOWN = 80  # characters of a value in a message
_MAX_DIGITS = 4_300  # Python's own limit
_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")

Where = tuple[str | int, ...]


class Refused:
    """A value that JSON allows and this format does not; the check of its path refuses it."""

    def __init__(self, description: str, remedy: str):
        self.description = description
        self.remedy = remedy


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
    if isinstance(value, Refused):
        remedy = value.remedy
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
    if isinstance(value, str):
        return json.dumps(value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + "...")
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if isinstance(value, list):
        if len(value) > 5 or any(isinstance(item, dict | list | Refused) for item in value):
            return f"a list of {len(value)}"
        return "[" + ", ".join(map(describe, value)) + "]"
    text = value.description if isinstance(value, Refused) else json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def parse(data: bytes, remedy: str = "restore the file from where it was published") -> Any:
    """The value of a JSON text in UTF-8; `remedy` is for what is no JSON.

    Objects with a duplicate key, NaN, infinities and integers of thousands of digits come out as
    `Refused`, numbers beyond float64 as inf: the checks refuse them, and know their path.

    Raises:
      CoefficientsError: not UTF-8, a byte order mark, not JSON, or nested too deeply.
    """
    if data.startswith(codecs.BOM_UTF8):
        raise Refusal((), "text with a byte order mark", "save it as UTF-8 without one")
    try:
        text = data.decode()
        try:
            return _decode(text)
        except json.JSONDecodeError:
            raise
        except ValueError:  # an integer of more digits than Python converts: find its place
            return _decode_long_integers(text)
    except UnicodeDecodeError as failure:
        state, remedy = f"not UTF-8 at byte {failure.start}", "save it as UTF-8"
    except RecursionError:
        state = "nested too deeply"
    except ValueError as failure:
        state = f"not JSON ({failure})"
    raise Refusal((), state, remedy)


def _unique(pairs: list[tuple[str, Any]]) -> Any:
    mapping = dict(pairs)
    if len(mapping) == len(pairs):
        return mapping
    seen = set()
    for key, _ in pairs:
        if key in seen:
            break
        seen.add(key)
    return Refused(f"an object with two keys {describe(key)}", "keep one of them")


def _constant(word: str) -> Refused:
    return Refused(word, "write a finite number")


def _integer(digits: str) -> int | Refused:
    if len(digits) <= _MAX_DIGITS:
        return int(digits)
    return Refused(f"an integer of {len(digits)} digits", "write a number within float64")


_decode = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_constant).decode
_decode_long_integers = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_constant, parse_int=_integer
).decode


def check_free(value: Any, depth: int = 0) -> None:
    """Any JSON value that can be written back: finite, and at most 32 levels deep."""
    if isinstance(value, Refused):
        refuse(value, value.remedy)
    if type(value) is float and not math.isfinite(value):
        raise Refusal((), "beyond float64", "give a finite number")
    if type(value) is not dict and type(value) is not list:
        return
    if depth > MAX_DEPTH:
        raise Refusal((), f"nested more than {MAX_DEPTH} deep", "flatten it")
    for key, item in value.items() if type(value) is dict else enumerate(value):
        if type(item) not in _ALWAYS_FREE:
            try:
                check_free(item, depth + 1)
            except Refusal as refusal:
                raise refusal.within(key) from None


_ALWAYS_FREE = frozenset((str, int, bool, type(None)))
