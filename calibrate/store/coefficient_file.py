"""The coefficient file: JSON in UTF-8, read strictly and written in one spelling.

`coefficient_fields.py` has the fields, and the JSON Schema their meanings. A file protects itself
twice. `check` holds values of each rule, which determine its coefficients, so that reversed,
rescaled or rounded coefficients are refused. `id` is the sha256 of the canonical JSON of rule,
entries and source: it detects damage, but does not say who wrote the file.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from calibrate.errors import CoefficientsError
from calibrate.storage.atomic_io import write_atomically
from calibrate.storage.strict_json import convert, describe, parse
from calibrate.store.coefficient_fields import (
    COEFFICIENT_SCHEMA_VERSION,
    FORMAT,
    CoefficientDocument,
)
from calibrate.store.entries import (
    Entry,
    check_entries,
    make_check_pairs,
    verify_check_pairs,
)

MAX_FIT_MIB = 8  # some 10,000 heads with polynomials and their evidence
MAX_FIT_BYTES = MAX_FIT_MIB << 20
ADAPTER_FIT = "fit.json"  # the coefficient file in the folder of a LoRA
# Of config.json of an exported model; of a .gguf file, the beginning of the names of such keys.
MODEL_KEY = "calibrate"
_FORMAT_REMEDY = "see its JSON Schema (calibrate/store/schemas), or restore the file"
_NOT_A_FIT = "the file is not a fit file; give a coefficient file, which `calibrate fit` writes"
# Lists of numbers, which are written on one line; within the texts of JSON line breaks are escaped.
_NUMBER_LISTS = re.compile(r"\[\n([^\[\]{}\"]*)\n *\]")
_encode_canonically = json.JSONEncoder(
    check_circular=False, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
).encode


def read_document(path: Path) -> dict[str, Any]:
    """The content of a coefficient file; see `parse_document`.

    Raises:
      CoefficientsError: it cannot be read, or breaks the format; the message has the path.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FIT_BYTES + 1)
    except FileNotFoundError:
        raise CoefficientsError(f"{path} does not exist; check the path") from None
    except OSError as failure:
        raise CoefficientsError(
            f"cannot read {path}: {failure.strerror}; check the path"
        ) from failure
    try:
        return parse_document(data)
    except CoefficientsError as refusal:
        raise CoefficientsError(f"{path}: {refusal}") from None


def parse_document(data: bytes) -> dict[str, Any]:
    """The content of the bytes of a coefficient file, with every condition of the format checked.

    Returns:
      The fields of the file; "entries" as a tuple of Entry.
    Raises:
      CoefficientsError: the bytes break the format; the message names the field, value and remedy.
    """
    if len(data) > MAX_FIT_BYTES:
        raise CoefficientsError(
            f"the file is longer than {MAX_FIT_MIB} MiB; give a coefficient file, which never is"
        )
    document: dict[str, Any] = parse(data)
    _check_version(document)
    own = {name: document[name] for name in document if not name.startswith("x-")}
    convert(own, CoefficientDocument, _FORMAT_REMEDY)
    _check_integers(document["source"])
    kind = document["rule"]["kind"]
    document["rule"] = {
        name: float(value) if isinstance(value, int) else value
        for name, value in document["rule"].items()
    }
    entries = tuple([_read_entry(fields, i) for i, fields in enumerate(document["entries"])])
    check_entries(entries, kind)
    for i, entry in enumerate(entries):
        verify_check_pairs(entry, kind, f"entries[{i}]")
    document["entries"] = entries
    if document["id"] != (expected := document_id(document)):
        raise CoefficientsError(
            f"id is {document['id']}; rule, entries and source give {expected}; they changed since "
            "the fit was saved: restore the file"
        )
    return document


def _check_version(document: Any) -> None:
    """Raises CoefficientsError for a file of another format, or another version of it."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CoefficientsError(_NOT_A_FIT)
    if (version := document.get("schema_version")) != COEFFICIENT_SCHEMA_VERSION:
        raise CoefficientsError(
            f"schema_version is {describe(version)}; this calibrate reads "
            f'"{COEFFICIENT_SCHEMA_VERSION}": upgrade calibrate, or fit again'
        )


def _check_integers(source: Mapping[str, Any]) -> None:
    """Raises CoefficientsError for integers of more than 64 bits, which msgspec does not bound."""
    for value in (source.get("seed"), *source.get("options", {}).values()):
        if isinstance(value, int) and value >= 1 << 64:
            raise CoefficientsError(f"source has {describe(value)}; give at most 2^64 - 1")


def _read_entry(fields: Mapping[str, Any], i: int) -> Entry:
    """The entry at position i of a file."""
    check = tuple([tuple(map(float, pair)) for pair in fields["check"]])
    try:
        return Entry(**{**fields, "check": check})
    except CoefficientsError as refusal:
        raise CoefficientsError(f"entries[{i}].{refusal}") from None


def _entry_fields(entry: Entry, kind: str) -> dict[str, Any]:
    """An entry as the file has it."""
    return {
        "layer": entry.layer,
        "head": entry.head,
        "coefficients": entry.coefficients,
        "domain": entry.domain,
        "check": entry.check or make_check_pairs(entry, kind),
    }


def document_id(document: Mapping[str, Any]) -> str:
    """The `id` of a document: sha256 of the canonical JSON of rule, entries and source."""
    rule = document["rule"]
    entries = [_entry_fields(entry, rule["kind"]) for entry in document["entries"]]
    digested = {"rule": rule, "entries": entries, "source": dict(document["source"])}
    return "sha256:" + hashlib.sha256(_encode_canonically(digested).encode()).hexdigest()


def document_text(document: Mapping[str, Any]) -> str:
    """The text of a coefficient file; the same document gives the same text.

    Raises:
      CoefficientsError: fields hold values that JSON does not have.
    """
    kind = document["rule"]["kind"]
    try:
        content = {
            "format": FORMAT,
            "schema_version": COEFFICIENT_SCHEMA_VERSION,
            "name": document["name"],
            "version": document["version"],
            "id": document_id(document),
            "rule": document["rule"],
            "entries": [_entry_fields(entry, kind) for entry in document["entries"]],
            **{name: dict(document[name]) for name in ("evidence", "source", "provenance")},
        }
        content |= {name: document[name] for name in document if name not in content}
        text = json.dumps(content, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
        text = _NUMBER_LISTS.sub(lambda match: f"[{' '.join(match[1].split())}]", text)
    except (TypeError, ValueError, RecursionError) as failure:
        raise CoefficientsError(
            f"{document['name']}@{document['version']} cannot be written as JSON ({failure}); "
            "give texts, finite numbers, lists and dicts of them"
        ) from failure
    return text


def save_document(document: Mapping[str, Any], path: Path, overwrite: bool) -> Path:
    """Writes a coefficient file outside of a store; see `Fit.save`."""
    if path.suffix != ".json" or not path.parent.is_dir():
        raise CoefficientsError(f"{str(path)!r} is not a .json file in an existing folder")
    data = document_text(document).encode()
    written_id = parse_document(data)["id"]  # a fit that could not be read again is not written
    try:
        write_atomically(path, data, exclusive=not overwrite)
    except FileExistsError:
        with suppress(CoefficientsError):
            if read_document(path)["id"] == written_id:
                return path.absolute()
        raise CoefficientsError(
            f"{path} exists, and is not this fit; give another path, or overwrite=True"
        ) from None
    return path.absolute()


def require_original(model: Any, record: Any) -> None:
    """Raises CoefficientsError for a model whose weights carry a fit already.

    A second one would multiply its betas.

    Args:
      model: its path or class, for the message.
      record: the value of MODEL_KEY, which says under "fit" what an export was made of.
    """
    fit = record.get("fit") if isinstance(record, Mapping) else None
    if fit is not None:
        raise CoefficientsError(f"{model} carries the fit {fit} already; give the original model")
