"""The coefficient file, schema 1: strict reading, canonical writing.

JSON in UTF-8, at most 1 MiB; fits/file-format.md explains every field, and the JSON Schema of
each released version lies in `schemas`. `check` holds [x, p(x)] of the bare polynomial, or
[H, log n, value] of a rule of both, at as many points of the domain as there are coefficients, so
that reversed, rescaled or rounded numbers are refused. `id` is the sha256 of the canonical JSON of
rule, entries and source: it detects damage, it does not say who wrote the file.
"""

import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from calibrate.core.rule import Rule
from calibrate.errors import CoefficientsError
from calibrate.storage.atomic_io import read_file
from calibrate.storage.json_shapes import Object, read_field
from calibrate.storage.strict_json import Refusal, parse, refuse
from calibrate.store import coefficient_schema as schema
from calibrate.store.check_pairs import verify_check_pairs
from calibrate.store.coefficients import Coefficients, Entry

MAX_BYTES = 1 << 20
ADAPTER_FIT = "fit.json"  # the coefficient file in the folder of an adapter

# Line breaks are layout: within JSON texts they are escaped.
_NUMBERS = re.compile(r"\[\n([^\[\]{}\"]*)\n *\]")
_encode = json.JSONEncoder(
    check_circular=False, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
).encode


def dumps(coefficients: Coefficients) -> str:
    """The text of the coefficient file; the same fit gives the same text.

    Raises:
      CoefficientsError: quality, source, provenance or extra hold what JSON has no word for.
    """
    try:
        digested = _digested(coefficients)
        document = {
            "format": schema.FORMAT.words[0],
            "schema_version": coefficients.schema_version,
            "name": coefficients.name,
            "version": coefficients.version,
            "id": _digest(digested),
            "rule": digested["rule"],
            "entries": digested["entries"],
            "quality": dict(coefficients.quality),
            "source": digested["source"],
            "provenance": dict(coefficients.provenance),
        }
        return layout(document | dict(coefficients.extra))
    except (TypeError, ValueError, RecursionError) as failure:
        raise CoefficientsError(
            f"{coefficients.reference} cannot be written as JSON ({failure}); "
            "give texts, finite numbers, lists and dicts of them"
        ) from failure


def layout(document: dict[str, Any]) -> str:
    """The text of a document: an indent of 1, lists of numbers on one line; all in one if large."""
    text = json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
    text = _NUMBERS.sub(lambda match: f"[{' '.join(match[1].split())}]", text)
    if len(text) <= MAX_BYTES:
        return text
    return json.dumps(document, separators=(",", ":"), ensure_ascii=True, allow_nan=False) + "\n"


def digest(coefficients: Coefficients) -> str:
    """The fit's `id`: sha256 of the canonical JSON of rule, entries and source."""
    return _digest(_digested(coefficients))


def _digested(coefficients: Coefficients) -> dict[str, Any]:
    rule = coefficients.rule
    kind = schema.RULE_FIELDS[rule.kind]
    return {
        "rule": {"kind": rule.kind, **kind.words}
        | {name: getattr(rule, name) for name in kind.guards},
        "entries": [
            {
                "layer": entry.layer,
                "head": entry.head,
                "coefficients": list(entry.coefficients),
                "domain": list(entry.domain),
                "check": list(map(list, entry.check)),
            }
            for entry in coefficients.entries
        ],
        "source": dict(coefficients.source),
    }


def _digest(digested: dict[str, Any]) -> str:
    return "sha256:" + hashlib.sha256(_encode(digested).encode()).hexdigest()


def read(path: Path) -> Coefficients:
    """Reads and verifies a coefficient file.

    Raises:
      CoefficientsError: the file cannot be read or breaks the format; says where, what and how to
        mend it.
    """
    data = bytes_of(path, MAX_BYTES)
    try:
        return loads(data, path)
    except CoefficientsError as refusal:
        raise CoefficientsError(f"{path}: {refusal}") from None


def bytes_of(path: Path, most: int) -> bytes:
    """The bytes of a file of a store; CoefficientsError if they cannot be read."""
    try:
        return read_file(path, most)
    except FileNotFoundError:
        raise CoefficientsError(f"{path} does not exist; check the path") from None
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the path
        reason = getattr(failure, "strerror", None) or failure
        raise CoefficientsError(f"cannot read {path}: {reason}; check the path") from failure


def loads(data: bytes, path: Path | None = None) -> Coefficients:
    """Verifies the bytes of a coefficient file, which lie at `path`.

    Raises:
      CoefficientsError: they break the format; says where, what and how to mend it.
    """
    if len(data) > MAX_BYTES:
        raise Refusal((), "longer than 1 MiB", "give a coefficient file, which never is")
    document = parse(data)
    shape = _shape_of(document)
    document = shape(document)
    kind = document["rule"]["kind"]
    guards = {name: document["rule"][name] for name in schema.RULE_FIELDS[kind].guards}
    coefficients = Coefficients(
        rule=Rule(**{"min_entropy": 0.0, **guards}, kind=kind),
        entries=tuple([_entry(entry, i, kind) for i, entry in enumerate(document["entries"])]),
        name=document["name"],
        version=document["version"],
        quality=document["quality"],
        source=document["source"],
        provenance=document["provenance"],
        path=path,
        extra={name: document[name] for name in document if name not in shape.fields},
        schema_version=document["schema_version"],
    )
    _check_id(document)
    return coefficients


def _shape_of(document: Any) -> Object:
    """The shape of the whole file, by its schema version and the kind of its rule."""
    if type(document) is not dict or "format" not in document:
        raise Refusal((), "not a fit file", "give a coefficient file, which `calibrate fit` writes")
    read_field(document, "format", schema.FORMAT)
    minor = int(read_field(document, "schema_version", schema.VERSION_OF_SCHEMA).removeprefix("1."))
    kind = read_field(document, "rule", lambda rule: read_field(rule, "kind", schema.KIND))
    if minor < schema.RULE_FIELDS[kind].minor:
        needed = f'"1.{schema.RULE_FIELDS[kind].minor}"'
        remedy = f"schema 1.{minor} has no such rule: write schema_version {needed}"
        refuse(kind, remedy, ("rule", "kind"))
    return _cached_shape(min(minor, schema.NEWEST_MINOR), kind, minor > schema.NEWEST_MINOR)


_cached_shape = cache(schema.document_shape)


def _entry(value: dict[str, Any], i: int, kind: str) -> Entry:
    try:
        entry = Entry(
            tuple(value["coefficients"]),
            tuple(value["domain"]),
            value["layer"],
            value["head"],
            tuple(map(tuple, value["check"])),
        )
    except CoefficientsError as refusal:
        raise CoefficientsError(f"entries[{i}].{refusal}") from None
    verify_check_pairs(entry.coefficients, entry.domain, entry.check, kind, ("entries", i))
    return entry


def _check_id(document: dict[str, Any]) -> None:
    expected = _digest({name: document[name] for name in ("rule", "entries", "source")})
    if document["id"] != expected:
        remedy = (
            f"rule, entries and source give {expected}; they changed since the fit was published: "
            "restore the file"
        )
        refuse(document["id"], remedy, ("id",))
