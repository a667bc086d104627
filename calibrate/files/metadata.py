"""What a coefficient file says about its fit, field by field: checked, and never applied."""

import re
from datetime import datetime
from functools import partial
from typing import Any

from calibrate.files.strict_json import (
    Shape,
    Where,
    check_float,
    check_floats,
    check_integer,
    check_pattern,
    check_text,
    refuse,
)
from calibrate.maths.rule import N_COEFFICIENTS

check_digest = partial(
    check_pattern,
    pattern=re.compile(r"sha256:[0-9a-f]{64}"),
    remedy='give "sha256:" and 64 hexadecimal digits',
)
_UTC = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\+00:00")


def check_time(value: Any, where: Where) -> None:
    """A moment in UTC."""
    remedy = "write UTC as 2026-01-31T12:00:00+00:00"
    check_pattern(value, where, _UTC, remedy)
    try:
        datetime.fromisoformat(value)
    except ValueError:
        refuse(where, value, remedy)


def _count(value: Any, where: Where) -> None:
    check_integer(value, where, 0, 2**63 - 1)


def _named(value: Any, where: Where) -> dict[str, Any]:
    """An object whose field names are free."""
    if type(value) is not dict:
        refuse(where, value, "give an object")
    for name in value:
        check_text(name, where)
    return value


def _versions(value: Any, where: Where) -> None:
    for tool, version in _named(value, where).items():
        check_text(version, (*where, tool))


def _options(value: Any, where: Where) -> None:
    for name, option in _named(value, where).items():
        at = (*where, name)
        if type(option) is str:
            check_text(option, at)
        elif type(option) is int:
            check_integer(option, at, -(2**63), 2**64 - 1)
        elif type(option) is float:
            check_float(option, at)
        elif option is not None and type(option) is not bool:
            refuse(at, option, "give a text, a number, true, false or null")


# What the fit was made from. Part of the id, and so the same in every minor version.
SOURCE: Shape = {
    "head": check_text,
    "fingerprint": check_text,
    "collection": check_digest,
    "seed": partial(check_integer, lowest=0, highest=2**64 - 1),
    "options": _options,
    "citation": check_text,
}

_ROWS: dict[str, Shape] = dict.fromkeys(
    (
        "rows", "misranked", "ties", "nan", "inf", "masked_target", "kept", "sharp", "flat",
        "interior", "unsolved",
    ),
    _count,
)  # fmt: skip
_NEW_IN_1_1: dict[str, Shape] = {
    "rows": _ROWS | dict.fromkeys(("gated", "used"), _count),
    "candidates": [
        {"kind": check_text} | dict.fromkeys(("log_p", "gain", "low", "high"), check_float),
        16,
    ],
    "learning_curve": [{"rows": _count, "log_p": check_float}, 64],
    "band": [partial(check_floats, count=3), 512],
    "condition": check_float,
}


def quality_shape(minor: int, kind: str) -> Shape:
    """How good it is, as minor versions of the schema have it for a kind of rule."""
    shape: dict[str, Shape] = {
        "rows": _ROWS,
        "residuals": dict.fromkeys(("beta_rms", "beta_r_squared", "theta_rms"), check_float),
        "standard_errors": [partial(check_floats, count=N_COEFFICIENTS[kind])],
        "held_out": [
            dict.fromkeys(("size", "rows"), _count)
            | dict.fromkeys(("before", "after", "error"), check_float)
        ],
        "verdict": check_text,
    }
    return shape | _NEW_IN_1_1 if minor else shape


# Which software made it, and when.
PROVENANCE: Shape = {"created": check_time, "versions": _versions}
