"""Strict JSON: parsing, the types of fields, and errors that name the place and the value."""

import json
import math
import re
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta

from calibrate.errors import CoefficientsError

MAX_DEPTH = 32
MAX_VALUES = 1 << 21  # each takes far more memory than its text
FLOAT32_MAX = 3.4028234663852886e38
_MAX_SHOWN = 80  # characters of a value in a message

# Control characters, marks of direction, separators of lines and lone surrogates may command a
# terminal, or hide what a text says.
_UNPRINTABLE = (
    r"\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    r"\ufeff\ufff9-\ufffb"
)
UNICODE = r"^(?![\s\S]*[\ud800-\udfff])"  # without lone surrogates
NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$(?!\n)"  # of a fit
PRINTABLE = rf"^(?![\s\S]*[{_UNPRINTABLE}])"
PRINTABLE_LINES = rf"^(?![\s\S]*(?!\n)[{_UNPRINTABLE}])"
_REGEX = re.compile(r"matching regex '.*'(?= - at |$)", re.DOTALL)  # in messages of msgspec

PrintableText = Annotated[str, Meta(min_length=1, max_length=1000, pattern=PRINTABLE)]
Digest = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$(?!\n)", max_length=71)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Annotated[float, Meta(ge=-FLOAT32_MAX, le=FLOAT32_MAX)]
Scalar = bool | Annotated[int, Meta(ge=-(2**63))] | Number | PrintableText | None


def parse(
    data: bytes,
    remedy: str = "restore the file from where it was published",
    root: str = "the file",
) -> Any:
    """The value of a JSON text in UTF-8.

    Args:
      data: the text.
      remedy: how to correct a text that is not JSON.
      root: the name of the text in messages.
    Raises:
      CoefficientsError: not UTF-8, a byte order mark, not JSON, nested too deeply, of millions of
        values, or with a duplicate key, NaN, an infinity or an integer of thousands of digits.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise CoefficientsError(f"{root} has more than {MAX_VALUES:,} values; {remedy}")
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=_object_without_duplicates,
            parse_constant=_refuse_number,
            parse_float=_finite_float,
        )
        _check_depth(value)
    except UnicodeDecodeError as failure:
        raise CoefficientsError(
            f"{root} is not UTF-8 at byte {failure.start}; save it as UTF-8"
        ) from failure
    except RecursionError:
        raise CoefficientsError(f"{root} is nested too deeply; {remedy}") from None
    except json.JSONDecodeError as failure:
        line = f"line {failure.lineno}, " if failure.lineno > 1 else ""
        raise CoefficientsError(
            f"{root} is not JSON ({failure.msg}: {line}column {failure.colno}); {remedy}"
        ) from failure
    except ValueError as failure:  # of an integer of thousands of digits, and of the hooks
        reason = str(failure).partition("; use sys.")[0]
        raise CoefficientsError(f"{root} is not JSON ({reason}); {remedy}") from failure
    return value


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return mapping


def _finite_float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:_MAX_SHOWN]} is not a finite number")


def _check_depth(value: Any) -> None:
    """Raises RecursionError for a value of more than MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH + 2):
        containers = [item for item in level if isinstance(item, dict | list)]
        level = [
            inner
            for item in containers
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise RecursionError


def convert(value: Any, kind: Any, remedy: str, root: str = "the file") -> Any:
    """A parsed value as an instance of a type.

    Args:
      value: of dictionaries, lists, texts and numbers.
      kind: a type that msgspec checks: a Struct, or an annotated type such as `Count`.
      remedy: how to correct a wrong value.
      root: the name of the value, `$`, in messages.
    Raises:
      CoefficientsError: it is of another type; the message names the place and the remedy.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as failure:  # of a lone surrogate
        reason = _REGEX.sub("of another form", str(failure))
        raise CoefficientsError(f"{root}: {reason}; {remedy}") from None


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
