"""Stores of fits: the fits that they hold, and the result of reading each."""

import os
from collections.abc import Callable, Sequence
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
STORE_COLUMNS = ("name", "loads", "versions")


class NameRecord(NamedTuple):
    """The versions that a store holds of one name."""

    name: str
    store: str
    default: int  # the version that the name loads
    versions: Sequence[int]
    origin: str  # how its store was chosen
    shadowed: bool  # True if an earlier store has the name, too


def list_stores(store: Path | None) -> Result:
    """A table of names for each store; the first store that holds a name is the one loaded."""
    listed, tables = list[NameRecord](), list[Table]()
    for origin, folder in _stores(store):
        before = {held.name for held in listed}
        in_store = []
        for name in list_names(folder):
            present = list_versions(folder, name)
            hidden = name in before
            in_store.append(
                NameRecord(name, str(folder), present[-1], present, origin, shadowed=hidden)
            )
        if in_store:
            title = f"{origin}  {folder.absolute()}"
            tables.append(
                Table(STORE_COLUMNS, [*map(_name_cells, in_store)], title, left=STORE_COLUMNS)
            )
            listed += in_store
    return Result(tables, listed)


def _stores(store: Path | None) -> list[tuple[str, Path]]:
    """(how it was chosen, folder) of each store, once if two paths lead to it."""
    places: dict[str, tuple[str, Path]] = {}
    for origin, folder in list_places(store):
        places.setdefault(os.path.realpath(folder), (origin, folder))
    return list(places.values())


def _name_cells(held: NameRecord) -> tuple[str, str, str]:
    hidden = " (hidden)" if held.shadowed else ""
    return held.name, f"@{held.default}{hidden}", ", ".join(map(str, held.versions))


def audit_fits(reference: str | None, store: Path | None) -> Result:
    """Reads one reference, or every fit of the given store, or of every store.

    Raises:
      CoefficientsError: there is no such fit, or no fit at all.
    """
    if reference:
        audits = _audit_reference(reference, store)
    else:
        folders = [folder for _, folder in _stores(store)][: 1 if store else None]
        audits = [audit for folder in folders for audit in audit_store(folder)]
        if not audits:
            raise CoefficientsError(f"{folders[0]} holds no fits; give a folder with NAME/1.json")
    errors = [audit["error"] for audit in audits if audit["error"]]
    lines = [f"ok      {audit['path']}" for audit in audits if not audit["error"]]
    lines += [f"FAILED  {error}" for error in errors]
    failure = CalibrateError(f"{len(errors)} of {len(audits)} failed; see above for each")
    return Result([Text(line) for line in lines], audits, failure if errors else None)


def audit_store(folder: Path) -> list[Audit]:
    """Reads every version of every fit in a store."""
    return [_audit_file(path) for name in list_names(folder) for path in list_files(folder, name)]


def _audit_reference(reference: str, store: Path | None) -> list[Audit]:
    if is_path(reference):
        return [_audit(reference, load, reference)]
    files = [find(reference, store)] if "@" in reference else find_name(reference, store)
    return [_audit_file(path) for path in files]


def _audit_file(path: Path) -> Audit:
    return _audit(str(path), read_version, path)


def _audit(path: str, read: Callable[[Any], Any], source: Path | str) -> Audit:
    try:
        read(source)
    except CoefficientsError as failure:
        return {"path": path, "error": str(failure)}
    return {"path": path, "error": None}
