"""JSON that nobody vouches for: parsed strictly, each refusal with its path, value and remedy.

Checks take the value and its path, a tuple of field names and positions such as
("entries", 0, "domain"); it is put into words only when something is refused.
"""

import codecs
import json
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from calibrate.errors import CoefficientsError

MAX_DEPTH = 32  # of values whose structure is free
_SHOWN = 80  # characters of a value in a message
_MANY_DIGITS = 4_300  # Python's own limit
_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")

Where = tuple[str | int, ...]
Check = Callable[[Any, Where], None]
Shape = Check | dict[str, Any] | list[Any]


class Refused:
    """What JSON allows and we do not; it keeps its place until a check gets there by its path."""

    def __init__(self, what: str, remedy: str):
        self.what = what
        self.remedy = remedy


def refuse(where: Where, value: Any, remedy: str) -> NoReturn:
    """Raises CoefficientsError: WHERE is VALUE; REMEDY. Values are shortened and escaped."""
    if isinstance(value, Refused):
        remedy = value.remedy
    refuse_state(where, describe(value), remedy)


def refuse_state(where: Where, state: str, remedy: str) -> NoReturn:
    """Raises CoefficientsError about something other than a value, in words of our own."""
    raise CoefficientsError(f"{spell(where)} is {state}; {remedy}")


def spell(where: Where) -> str:
    """A path in words, such as entries[0].domain; without steps, the file."""
    steps = ""
    for step in where:
        if isinstance(step, int):
            steps += f"[{step}]"
        else:
            steps += "." + (step if _PLAIN_WORD.fullmatch(step) else describe(step))
    return steps.removeprefix(".") or "the file"


def describe(value: Any) -> str:
    """A value in at most a line, without control characters."""
    if isinstance(value, str):
        return json.dumps(value if len(value) <= _SHOWN else value[:_SHOWN] + "...")
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if isinstance(value, list):
        if len(value) > 5 or any(isinstance(item, dict | list | Refused) for item in value):
            return f"a list of {len(value)}"
        return "[" + ", ".join(map(describe, value)) + "]"
    text = value.what if isinstance(value, Refused) else json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def parse(data: bytes) -> Any:
    """The value of a JSON text in UTF-8.

    Objects with a duplicate key, NaN, infinities and integers of thousands of digits come out as
    `Refused`, numbers beyond float64 as inf: the checks refuse them, and know their path.

    Raises:
      CoefficientsError: no UTF-8, a byte order mark, no JSON, or nested too deeply.
    """
    if data.startswith(codecs.BOM_UTF8):
        refuse_state((), "text with a byte order mark", "save it as UTF-8 without one")
    try:
        text = data.decode()
        try:
            return _decode(text)
        except json.JSONDecodeError:
            raise
        except ValueError:  # an integer of more digits than Python converts: find its place
            return _decode_long_integers(text)
    except UnicodeDecodeError as failure:
        refuse_state((), f"not UTF-8 at byte {failure.start}", "save it as UTF-8")
    except RecursionError:
        refuse_state((), "nested too deeply", "restore the file from where it was published")
    except ValueError as failure:
        refuse_state((), f"not JSON ({failure})", "restore the file from where it was published")


def _unique(pairs: list[tuple[str, Any]]) -> Any:
    mapping = dict(pairs)
    if len(mapping) == len(pairs):
        return mapping
    keys = {key: 0 for key, _ in pairs}
    for key, _ in pairs:
        keys[key] += 1
    twice = next(key for key, count in keys.items() if count > 1)
    return Refused(f"an object with two keys {describe(twice)}", "keep one of them")


def _constant(word: str) -> Refused:
    return Refused(word, "write a finite number")


def _integer(digits: str) -> int | Refused:
    if len(digits) <= _MANY_DIGITS:
        return int(digits)
    return Refused(f"an integer of {len(digits)} digits", "write a number that float64 holds")


_decode = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_constant).decode
_decode_long_integers = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_constant, parse_int=_integer
).decode


def check_keys(
    value: Any, where: Where, required: Collection[str], optional: Collection[str] = ()
) -> None:
    """An object with these keys and no others."""
    check_required(value, where, required)
    if len(value) == len(required):
        return
    for key in value:
        if key not in required and key not in optional:
            _refuse_unknown((*where, key))


def check_required(value: Any, where: Where, required: Collection[str]) -> None:
    """An object with at least these keys."""
    if type(value) is not dict:
        refuse(where, value, "give an object")
    for key in required:
        if key not in value:
            refuse_state((*where, key), "absent", "this field is required")


def _refuse_unknown(where: Where) -> NoReturn:
    remedy = "remove it, or upgrade calibrate if the file is newer"
    refuse_state(where, "not a known field", remedy)


def check_word(value: Any, where: Where, words: Sequence[str]) -> None:
    """One of a few words."""
    if type(value) is not str or value not in words:
        refuse(where, value, "write " + " or ".join(f'"{word}"' for word in words))


def check_pattern(value: Any, where: Where, pattern: re.Pattern[str], remedy: str) -> None:
    """Text that a pattern describes from end to end."""
    if type(value) is not str or not pattern.fullmatch(value):
        refuse(where, value, remedy)


def check_text(value: Any, where: Where) -> None:
    """One printable line: it will appear in terminals."""
    if type(value) is not str or not value.isprintable() or not 0 < len(value) <= 1000:
        refuse(where, value, "give one line of 1 to 1000 printable characters")


def check_integer(value: Any, where: Where, lowest: int, highest: int) -> None:
    """An integer within bounds; 1.0 and true are none."""
    if type(value) is not int or not lowest <= value <= highest:
        refuse(where, value, f"give an integer from {lowest} to {highest}")


def check_float(value: Any, where: Where) -> None:
    """A finite number, spelled as a float: 64.0, not 64, whose digest would be another."""
    if type(value) is int:
        remedy = f"write {value}.0 (some tools drop the .0)"
        refuse(where, value, remedy if abs(value) < 2**53 else "give a number within float64")
    if type(value) is not float:
        refuse(where, value, "give a number")
    if not math.isfinite(value):
        refuse_state(where, "beyond float64", "give a finite number")


def check_floats(value: Any, where: Where, count: int) -> None:
    """A list of that many finite numbers, each spelled as a float."""
    if type(value) is not list or len(value) != count:
        refuse(where, value, f"give a list of {count} numbers")
    for number in value:
        if type(number) is not float or number - number != 0:  # inf - inf is NaN
            break
    else:
        return
    for i, number in enumerate(value):
        check_float(number, (*where, i))


def check_shape(value: Any, where: Where, shape: Shape, newer: bool = False) -> None:
    """A value as `shape` has it; every field of an object may be absent.

    Args:
      shape: a check; or {field: shape} for an object; or [shape] for a list, [shape, most] for
        one of at most so many items.
      newer: the file has a newer minor version, whose unknown fields are let through.
    """
    if callable(shape):
        shape(value, where)
    elif isinstance(shape, list):
        if type(value) is not list:
            refuse(where, value, "give a list")
        shape, *most = shape
        if most and len(value) > most[0]:
            refuse(where, value, f"give at most {most[0]}")
        for i, item in enumerate(value):
            check_shape(item, (*where, i), shape, newer)
    elif type(value) is not dict:
        refuse(where, value, "give an object")
    else:
        for key, item in value.items():
            field = shape.get(key)
            if field is not None:
                check_shape(item, (*where, key), field, newer)
            elif newer:
                check_free(item, (*where, key))
            else:
                _refuse_unknown((*where, key))


def check_free(value: Any, where: Where) -> None:
    """Any JSON value that can be written back: finite, and at most 32 levels deep."""
    flaw = _flaw(value, 0)
    if flaw:
        path, state, remedy = flaw
        refuse_state((*where, *path), state, remedy)


def _flaw(value: Any, depth: int) -> tuple[Where, str, str] | None:
    """(path from here, state, remedy) of the first value that cannot be written back."""
    if isinstance(value, Refused):
        return (), value.what, value.remedy
    if type(value) is float and not math.isfinite(value):
        return (), "beyond float64", "give a finite number"
    if type(value) is dict:
        items: Any = value.items()
    elif type(value) is list:
        items = enumerate(value)
    else:
        return None
    if depth > MAX_DEPTH:
        return (), f"nested more than {MAX_DEPTH} deep", "flatten it"
    for key, item in items:
        if type(item) not in _SOUND:
            flaw = _flaw(item, depth + 1)
            if flaw:
                return (key, *flaw[0]), flaw[1], flaw[2]
    return None


_SOUND = frozenset((str, int, bool, type(None)))
