"""Stores of fits as results to show: the names they hold, aliases moved, versions yanked."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from calibrate.errors import CoefficientsError
from calibrate.files import publishing
from calibrate.files.store import (
    StoredName,
    audit_reference,
    audit_store,
    names,
    open_name,
    origins,
    stores,
)
from calibrate.report.audit_records import StoreAuditRecord
from calibrate.report.blocks import Block, Table, Text


@dataclass(frozen=True)
class NameRecord:
    """What a store holds of one name.

    Attributes:
      default: the version that the name loads, if any.
      error: why its log cannot be read.
      origin: where its store comes from.
      shadowed: whether an earlier store hides it.
    """

    name: str
    store: str
    default: int | None = None
    versions: Sequence[int] = ()
    yanked: Sequence[int] = ()
    aliases: dict[str, int] | None = None
    error: str | None = None
    origin: str | None = None
    shadowed: bool = False

    @classmethod
    def of(cls, held: StoredName) -> "NameRecord":
        """The record of a name whose log could be read."""
        yanked = sorted(held.state.yanked & set(held.versions))
        aliases = dict(sorted(held.state.aliases.items()))
        store = str(held.folder.parent)
        return cls(held.name, store, held.default, held.versions, yanked, aliases)

    def cells(self) -> tuple[str, str, str, str]:
        """Name, version that it loads, versions and aliases."""
        if self.error:
            return self.name, "damaged", "see below", "-"
        versions = [f"{v} (yanked)" if v in self.yanked else str(v) for v in self.versions]
        aliases = [f"{alias} = {version}" for alias, version in (self.aliases or {}).items()]
        loads = f"@{self.default}" if self.default else "nothing"
        loads += " (hidden)" if self.shadowed else ""
        return self.name, loads, ", ".join(versions) or "-", ", ".join(aliases) or "-"


@dataclass(frozen=True)
class StoreListing:
    """The result of `calibrate fits list`."""

    names: Sequence[NameRecord]

    def as_json(self) -> Sequence[NameRecord]:
        """An object per name and store, in the order of resolution."""
        return self.names

    def blocks(self) -> Iterable[Block]:
        """A table per store; the first store that holds a name decides."""
        for place in dict.fromkeys((name.origin, name.store) for name in self.names):
            columns, (origin, store) = ("name", "loads", "versions", "aliases"), place
            rows = [name.cells() for name in self.names if (name.origin, name.store) == place]
            yield Table(columns, rows, f"{origin}  {Path(store).absolute()}", left=columns)
        for name in self.names:
            if name.error:
                yield Text(f"{name.name} is damaged: {name.error}")


@dataclass(frozen=True)
class NameChange:
    """The result of `calibrate fits alias` and `calibrate fits yank`."""

    held: NameRecord
    told: Sequence[str]

    def as_json(self) -> NameRecord:
        """What the store now holds of the name."""
        return self.held

    def blocks(self) -> Iterable[Block]:
        """What has changed."""
        return map(Text, self.told)


def list_stores(store: Path | None) -> StoreListing:
    """Every name of every store, in the order of resolution."""
    places = origins(store)
    folders = _distinct([folder for _, folder in places])
    listed: list[NameRecord] = []
    for origin, folder in places:
        if folder in folders:
            folders.remove(folder)
            for name in names(folder):
                shadowed = any(other.name == name for other in listed)
                held = _name_or_error(folder, name)
                listed.append(replace(held, origin=origin, shadowed=shadowed))
    return StoreListing(listed)


def _name_or_error(store: Path, name: str) -> NameRecord:
    try:
        return NameRecord.of(open_name(store, name))
    except CoefficientsError as failure:
        return NameRecord(name, str(store), error=str(failure))


def audit_fits(reference: str | None, store: Path | None) -> StoreAuditRecord:
    """Audits a reference; or without one the given store, or every store.

    Raises:
      CoefficientsError: there is no such fit, or no fit at all.
    """
    if reference:
        return StoreAuditRecord(audit_reference(reference, store))
    folders = _distinct(stores(store)[:1] if store else stores())
    results = [result for folder in folders for result in audit_store(folder)]
    if not results:
        raise CoefficientsError(
            f"{folders[0]} holds no fits; give a store: a folder with NAME/1.json"
        )
    return StoreAuditRecord(results)


def move_alias(reference: str, alias: str, store: Path | None) -> NameChange:
    """Points NAME@alias to a version; errors are those of `publishing.alias`."""
    held = NameRecord.of(publishing.alias(reference, alias, store))
    return NameChange(held, [f"{held.name}@{alias} is {reference}, in {held.store}"])


def yank_version(reference: str, store: Path | None, undo: bool) -> NameChange:
    """Withdraws a version, or undoes that; errors are those of `publishing.yank`."""
    held = NameRecord.of(publishing.yank(reference, store, undo))
    loads = f"{held.name} has no version left to load"
    if held.default:
        loads = f"{held.name} now loads {held.name}@{held.default}"
    state = "usable again" if undo else "yanked"
    stale = [alias for alias, v in (held.aliases or {}).items() if f"{held.name}@{v}" == reference]
    told = [f"{reference} is {state}, in {held.store}; {loads}"]
    if not undo:
        told += [
            f"{held.name}@{alias} points to {reference} and no longer loads; move it"
            for alias in stale
        ]
    return NameChange(held, told)


def _distinct(folders: Sequence[Path]) -> list[Path]:
    """Folders without those that are the same folder by another path; the first path stays."""
    return list({os.path.realpath(folder): folder for folder in reversed(folders)}.values())[::-1]
