"""The coefficient file, schema 1: strict reading, canonical writing.

`check` of an entry holds [x, p(x)] of the bare polynomial, or [H, log n, value] of a rule of both,
at as many points of the domain as there are coefficients, so that reversed, rescaled or rounded
numbers are refused. `coefficient_document.py` has the JSON and the id.
"""

from pathlib import Path
from typing import Any

from calibrate.core.rule import Rule
from calibrate.errors import CoefficientsError
from calibrate.store.check_pairs import verify_check_pairs
from calibrate.store.coefficient_document import (
    bytes_of,
    check_id,
    id_of,
    read_document,
    text_of,
)
from calibrate.store.coefficient_schema import RULE_FIELDS
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry

ADAPTER_FIT = "fit.json"  # the coefficient file in the folder of a LoRA


def dumps(coefficients: Coefficients) -> str:
    """The text of the coefficient file; the same fit gives the same text.

    Raises:
      CoefficientsError: quality, source, provenance or extra hold what JSON has no word for.
    """
    return text_of(coefficients.document(), coefficients.extra)


def digest(coefficients: Coefficients) -> str:
    """The fit's `id`: sha256 of the canonical JSON of rule, entries and source."""
    return id_of(coefficients.document())


def read(path: Path) -> Coefficients:
    """Reads and verifies a coefficient file.

    Raises:
      CoefficientsError: the file cannot be read or breaks the format; says where, what and how to
        mend it.
    """
    data = bytes_of(path)
    try:
        return loads(data, path)
    except CoefficientsError as refusal:
        raise CoefficientsError(f"{path}: {refusal}") from None


def loads(data: bytes, path: Path | None = None) -> Coefficients:
    """Verifies the bytes of a coefficient file, which lie at `path`.

    Raises:
      CoefficientsError: they break the format; says where, what and how to mend it.
    """
    document, shape = read_document(data)
    kind = document["rule"]["kind"]
    guards = {name: document["rule"][name] for name in RULE_FIELDS[kind].guards}
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
    check_id(document)
    return coefficients


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
