"""Loading a fit: by NAME@VERSION from a store, by a path, or by an address with a digest.

Every file passes `coefficient_file.parse_document`, which checks it whole before a `Fit` is made.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from calibrate.core.rule import RuleForm
from calibrate.errors import CoefficientsError
from calibrate.store.coefficient_file import ADAPTER_FIT, parse_document, read_document
from calibrate.store.fit import Fit
from calibrate.store.references import find

_ADDRESS_START = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)


def load(
    reference: str | os.PathLike[str],
    store: str | os.PathLike[str] | None = None,
    fingerprint: str | None = None,
) -> Fit:
    """Loads a fit.

    Args:
      reference: "name" (its highest version), "name@3", or the path of a coefficient file or of a
        LoRA's folder; or an address with the digest of the file's bytes:
        "https://HOST/FILE#sha256:HEX".
      store: a folder to look in first; then $CALIBRATE_FITS, ./fits and the package's own fits.
      fingerprint: of the head that the fit is meant for.
    Returns:
      Fit, whose `.path` is the file that was read, and `.address` the pinned address.
    Raises:
      CoefficientsError: nothing has that reference, the file is damaged, cannot be fetched or has
        another digest, or the fit is for another head than `fingerprint`. There is no fallback.

    >>> import calibrate
    >>> print(calibrate.load("paper@1"))
    paper@1: polynomial
    beta = -0.037 H^4 + 0.481 H^3 - 2.3 H^2 + 4.917 H - 1.791
    1 <= beta <= 64; beta = 1 up to H = 0.5 nats
    """
    if isinstance(reference, str) and _ADDRESS_START.match(reference):
        from calibrate.store.addresses import fetch  # deferred: it loads urllib

        data, copy = fetch(reference)
        try:
            fit = replace(loads(data, copy), address=reference)
        except CoefficientsError as refusal:
            raise CoefficientsError(f"{reference}: {refusal}") from None
    elif is_path(reference):
        path = Path(reference)
        fit = read(path / ADAPTER_FIT if path.is_dir() else path)
    else:
        fit = read_version(find(str(reference), store))
    if fingerprint is not None and fit.fingerprint != fingerprint:
        head = fit.source.get("head", "none in particular")
        raise CoefficientsError(
            f"{fit.reference} was made for head {head!r} ({fit.fingerprint}), not for "
            f"{fingerprint}; calibrate this head, or leave `fingerprint` out if you mean it"
        )
    return fit


def is_path(reference: str | os.PathLike[str]) -> bool:
    """True if a reference is the path or address of a file, not a name."""
    if not isinstance(reference, str | os.PathLike):
        raise CoefficientsError(f"{reference!r} is not a valid reference; use a name or a path")
    return not isinstance(reference, str) or "/" in reference or reference.endswith(".json")


def read(path: Path) -> Fit:
    """The fit of a coefficient file; CoefficientsError as of `read_document`."""
    return _from_document(read_document(path), path)


def read_version(path: Path) -> Fit:
    """Reads STORE/NAME/VERSION.json; CoefficientsError if it has another name or version."""
    fit = read(path)
    if (fit.name, f"{fit.version}.json") != (path.parent.name, path.name):
        raise CoefficientsError(
            f"{path} is {fit.reference}; its path must have that name and version: restore the "
            "file, or load it by its path"
        )
    return fit


def loads(data: bytes, path: Path | None = None) -> Fit:
    """The fit in the bytes of a coefficient file at `path`; errors as of `parse_document`."""
    return _from_document(parse_document(data), path)


def _from_document(document: Mapping[str, Any], path: Path | None) -> Fit:
    rule, defaults = document["rule"], RuleForm(0.0)._asdict()
    guards = {name: rule.get(name, default) for name, default in defaults.items()}
    fields = ("entries", "name", "version", "evidence", "source", "provenance")
    return Fit(
        RuleForm(**guards),
        **{name: document[name] for name in fields},
        path=path,
        extra={name: document[name] for name in document if name.startswith("x-")},
    )
