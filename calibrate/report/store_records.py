"""Stores of fits as results to show: names and audits, aliases moved, versions yanked."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from calibrate.errors import CoefficientsError
from calibrate.files import publishing
from calibrate.files.coefficient_file import read
from calibrate.files.store import (
    StoredName,
    find,
    is_path,
    names,
    open_name,
    origins,
    stores,
)
from calibrate.report.blocks import Result, Table, Text

Audit = dict[str, str | None]  # the "path" of what was read, and the "error", if there is one
COLUMNS = ("name", "loads", "versions", "aliases")


class NameRecord(NamedTuple):
    """What a store holds of one name."""

    name: str
    store: str
    default: int | None = None  # the version that the name loads, if any
    versions: Sequence[int] = ()
    yanked: Sequence[int] = ()
    aliases: Mapping[str, int] | None = None
    error: str | None = None  # why its state cannot be read
    origin: str | None = None  # where its store comes from
    shadowed: bool = False  # whether an earlier store hides it


def list_stores(store: Path | None) -> Result:
    """Every name of every store, in the order of resolution; the first that holds a name decides.

    Shown is a table per store.
    """
    places = origins(store)
    folders = _distinct([folder for _, folder in places])
    listed: list[NameRecord] = []
    for origin, folder in places:
        if folder in folders:
            folders.remove(folder)
            for name in names(folder):
                shadowed = any(other.name == name for other in listed)
                held = _name_or_error(folder, name)
                listed.append(held._replace(origin=origin, shadowed=shadowed))
    by_store: dict[str, list[NameRecord]] = {}
    for held in listed:
        by_store.setdefault(f"{held.origin}  {Path(held.store).absolute()}", []).append(held)
    tables = [
        Table(COLUMNS, [*map(_cells, held)], title, left=COLUMNS)
        for title, held in by_store.items()
    ]
    damaged = [Text(f"{held.name} is damaged: {held.error}") for held in listed if held.error]
    return Result([*tables, *damaged], listed)


def _name_or_error(store: Path, name: str) -> NameRecord:
    try:
        return _record(open_name(store, name))
    except CoefficientsError as failure:
        return NameRecord(name, str(store), error=str(failure))


def _record(held: StoredName) -> NameRecord:
    yanked = sorted(held.state.yanked & set(held.versions))
    aliases = dict(sorted(held.state.aliases.items()))
    store = str(held.folder.parent)
    return NameRecord(held.name, store, held.default, held.versions, yanked, aliases)


def _cells(held: NameRecord) -> tuple[str, str, str, str]:
    if held.error:
        return held.name, "damaged", "see below", "-"
    versions = [f"{v} (yanked)" if v in held.yanked else str(v) for v in held.versions]
    aliases = [f"{alias} = {version}" for alias, version in (held.aliases or {}).items()]
    loads = f"@{held.default}" if held.default else "nothing"
    loads += " (hidden)" if held.shadowed else ""
    return held.name, loads, ", ".join(versions) or "-", ", ".join(aliases) or "-"


def audit_fits(reference: str | None, store: Path | None) -> Result:
    """Reads a reference, or without one every fit and state of the given store, or of every store.

    Raises:
      CoefficientsError: there is no such fit, or no fit at all.
    """
    if reference:
        found = _audit_reference(reference, store)
    else:
        folders = _distinct(stores(store)[:1] if store else stores())
        found = [result for folder in folders for result in audit_store(folder)]
        if not found:
            raise CoefficientsError(f"{folders[0]} holds no fits; give a folder with NAME/1.json")
    errors = [result["error"] for result in found if result["error"]]
    lines = [f"ok      {result['path']}" for result in found if not result["error"]]
    lines += [f"FAILED  {error}" for error in errors]
    failure = f"{len(errors)} of {len(found)} failed; see above for each" if errors else None
    return Result([Text(line) for line in lines], found, failure)


def audit_store(folder: Path) -> list[Audit]:
    """Tries to read every version of a store; a name whose state is damaged is one entry."""
    found = []
    for name in names(folder):
        try:
            held = open_name(folder, name)
        except CoefficientsError as failure:
            found.append({"path": str(folder / name), "error": str(failure)})
        else:
            found += [_tried(held.path(v), partial(held.read, v)) for v in held.versions]
    return found


def _audit_reference(reference: str, store: Path | None) -> list[Audit]:
    if is_path(reference):
        return [_tried(Path(reference), partial(read, Path(reference)))]
    held, version = find(reference, store)
    versions = [version] if "@" in reference else held.versions
    return [_tried(held.path(v), partial(held.read, v)) for v in versions]


def _tried(path: Path, act: Callable[[], Any]) -> Audit:
    try:
        act()
    except CoefficientsError as failure:
        return {"path": str(path), "error": str(failure)}
    return {"path": str(path), "error": None}


def move_alias(reference: str, alias: str, store: Path | None) -> Result:
    """Points NAME@alias to a version; errors are those of `publishing.alias`."""
    held = _record(publishing.alias(reference, alias, store))
    return Result([Text(f"{held.name}@{alias} is {reference}, in {held.store}")], held)


def yank_version(reference: str, store: Path | None, undo: bool) -> Result:
    """Withdraws a version, or undoes that; errors are those of `publishing.yank`."""
    held = _record(publishing.yank(reference, store, undo))
    loads = f"{held.name} has no version left to load"
    if held.default:
        loads = f"{held.name} now loads {held.name}@{held.default}"
    state = "usable again" if undo else "yanked"
    told = [f"{reference} is {state}, in {held.store}; {loads}"]
    if not undo:
        told += [
            f"{held.name}@{alias} points to {reference} and no longer loads; move it"
            for alias, version in (held.aliases or {}).items()
            if f"{held.name}@{version}" == reference
        ]
    return Result([*map(Text, told)], held)


def _distinct(folders: Sequence[Path]) -> list[Path]:
    """Folders without those that are the same folder by another path; the first path stays."""
    return list({os.path.realpath(folder): folder for folder in reversed(folders)}.values())[::-1]
