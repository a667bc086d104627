"""Coefficient files: strict reading, canonical writing.

`coefficient_schema.py` has the shapes, `coefficient_document.py` the JSON and the id.
"""

from pathlib import Path

from calibrate.errors import CoefficientsError
from calibrate.store.coefficient_document import (
    bytes_of,
    check_id,
    id_of,
    read_document,
    text_of,
)
from calibrate.store.fit import Fit

ADAPTER_FIT = "fit.json"  # the coefficient file in the folder of a LoRA


def dumps(fit: Fit) -> str:
    """The text of the coefficient file; the same fit gives the same text.

    Raises:
      CoefficientsError: evidence, source, provenance or extra hold values that JSON does not have.
    """
    return text_of(fit.document(), fit.extra)


def digest(fit: Fit) -> str:
    """The fit's `id`: sha256 of the canonical JSON of rule, entries and source."""
    return id_of(fit.document())


def read(path: Path) -> Fit:
    """Reads and verifies a coefficient file.

    Raises:
      CoefficientsError: the file cannot be read or breaks the format; the message names the field,
        its value and the remedy.
    """
    data = bytes_of(path)
    try:
        return loads(data, path)
    except CoefficientsError as refusal:
        raise CoefficientsError(f"{path}: {refusal}") from None


def loads(data: bytes, path: Path | None = None) -> Fit:
    """Verifies the bytes of a coefficient file, which lies at `path`.

    Raises:
      CoefficientsError: they break the format; the message names the field, its value and the
        remedy.
    """
    document = read_document(data)
    fit = Fit.from_document(document, path)
    check_id(document)
    return fit
