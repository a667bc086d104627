"""Stores of fits: the fits that they hold, and the result of reading each."""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.report.blocks import Result, Table, Text
from calibrate.store.loading import is_path, load, read_version
from calibrate.store.references import (
    find,
    find_name,
    list_files,
    list_names,
    list_places,
    list_versions,
)

Audit = dict[str, str | None]  # "path" or address of a fit, and the "error", if any
STORE_COLUMNS = ("name", "loads", "versions", "store")


class NameRecord(NamedTuple):
    """The versions that a store holds of one name; the name alone loads the last."""

    name: str
    store: str
    versions: Sequence[int]
    origin: str  # how its store was chosen
    shadowed: bool  # True if an earlier store has the name, too


def list_stores(store: Path | None) -> Result:
    """A table of the names in every store; the first store that holds a name is the one loaded."""
    listed = list[NameRecord]()
    for origin, folder in _stores(store):
        before = {held.name for held in listed}
        for name in list_names(folder):
            versions = list_versions(folder, name)
            listed.append(NameRecord(name, str(folder), versions, origin, name in before))
    rows = [
        (
            held.name,
            "(hidden)" if held.shadowed else f"@{held.versions[-1]}",
            ", ".join(map(str, held.versions)),
            f"{held.origin}: {Path(held.store).absolute()}",
        )
        for held in listed
    ]
    return Result([Table(STORE_COLUMNS, rows, left=STORE_COLUMNS)], listed)


def _stores(store: Path | None) -> list[tuple[str, Path]]:
    """(how it was chosen, folder) of each store, once if two paths lead to it."""
    places: dict[str, tuple[str, Path]] = {}
    for origin, folder in list_places(store):
        places.setdefault(os.path.realpath(folder), (origin, folder))
    return list(places.values())


def audit_fits(reference: str | None, store: Path | None) -> Result:
    """Reads one reference, or every fit of the given store, or of every store.

    Raises:
      CoefficientsError: there is no such fit, or no fit at all.
    """
    if reference is None:
        folders = [folder for _, folder in _stores(store)][: 1 if store else None]
        audits = [audit for folder in folders for audit in audit_store(folder)]
        if not audits:
            raise CoefficientsError(f"{folders[0]} holds no fits; give a folder with NAME/1.json")
    elif is_path(reference):
        audits = [_audit(reference, partial(load, reference))]
    else:
        files = [find(reference, store)] if "@" in reference else find_name(reference, store)
        audits = _audit_files(files)
    errors = [audit["error"] for audit in audits if audit["error"]]
    lines = [f"ok      {audit['path']}" for audit in audits if not audit["error"]]
    lines += [f"FAILED  {error}" for error in errors]
    failure = CalibrateError(f"{len(errors)} of {len(audits)} failed; see above for each")
    return Result([Text(line) for line in lines], audits, failure if errors else None)


def audit_store(folder: Path) -> list[Audit]:
    """Reads every version of every fit in a store."""
    return _audit_files(path for name in list_names(folder) for path in list_files(folder, name))


def _audit_files(paths: Iterable[Path]) -> list[Audit]:
    return [_audit(str(path), partial(read_version, path)) for path in paths]


def _audit(path: str, read: Callable[[], Any]) -> Audit:
    try:
        read()
    except CoefficientsError as failure:
        return {"path": path, "error": str(failure)}
    return {"path": path, "error": None}
