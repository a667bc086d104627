"""Stores of fits as results to show: the fits that they hold, and whether each can be loaded."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.report.blocks import Result, Table, Text
from calibrate.store.fits_store import (
    files_of,
    find,
    find_name,
    is_path,
    load,
    names,
    origins,
    read_version,
    versions,
)

Audit = dict[str, str | None]  # the "path" or address that was read; the "error", if any
COLUMNS = ("name", "loads", "versions")


class NameRecord(NamedTuple):
    """The versions that a store holds of one name."""

    name: str
    store: str
    default: int  # the version that the name loads
    versions: Sequence[int]
    origin: str  # how its store was chosen
    shadowed: bool  # whether an earlier store hides it


def list_stores(store: Path | None) -> Result:
    """Every name of every store, in the order of resolution; the first that holds a name decides.

    Shown is a table per store.
    """
    listed, tables = list[NameRecord](), list[Table]()
    for origin, folder in _places(store):
        before = {held.name for held in listed}
        of_store = []
        for name in names(folder):
            present = versions(folder, name)
            hidden = name in before
            of_store.append(
                NameRecord(name, str(folder), present[-1], present, origin, shadowed=hidden)
            )
        if of_store:
            title = f"{origin}  {folder.absolute()}"
            tables.append(Table(COLUMNS, [*map(_cells, of_store)], title, left=COLUMNS))
            listed += of_store
    return Result(tables, listed)


def _places(store: Path | None) -> list[tuple[str, Path]]:
    """Each store and how it was chosen; once if two paths lead to it."""
    places: dict[str, tuple[str, Path]] = {}
    for origin, folder in origins(store):
        places.setdefault(os.path.realpath(folder), (origin, folder))
    return list(places.values())


def _cells(held: NameRecord) -> tuple[str, str, str]:
    hidden = " (hidden)" if held.shadowed else ""
    return held.name, f"@{held.default}{hidden}", ", ".join(map(str, held.versions))


def audit_fits(reference: str | None, store: Path | None) -> Result:
    """Reads a reference, or without one every fit of the given store, or of every store.

    Raises:
      CoefficientsError: there is no such fit, or no fit at all.
    """
    if reference:
        audits = _audit_reference(reference, store)
    else:
        folders = [folder for _, folder in _places(store)][: 1 if store else None]
        audits = [audit for folder in folders for audit in audit_store(folder)]
        if not audits:
            raise CoefficientsError(f"{folders[0]} holds no fits; give a folder with NAME/1.json")
    errors = [audit["error"] for audit in audits if audit["error"]]
    lines = [f"ok      {audit['path']}" for audit in audits if not audit["error"]]
    lines += [f"FAILED  {error}" for error in errors]
    failure = CalibrateError(f"{len(errors)} of {len(audits)} failed; see above for each")
    return Result([Text(line) for line in lines], audits, failure if errors else None)


def audit_store(folder: Path) -> list[Audit]:
    """Tries to read every version of a store."""
    return [_audit_file(path) for name in names(folder) for path in files_of(folder, name)]


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
