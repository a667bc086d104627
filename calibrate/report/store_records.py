"""Stores of fits as results to show: the names they hold, aliases moved, versions yanked."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
    """What a store holds of one name; `error` says why its state cannot be read."""

    name: str
    store: str
    default: int | None
    versions: Sequence[int]
    yanked: Sequence[int]
    aliases: dict[str, int]
    error: str | None = None

    @classmethod
    def of(cls, held: StoredName) -> "NameRecord":
        """The record of a name whose state could be read."""
        return cls(
            name=held.name,
            store=str(held.folder.parent),
            default=held.default,
            versions=held.versions,
            yanked=sorted(held.state.yanked & set(held.versions)),
            aliases=dict(sorted(held.state.aliases.items())),
        )


@dataclass(frozen=True)
class ListedName:
    """A name, where its store comes from, and whether an earlier store hides it."""

    held: NameRecord
    origin: str
    shadowed: bool

    def as_json(self) -> dict[str, Any]:
        """One flat object."""
        return asdict(self.held) | {"origin": self.origin, "shadowed": self.shadowed}

    def cells(self) -> tuple[str, str, str, str]:
        """Name, version that it loads, versions and aliases."""
        held = self.held
        if held.error:
            return held.name, "damaged", "see below", "-"
        versions = [f"{v} (yanked)" if v in held.yanked else str(v) for v in held.versions]
        aliases = [f"{alias} = {version}" for alias, version in held.aliases.items()]
        loads = f"@{held.default}" if held.default else "nothing"
        loads += " (hidden)" * self.shadowed
        return held.name, loads, ", ".join(versions) or "-", ", ".join(aliases) or "-"


@dataclass(frozen=True)
class StoreListing:
    """The result of `calibrate fits list`."""

    names: Sequence[ListedName]

    def as_json(self) -> Sequence[ListedName]:
        """An object per name and store, in the order of resolution."""
        return self.names

    def blocks(self) -> Iterable[Block]:
        """A table per store; the first store that holds a name decides."""
        for origin, store in dict.fromkeys((name.origin, name.held.store) for name in self.names):
            columns = ("name", "loads", "versions", "aliases")
            here = [n for n in self.names if (n.origin, n.held.store) == (origin, store)]
            rows = [name.cells() for name in here]
            title = f"{origin}  {Path(store).absolute()}"
            yield Table(columns, rows, title=title, left=columns)
        for name in self.names:
            if name.held.error:
                yield Text(f"{name.held.name} is damaged: {name.held.error}")


@dataclass(frozen=True)
class AliasRecord:
    """The result of `calibrate fits alias`."""

    held: NameRecord
    alias: str
    reference: str

    def as_json(self) -> NameRecord:
        """What the store now holds of the name."""
        return self.held

    def blocks(self) -> Iterable[Block]:
        """One line."""
        held = self.held
        yield Text(f"{held.name}@{self.alias} is {self.reference}, in {held.store}")


@dataclass(frozen=True)
class YankRecord:
    """The result of `calibrate fits yank`."""

    held: NameRecord
    reference: str
    undo: bool

    def as_json(self) -> NameRecord:
        """What the store now holds of the name."""
        return self.held

    def blocks(self) -> Iterable[Block]:
        """What the name now loads, and the aliases that no longer load."""
        held, state = self.held, "usable again" if self.undo else "yanked"
        loads = f"{held.name} has no version left to load"
        if held.default:
            loads = f"{held.name} now loads {held.name}@{held.default}"
        yield Text(f"{self.reference} is {state}, in {held.store}; {loads}")
        for alias, version in held.aliases.items():
            if not self.undo and self.reference == f"{held.name}@{version}":
                yield Text(
                    f"{held.name}@{alias} points to {self.reference} and no longer loads; move it"
                )


def list_stores(store: Path | None) -> StoreListing:
    """Every name of every store, in the order of resolution."""
    places = origins(store)
    folders = _distinct([folder for _, folder in places])
    listed: list[ListedName] = []
    for origin, folder in places:
        if folder in folders:
            folders.remove(folder)
            for name in names(folder):
                shadowed = any(other.held.name == name for other in listed)
                listed.append(ListedName(_name_or_error(folder, name), origin, shadowed))
    return StoreListing(listed)


def _name_or_error(store: Path, name: str) -> NameRecord:
    try:
        return NameRecord.of(open_name(store, name))
    except CoefficientsError as failure:
        return NameRecord(name, str(store), None, [], [], {}, error=str(failure))


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


def move_alias(reference: str, alias: str, store: Path | None) -> AliasRecord:
    """Points NAME@alias to a version; errors are those of `publishing.alias`."""
    held = publishing.alias(reference, alias, store)
    return AliasRecord(NameRecord.of(held), alias, reference)


def yank_version(reference: str, store: Path | None, undo: bool) -> YankRecord:
    """Withdraws a version, or undoes that; errors are those of `publishing.yank`."""
    return YankRecord(NameRecord.of(publishing.yank(reference, store, undo)), reference, undo)


def _distinct(folders: Sequence[Path]) -> list[Path]:
    """Folders without those that are the same folder by another path; the first path stays."""
    return list({os.path.realpath(folder): folder for folder in reversed(folders)}.values())[::-1]
