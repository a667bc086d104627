"""Saving to a store: a fit becomes the next version of its name.

Versions are integers, and a saved file never changes. Writers take turns, and files are written
atomically.
"""

import os
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from calibrate.errors import CoefficientsError
from calibrate.storage.atomic_io import (
    LOCK,
    check_writable,
    locked,
    remove_leftovers,
    write_atomically,
)
from calibrate.store.fit import Fit, digest, dumps
from calibrate.store.loading import loads, read_version
from calibrate.store.references import check_name, list_files, list_places
from calibrate.version import __version__

_TOOLS = ("numpy", "scipy", "scikit-learn", "jax")


def save_to_store(fit: Fit, store: Path) -> tuple[Fit, bool]:
    """Writes a fit as the next version of its name, unless the newest version has the same `id`.

    Returns:
      (the fit with its version and path, True if a file was written).
    Raises:
      CoefficientsError: an invalid name, or a fit that could not be loaded again.
      CalibrateError: the disk cannot be written.
    """
    check_name(fit.name)
    while True:
        try:
            with locked(store) as has_locks:
                return _save_next_version(fit, store, has_locks)
        except FileExistsError:
            continue  # without locks, another writer took the number


def _save_next_version(fit: Fit, store: Path, has_locks: bool) -> tuple[Fit, bool]:
    files = list_files(store, fit.name)
    with suppress(CoefficientsError):  # a damaged file: the new fit becomes the next version
        if files and digest(newest := read_version(files[-1])) == digest(fit):
            return newest, False
    number = int(files[-1].stem) + 1 if files else 1
    path = store / fit.name / f"{number}.json"
    data = dumps(replace(fit, version=number)).encode()
    saved = loads(data, path)  # raises unless the file can be loaded
    if has_locks:
        remove_leftovers(path.parent)
    write_atomically(path, data, exclusive=True)
    return saved, True


def writing_store(store: str | os.PathLike[str] | None = None) -> Path:
    """The store for new fits: the one given, $CALIBRATE_FITS, or ./fits."""
    return Path(store) if store else list_places()[0][1]


def check_store(store: str | os.PathLike[str] | None = None) -> None:
    """Raises CalibrateError unless new fits can be written there, before long work."""
    check_writable(writing_store(store) / LOCK)


def provenance(*more: str) -> dict[str, Any]:
    """When a fit is made and with which versions; `more` names distributions beside the usual."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"calibrate": __version__}
        | {tool: version_of(tool) for tool in (*_TOOLS, *more)},
    }
