"""Stores of fits as results to show: names and audits, aliases moved, versions yanked."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from calibrate.errors import CoefficientsError
from calibrate.files import publishing
from calibrate.files.store import (
    AuditResult,
    StoredName,
    audit_reference,
    audit_store,
    names,
    open_name,
    origins,
    stores,
)
from calibrate.report.blocks import Result, Table, Text

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
    """Audits a reference; or without one the given store, or every store.

    Raises:
      CoefficientsError: there is no such fit, or no fit at all.
    """
    if reference:
        results = audit_reference(reference, store)
    else:
        folders = _distinct(stores(store)[:1] if store else stores())
        results = [result for folder in folders for result in audit_store(folder)]
        if not results:
            raise CoefficientsError(
                f"{folders[0]} holds no fits; give a store: a folder with NAME/1.json"
            )
    found = [
        {
            "path": result.path, "subject": result.subject, "ok": result.error is None,
            "error": result.error, "note": result.note,
        }
        for result in results
    ]  # fmt: skip
    failed = sum(result.error is not None for result in results)
    failure = f"{failed} of {len(results)} failed; see above for each" if failed else None
    return Result([Text(_audit_line(result)) for result in results], found, failure)


def _audit_line(result: AuditResult) -> str:
    subject = f"{result.subject}  " if result.subject else ""
    if result.error:
        return f"FAILED  {subject}{result.error}"
    return f"note    {result.note}" if result.note else f"ok      {subject}{result.path}"


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
