"""The document of a coefficient file: its canonical text, its id, and its shape.

JSON in UTF-8, at most 1 MiB; fits/file-format.md explains every field, and the JSON Schema of
each released version lies in `schemas`. `id` is the sha256 of the canonical JSON of rule, entries
and source: it detects damage, it does not say who wrote the file.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from calibrate.errors import CoefficientsError
from calibrate.storage.atomic_io import read_file, write_atomically
from calibrate.storage.json_shapes import Object, read_field
from calibrate.storage.strict_json import Refusal, parse, refuse
from calibrate.store import coefficient_schema as schema

MAX_BYTES = 1 << 20
_DIGESTED = ("rule", "entries", "source")

# Line breaks are layout: within JSON texts they are escaped.
_NUMBERS = re.compile(r"\[\n([^\[\]{}\"]*)\n *\]")
_encode = json.JSONEncoder(
    check_circular=False, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
).encode


def id_of(document: Mapping[str, Any]) -> str:
    """The `id` of a document: sha256 of the canonical JSON of rule, entries and source."""
    digested = {name: document[name] for name in _DIGESTED}
    digested["source"] = dict(digested["source"])
    return "sha256:" + hashlib.sha256(_encode(digested).encode()).hexdigest()


def text_of(document: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    """The text of the file with a document and fields of other versions; the same gives the same.

    Raises:
      CoefficientsError: quality, source, provenance or extra hold what JSON has no word for.
    """
    try:
        content = {
            "format": schema.FORMAT.words[0],
            "schema_version": document["schema_version"],
            "name": document["name"],
            "version": document["version"],
            "id": id_of(document),
            "rule": document["rule"],
            "entries": document["entries"],
            "quality": dict(document["quality"]),
            "source": dict(document["source"]),
            "provenance": dict(document["provenance"]),
        }
        return _layout(content | dict(extra))
    except (TypeError, ValueError, RecursionError) as failure:
        raise CoefficientsError(
            f"{document['name']}@{document['version']} cannot be written as JSON ({failure}); "
            "give texts, finite numbers, lists and dicts of them"
        ) from failure


def _layout(content: dict[str, Any]) -> str:
    """An indent of 1, lists of numbers on one line; all in one line if that is too large."""
    text = json.dumps(content, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
    text = _NUMBERS.sub(lambda match: f"[{' '.join(match[1].split())}]", text)
    if len(text) <= MAX_BYTES:
        return text
    return json.dumps(content, separators=(",", ":"), ensure_ascii=True, allow_nan=False) + "\n"


def read_document(data: bytes) -> tuple[dict[str, Any], Object]:
    """The document of a file's bytes, and its shape; `check_id` is a step of its own.

    Raises:
      CoefficientsError: they break the format; says where, what and how to mend it.
    """
    if len(data) > MAX_BYTES:
        raise Refusal((), "longer than 1 MiB", "give a coefficient file, which never is")
    parsed = parse(data)
    shape = _shape_of(parsed)
    document: dict[str, Any] = shape(parsed)
    return document, shape


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


def check_id(document: dict[str, Any]) -> None:
    """Raises CoefficientsError if the id of a document is not that of its content."""
    expected = id_of(document)
    if document["id"] != expected:
        remedy = (
            f"rule, entries and source give {expected}; they changed since the fit was published: "
            "restore the file"
        )
        refuse(document["id"], remedy, ("id",))


def bytes_of(path: Path) -> bytes:
    """The bytes of a coefficient file; CoefficientsError if they cannot be read."""
    try:
        return read_file(path, MAX_BYTES)
    except FileNotFoundError:
        raise CoefficientsError(f"{path} does not exist; check the path") from None
    except OSError as failure:
        raise CoefficientsError(
            f"cannot read {path}: {failure.strerror}; check the path"
        ) from failure


def save_document(
    document: Mapping[str, Any], extra: Mapping[str, Any], path: Path, overwrite: bool
) -> Path:
    """Writes a coefficient file outside of a store; see `Coefficients.save`."""
    if path.suffix != ".json" or not path.parent.is_dir():
        raise CoefficientsError(f"{str(path)!r} is not a .json file in an existing folder")
    data = text_of(document, extra).encode()
    try:
        write_atomically(path, data, CoefficientsError, exclusive=not overwrite)
    except FileExistsError:
        if not _has_id(path, id_of(document)):
            raise CoefficientsError(
                f"{path} exists, and is not this fit; give another path, or overwrite=True"
            ) from None
    return path.absolute()


def _has_id(path: Path, expected: str) -> bool:
    """True if a file is whole and has that id: the same rules, fitted to the same rows."""
    try:
        document, _ = read_document(bytes_of(path))
        check_id(document)
    except CoefficientsError:
        return False
    return bool(document["id"] == expected)
