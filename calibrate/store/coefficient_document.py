"""The document of a coefficient file: its canonical text, its id, and its shape.

JSON in UTF-8, at most 8 MiB: 14,000 heads with polynomials and their evidence.
fits/file-format.md explains every field. `id` is the sha256 of the canonical JSON of rule, entries
and source: it detects damage, but does not say who wrote the file.
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
from calibrate.storage.json_shapes import read_field
from calibrate.storage.strict_json import Refusal, parse, refuse
from calibrate.store import coefficient_schema as schema

MAX_MIB = 8
MAX_BYTES = MAX_MIB << 20
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
    """The text of a file with a document and fields "x-..."; the same content gives the same text.

    Raises:
      CoefficientsError: evidence, source, provenance or extra hold values that JSON does not have.
    """
    try:
        content = {
            "format": schema.FORMAT,
            "schema_version": schema.SCHEMA_VERSION,
            "name": document["name"],
            "version": document["version"],
            "id": id_of(document),
            "rule": document["rule"],
            "entries": document["entries"],
            "evidence": dict(document["evidence"]),
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


def read_document(data: bytes) -> dict[str, Any]:
    """The document of a file's bytes, whose fields have the right shapes; see `check_id` too.

    Raises:
      CoefficientsError: they break the format; the message names the field, value and remedy.
    """
    if len(data) > MAX_BYTES:
        raise Refusal((), f"longer than {MAX_MIB} MiB", "give a coefficient file, which never is")
    parsed = parse(data)
    if type(parsed) is not dict or "format" not in parsed:
        raise Refusal((), "not a fit file", "give a coefficient file, which `calibrate fit` writes")
    read_field(parsed, "format", schema.FORMAT_WORD)
    read_field(parsed, "schema_version", schema.VERSION_WORD)
    kind = read_field(parsed, "rule", lambda rule: read_field(rule, "kind", schema.KIND_WORD))
    document: dict[str, Any] = _shape(kind)(parsed)
    return document


_shape = cache(schema.document_shape)


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


def save_document(data: bytes, fit_id: str, path: Path, overwrite: bool) -> Path:
    """Writes the bytes of a fit with an id to a file outside of a store; see `Fit.save`."""
    if path.suffix != ".json" or not path.parent.is_dir():
        raise CoefficientsError(f"{str(path)!r} is not a .json file in an existing folder")
    try:
        write_atomically(path, data, CoefficientsError, exclusive=not overwrite)
    except FileExistsError:
        if not _has_id(path, fit_id):
            raise CoefficientsError(
                f"{path} exists, and is not this fit; give another path, or overwrite=True"
            ) from None
    return path.absolute()


def _has_id(path: Path, expected: str) -> bool:
    """True if a file is undamaged and has that id: the same rules, fitted to the same inputs."""
    try:
        document = read_document(bytes_of(path))
        check_id(document)
    except CoefficientsError:
        return False
    return bool(document["id"] == expected)
