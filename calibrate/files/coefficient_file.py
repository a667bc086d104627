"""The coefficient file, schema 0.1: strict reading, canonical writing.

JSON in UTF-8, at most 1 MiB. Key names are not promised before schema 1.0. `check` holds [H, p(H)]
of the bare polynomial at five points of the domain, so that reversed, rescaled or rounded numbers
are refused. `id` is the sha256 of the canonical JSON of rule, entries and source: it detects
damage, it does not say who wrote the file.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from calibrate.errors import CoefficientsError
from calibrate.files.coefficients import N_COEFFICIENTS, Coefficients, Entry
from calibrate.maths.rule import Rule, horner

FORMAT = "calibrate.fit"
SCHEMA_VERSION = "0.1"
MAX_BYTES = 1 << 20
CHECK_TOLERANCE = 1e-9  # of the largest |p| among the check pairs
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")

_RULE_WORDS = {
    "kind": "entropy-polynomial",
    "quantity": "beta",
    "order": "descending",
    "entropy_unit": "nats",
}
_RULE_NUMBERS = ("min_entropy", "min_beta", "max_beta")
_FREE_OBJECTS = ("quality", "source", "provenance")
_TOP_KEYS = (
    "format", "schema_version", "name", "version", "id", "rule", "entries", *_FREE_OBJECTS,
)  # fmt: skip
_ENTRY_KEYS = ("layer", "head", "coefficients", "domain", "check")


def dumps(coefficients: Coefficients) -> str:
    """The text of the coefficient file; the same fit gives the same text."""
    digested = {
        "rule": _RULE_WORDS | coefficients.rule._asdict(),
        "entries": [_entry_document(entry) for entry in coefficients.entries],
        "source": dict(coefficients.source),
    }
    document = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "name": coefficients.name,
        "version": coefficients.version,
        "id": _digest(digested),
        "rule": digested["rule"],
        "entries": digested["entries"],
        "quality": dict(coefficients.quality),
        "source": digested["source"],
        "provenance": dict(coefficients.provenance),
    }
    return json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def _entry_document(entry: Entry) -> dict[str, Any]:
    points = np.linspace(*entry.domain, N_COEFFICIENTS).tolist()
    return {
        "layer": entry.layer,
        "head": entry.head,
        "coefficients": list(entry.coefficients),
        "domain": list(entry.domain),
        "check": [[H, horner(H, entry.coefficients)] for H in points],
    }


def _digest(digested: dict[str, Any]) -> str:
    text = json.dumps(
        digested, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def read(path: Path) -> Coefficients:
    """Reads and verifies a coefficient file.

    Raises:
      CoefficientsError: the file cannot be read or breaks the format; says where, what and how to
        mend it.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = b"" if size > MAX_BYTES else file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise CoefficientsError(f"{path} does not exist; check the path") from None
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the path
        reason = getattr(failure, "strerror", None) or failure
        raise CoefficientsError(f"cannot read {path}: {reason}; check the path") from failure
    try:
        if size > MAX_BYTES or len(data) > MAX_BYTES:
            _refuse("$", f"more than {MAX_BYTES} bytes", "a coefficient file is at most 1 MiB")
        return _coefficients(_parse(data), path)
    except CoefficientsError as refusal:
        raise CoefficientsError(f"{path}: {refusal}") from None


def _refuse(where: str, value: Any, remedy: str) -> NoReturn:
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    shortened = text if len(text) <= 80 else text[:77] + "..."
    raise CoefficientsError(f"{where} is {shortened}; {remedy}")


def _parse(data: bytes) -> Any:
    """Strict JSON: UTF-8, no duplicate keys, no NaN, no number beyond float64."""
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=lambda word: _refuse("$", word, "write finite numbers only"),
            parse_float=_finite_float,
        )
    except UnicodeDecodeError as failure:
        _refuse("$", f"not UTF-8 at byte {failure.start}", "save the file as UTF-8")
    except RecursionError:
        _refuse("$", "nested too deeply", "restore the file from where it was published")
    except ValueError as failure:
        _refuse("$", f"not JSON ({failure})", "restore the file from where it was published")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        _refuse("$", f"an object with two keys {twice!r}", "keep one of them")
    return mapping


def _finite_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse("$", text, "write numbers within float64")


def _coefficients(document: Any, path: Path) -> Coefficients:
    _keys(document, "$", _TOP_KEYS)
    _word(document["format"], "format", (FORMAT,))
    _word(document["schema_version"], "schema_version", (SCHEMA_VERSION,))
    name, version = document["name"], document["version"]
    if not (isinstance(name, str) and NAME_PATTERN.fullmatch(name)):
        _refuse("name", name, "use lower-case letters, digits, '.', '_' and '-', at most 64")
    _integer(version, "version", minimum=1)
    for key in _FREE_OBJECTS:
        if not isinstance(document[key], dict):
            _refuse(key, document[key], "give an object")
    coefficients = Coefficients(
        rule=_rule(document["rule"]),
        entries=_list(document["entries"], "entries", _entry),
        name=name,
        version=version,
        quality=document["quality"],
        source=document["source"],
        provenance=document["provenance"],
        path=path,
    )
    expected = _digest({key: document[key] for key in ("rule", "entries", "source")})
    if document["id"] != expected:
        _refuse("id", document["id"], f"rule, entries and source give {expected}; they changed "
                "since the fit was published: restore the file")  # fmt: skip
    return coefficients


def _rule(value: Any) -> Rule:
    _keys(value, "rule", (*_RULE_WORDS, *_RULE_NUMBERS, "outside"))
    for key, word in _RULE_WORDS.items():
        _word(value[key], f"rule.{key}", (word,))
    _word(value["outside"], "rule.outside", ("clamp", "identity"))
    numbers = {key: _number(value[key], f"rule.{key}") for key in _RULE_NUMBERS}
    return Rule(**numbers, outside=value["outside"])


def _entry(value: Any, where: str) -> Entry:
    _keys(value, where, _ENTRY_KEYS)
    for key in ("layer", "head"):
        if value[key] is not None:
            _integer(value[key], f"{where}.{key}", minimum=0)
    powers = _list(value["coefficients"], f"{where}.coefficients", _number, N_COEFFICIENTS)
    domain = _list(value["domain"], f"{where}.domain", _number, 2)
    try:
        entry = Entry(powers, (domain[0], domain[1]), value["layer"], value["head"])
    except CoefficientsError as refusal:
        raise CoefficientsError(f"{where}: {refusal}") from None
    _verify_check(value["check"], f"{where}.check", entry)
    return entry


def _verify_check(value: Any, where: str, entry: Entry) -> None:
    """Five distinct points of the domain determine a quartic: the polynomial must meet them."""
    pairs = _list(
        value, where, lambda pair, at: _list(pair, at, _number, 2), N_COEFFICIENTS
    )  # fmt: skip
    points = [H for H, _ in pairs]
    lo, hi = entry.domain
    if len(set(points)) < N_COEFFICIENTS or min(points) < lo or max(points) > hi:
        _refuse(where, points, "give five distinct entropies of the domain")
    tolerance = CHECK_TOLERANCE * max(abs(p) for _, p in pairs)
    for i, (H, expected) in enumerate(pairs):
        actual = horner(H, entry.coefficients)
        if not abs(actual - expected) <= tolerance:
            _refuse(
                f"{where}[{i}]", [H, expected],
                f"the coefficients give p({H:.6g}) = {actual!r}: they were reversed, rounded or "
                "changed since the fit; restore them",
            )  # fmt: skip


def _keys(value: Any, where: str, expected: Collection[str]) -> None:
    if not isinstance(value, dict):
        _refuse(where, value, "give an object")
    for key in expected:
        if key not in value:
            _refuse(f"{where}.{key}".removeprefix("$."), "absent", "this field is required")
    for key in value:
        if key not in expected and not (where == "$" and key.startswith("x-")):
            _refuse(f"{where}.{key}".removeprefix("$."), "not a known field",
                    "remove it, or upgrade calibrate if the file is newer")  # fmt: skip


def _list(
    value: Any, where: str, item: Callable[[Any, str], Any], length: int | None = None
) -> tuple[Any, ...]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        _refuse(where, value, f"give a list of {length}" if length else "give a list")
    return tuple(item(element, f"{where}[{i}]") for i, element in enumerate(value))


def _word(value: Any, where: str, words: tuple[str, ...]) -> None:
    if value not in words:
        _refuse(where, value, "expected " + " or ".join(map(repr, words)))


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(where, value, "give a number")
    try:
        return float(value)
    except OverflowError:
        _refuse(where, "an integer beyond float64", "give a finite number")


def _integer(value: Any, where: str, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        _refuse(where, value, f"give an integer >= {minimum}")
    return value
