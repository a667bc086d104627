"""Strict JSON: parsing, and refusals with the path in the file, the value and the remedy.

A path is a tuple of field names and positions, such as ("entries", 0, "domain"); it is put into
words only when something is refused.
"""

import codecs
import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from calibrate.errors import CoefficientsError

MAX_DEPTH = 32  # of values of any structure
_MAX_SHOWN = 80  # characters of a value in a message
_MAX_DIGITS = 4_300  # Python's own limit
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
    if isinstance(value, str):
        return json.dumps(value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + "...")
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if isinstance(value, list):
        if len(value) > 5 or any(isinstance(item, dict | list) for item in value):
            return f"a list of {len(value)}"
        return "[" + ", ".join(map(describe, value)) + "]"
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def parse(data: bytes, remedy: str = "restore the file from where it was published") -> Any:
    """The value of a JSON text in UTF-8; `remedy` is for what is no JSON.

    Numbers beyond float64 come out as inf, which `check_free` and the shapes refuse.

    Raises:
      CoefficientsError: not UTF-8, a byte order mark, not JSON, nested too deeply, or with a
        duplicate key, NaN, an infinity or an integer of thousands of digits.
    """
    if data.startswith(codecs.BOM_UTF8):
        raise Refusal((), "text with a byte order mark", "save it as UTF-8 without one")
    decoder = _Decoder()
    try:
        value = decoder.decode(data.decode())
        if decoder.is_irregular:
            where, found = next(_irregular(value, ()))
            raise Refusal(where, found.state, found.remedy)
    except UnicodeDecodeError as failure:
        state, remedy = f"not UTF-8 at byte {failure.start}", "save it as UTF-8"
    except RecursionError:
        state = "nested too deeply"
    except ValueError as failure:
        state = f"not JSON ({failure})"
    else:
        return value
    raise Refusal((), state, remedy)


class _Irregular(NamedTuple):
    """What Python's parser accepts and this format does not."""

    state: str
    remedy: str


class _Decoder(json.JSONDecoder):
    """Puts `_Irregular` in the place of what is to be refused, which knows no path yet."""

    def __init__(self) -> None:
        self.is_irregular = False
        super().__init__(
            object_pairs_hook=self._object, parse_constant=self._constant, parse_int=self._integer
        )

    def _object(self, pairs: list[tuple[str, Any]]) -> Any:
        mapping = dict(pairs)
        if len(mapping) == len(pairs):
            return mapping
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                break
            seen.add(key)
        return self._refuse(f"an object with two keys {describe(key)}", "keep one of them")

    def _constant(self, word: str) -> _Irregular:
        return self._refuse(word, "write a finite number")

    def _integer(self, digits: str) -> int | _Irregular:
        if len(digits) <= _MAX_DIGITS:
            return int(digits)
        state = f"an integer of {len(digits)} digits"
        return self._refuse(state, "write a number within float64")

    def _refuse(self, state: str, remedy: str) -> _Irregular:
        self.is_irregular = True
        return _Irregular(state, remedy)


def _irregular(value: Any, where: Where) -> Iterator[tuple[Where, _Irregular]]:
    """What is irregular in a value, with its path."""
    if isinstance(value, _Irregular):
        yield where, value
    elif isinstance(value, dict | list):
        for step, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _irregular(item, (*where, step))


def check_free(value: Any, depth: int = 0) -> None:
    """Any JSON value that can be written back: finite, and at most 32 levels deep."""
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
