"""Stores of fits as results to show: names, audits, differences, aliases moved, versions yanked."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.evidence.evidence import OptionalHeadId
from calibrate.report.blocks import Heading, Result, Table, Text
from calibrate.report.rules import items, value_text
from calibrate.store import publishing
from calibrate.store.coefficient_file import dumps
from calibrate.store.coefficients import Coefficients
from calibrate.store.comparison import BetaChange, Range, domain_of, largest_change
from calibrate.store.fits_store import (
    find,
    find_name,
    is_path,
    load,
    names,
    open_name,
    origins,
)
from calibrate.store.versions import StoredName

Audit = dict[str, str | None]  # the "path" or address that was read; the "error", if any
COLUMNS = ("name", "loads", "versions", "aliases")
# Fields that derive from the others, or differ in any two files.
NOT_COMPARED = re.compile(r"id|name|version|entries\[[0-9]+\]\.check")
SHOWN_FIELDS = ("rule", "entries", "source", "x-")  # fields of beta and of its source


class NameRecord(NamedTuple):
    """The versions and aliases that a store holds of one name."""

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
    listed, tables = list[NameRecord](), list[Table]()
    for origin, folder in _places(store):
        before = {held.name for held in listed}
        of_store = []
        for name in names(folder):
            try:
                held = _record(open_name(folder, name))
            except CoefficientsError as failure:
                held = NameRecord(name, str(folder), error=str(failure))
            of_store.append(held._replace(origin=origin, shadowed=name in before))
        if of_store:
            title = f"{origin}  {folder.absolute()}"
            tables.append(Table(COLUMNS, [*map(_cells, of_store)], title, left=COLUMNS))
            listed += of_store
    damaged = [Text(f"{held.name} is damaged: {held.error}") for held in listed if held.error]
    return Result([*tables, *damaged], listed)


def _places(store: Path | None) -> list[tuple[str, Path]]:
    """Each store and how it was chosen; once if two paths lead to it."""
    places: dict[str, tuple[str, Path]] = {}
    for origin, folder in origins(store):
        places.setdefault(os.path.realpath(folder), (origin, folder))
    return list(places.values())


def _record(held: StoredName) -> NameRecord:
    yanked = sorted(held.state.yanked & set(held.versions))
    aliases = dict(sorted(held.state.aliases.items()))
    store = str(held.folder.parent)
    return NameRecord(held.name, store, held.newest, held.versions, yanked, aliases)


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
    """Tries to read every version of a store; a name whose state is damaged is one entry."""
    found: list[Audit] = []
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
        return [_tried(reference, partial(load, reference))]
    if "@" in reference:
        held, version = find(reference, store)
        return [_tried(held.path(version), partial(held.read, version))]
    held = find_name(reference, store)  # its versions may all be yanked
    return [_tried(held.path(v), partial(held.read, v)) for v in held.versions]


def _tried(path: str | Path, act: Callable[[], Any]) -> Audit:
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
    return Result([Text(f"{reference} is {state}, in {held.store}; {loads}")], held)


def compare_fits(a: str, b: str, store: Path | None) -> Result:
    """The difference of two fits: the largest change of beta where either was fitted, and fields.

    Shown are the fields of rule and source; JSON has all, each with its values in a and b.

    Raises:
      CoefficientsError: there is no such fit.
    """
    from calibrate.solver.solved_rows import head_label  # loads JAX

    fits = load(a, store), load(b, store)
    heads = {(entry.layer, entry.head) for fit in fits for entry in fit.entries}
    changes = [(_change(*fits, head), head_label(*head)) for head in heads]
    known = [(change, where) for change, where in changes if change is not None]
    change, where = max(known, default=(None, ""))
    fields_of_a, fields_of_b = (dict(_leaves(json.loads(dumps(fit)), "")) for fit in fits)
    fields = {
        path: (fields_of_a.get(path), fields_of_b.get(path))
        for path in dict.fromkeys([*fields_of_a, *fields_of_b])
        # 1, 1.0 and true are three values in JSON.
        if repr(fields_of_a.get(path, _leaves)) != repr(fields_of_b.get(path, _leaves))
    }
    before, after = (f"{fit.reference}  {fit.place}" for fit in fits)
    texts = [Text(text) for text in (_change_text(change, where), *_field_texts(fields))]
    record = {"a": before, "b": after, "head": where, "change": change, "fields": fields}
    return Result([Heading(f"- {before}\n+ {after}"), *texts], record)


def _change(a: Coefficients, b: Coefficients, head: OptionalHeadId) -> BetaChange | None:
    """The largest change of a head; None if one of the fits does not name it."""
    entry_a, entry_b = a.entry_of(*head), b.entry_of(*head)
    if entry_a is None or entry_b is None:
        return None
    ranges = zip(domain_of(a.rule, entry_a), domain_of(b.rule, entry_b), strict=True)
    entropies, log_n = (_hull([x for x in pair if x]) for pair in ranges)
    return largest_change((a.rule, entry_a), (b.rule, entry_b), (entropies, log_n))


def _hull(ranges: list[Range]) -> Range | None:
    """The range that holds all of them."""
    return (min(x[0] for x in ranges), max(x[1] for x in ranges)) if ranges else None


def _change_text(change: BetaChange | None, head: str) -> str:
    if change is None:
        return "the fits have no head in common"
    largest, before, after, H, log_n = change
    if largest == 0:
        return "beta is the same"
    places = [head] if head else []
    places += [] if H is None else [f"H = {H:.4g}"]
    places += [] if log_n is None else [f"n = {items(log_n)}"]
    where = ", ".join(places)
    return f"beta changes by at most {largest:.4g}: from {before:.4g} to {after:.4g} at {where}"


def _field_texts(fields: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    shown = {path: values for path, values in fields.items() if path.startswith(SHOWN_FIELDS)}
    for path, (x, y) in shown.items():
        yield f"{value_text(path)}\n  - {value_text(x)}\n  + {value_text(y)}"
    if hidden := len(fields) - len(shown):
        yield f"{hidden} fields of quality and provenance differ (the JSON has them)"
    if not fields:
        yield "no field differs"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every value of a document that is not an object, with its path; entries one by one."""
    if NOT_COMPARED.fullmatch(path):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif path == "entries":
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]")
    else:
        yield path, value
