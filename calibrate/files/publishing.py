"""Publishing: the next version of a name, its aliases, and yanked versions.

Versions are integers, immutable, and never reused, even if the file was deleted. Writers take
turns, and files are written atomically.
"""

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from calibrate.errors import CoefficientsError
from calibrate.files.atomic_io import check_folder, locked, remove_leftovers, write_atomically
from calibrate.files.coefficient_file import digest, dumps, loads
from calibrate.files.coefficient_schema import NAME_PATTERN, NAME_REMEDY
from calibrate.files.coefficients import Coefficients
from calibrate.files.store import (
    ALIAS_PATTERN,
    STATE,
    VERSION_PATTERN,
    State,
    StoredName,
    find,
    open_name,
    read_state,
    stores,
)

_ALIAS_REMEDY = (
    "use lower-case letters, digits, '.', '_' and '-', at most 64, the first a letter, and no "
    ".json at the end"
)


def writing_store(store: str | os.PathLike[str] | None = None) -> Path:
    """The store for new fits: the one given, $CALIBRATE_FITS, or ./fits."""
    return Path(store) if store else stores()[0]


def check_store(store: str | os.PathLike[str] | None = None) -> None:
    """Raises CoefficientsError unless new fits can be written there, before long work."""
    check_folder(writing_store(store).absolute(), CoefficientsError)


def check_name(name: str) -> None:
    """Raises CoefficientsError unless it is a valid name of a fit in a store."""
    if not NAME_PATTERN.fullmatch(name) or name.endswith(".json"):
        raise CoefficientsError(
            f"{name!r} is not a valid fit name; {NAME_REMEDY}, and no .json at the end"
        )


def publish(
    coefficients: Coefficients,
    store: Path,
    unchanged: Callable[[Coefficients, Coefficients], bool] = lambda newest, new: False,
) -> tuple[Coefficients, bool]:
    """Writes a fit as the next version of its name.

    The state has the version before the file appears, so that no crash makes a number be reused;
    a crash in between leaves a number without a file.

    Args:
      unchanged: (newest, new) -> whether they are the same fit.
    Returns:
      (the fit with its version and path, whether a file was written); the newest version as it
      stands if it is `unchanged`.
    Raises:
      CoefficientsError: an invalid name, a fit that could not be loaded again, or a disk that
        cannot be written.
    """
    check_name(coefficients.name)
    while True:
        try:
            with locked(store, CoefficientsError) as has_locks:
                return _publish(coefficients, store, unchanged, has_locks)
        except FileExistsError:
            continue  # without locks, another writer took the number


def _publish(
    coefficients: Coefficients,
    store: Path,
    unchanged: Callable[[Coefficients, Coefficients], bool],
    has_locks: bool,
) -> tuple[Coefficients, bool]:
    stored = open_name(store, coefficients.name)
    newest = _newest(stored)
    if newest and unchanged(newest, coefficients):
        return newest, False
    _refuse_link(stored.folder)
    number = max(stored.state.highest, *stored.versions[-1:], 0) + 1
    path = stored.path(number)
    numbered = replace(coefficients, version=number, path=path)
    data = dumps(numbered).encode()
    numbered = loads(data, path)  # raises unless the file can be loaded
    if has_locks:
        remove_leftovers(stored.folder, "*.json*")
    # Without locks two writers may take one number, and only one of them gets it.
    known = {number: digest(numbered)} if has_locks else {}
    published = stored.state.published | known
    _write_state(stored.folder, stored.state._replace(highest=number, published=published))
    write_atomically(path, data, CoefficientsError, exclusive=True)
    return numbered, True


def _refuse_link(folder: Path) -> None:
    """Raises CoefficientsError for a folder that would be written outside the store."""
    if folder.is_symlink():
        raise CoefficientsError(f"{folder} is a link; write into the store that it points to")


def _write_state(folder: Path, state: State) -> None:
    document = state._asdict() | {
        "published": {str(version): id_ for version, id_ in sorted(state.published.items())},
        "aliases": dict(sorted(state.aliases.items())),
        "yanked": sorted(state.yanked),
    }
    text = json.dumps(document, indent=1) + "\n"
    write_atomically(folder / STATE, text.encode(), CoefficientsError)


def _newest(stored: StoredName) -> Coefficients | None:
    """The highest version present; None, with a warning, if it is damaged."""
    if not stored.versions:
        return None
    try:
        return stored.read(stored.versions[-1])
    except CoefficientsError as failure:
        warnings.warn(f"{failure}; the new fit becomes the next version", stacklevel=4)
        return None


def alias(reference: str, name: str, store: str | os.PathLike[str] | None = None) -> StoredName:
    """Makes NAME@alias stand for the version that "name@version" names.

    Args:
      store: the store to change; else the first of $CALIBRATE_FITS and ./fits that has the name.
    Raises:
      CoefficientsError: an invalid alias, an absent, yanked or damaged version, or a store that
        cannot be written.
    """
    if not ALIAS_PATTERN.fullmatch(name):
        raise CoefficientsError(f"{name!r} is not a valid alias; {_ALIAS_REMEDY}")
    stored, version = _pinned(reference, store)
    if version in stored.state.yanked:
        raise CoefficientsError(
            f"{reference} was yanked; choose another version, or take it back by "
            f"`calibrate fits yank {reference} --undo`"
        )
    stored.read(version)
    if stored.state.aliases.get(name) == version:
        return stored
    return _update(
        stored, lambda state: state._replace(aliases=state.aliases | {name: version}), version
    )


def yank(
    reference: str, store: str | os.PathLike[str] | None = None, undo: bool = False
) -> StoredName:
    """Excludes "name@version" from what a bare name stands for, or includes it again.

    Args:
      store: the store to change; else the first of $CALIBRATE_FITS and ./fits that has the name.
    Raises:
      CoefficientsError: no such version, or a store that cannot be written.
    """
    stored, version = _pinned(reference, store)
    if (version in stored.state.yanked) != undo:
        return stored
    change = set.difference if undo else set.union
    return _update(
        stored, lambda state: state._replace(yanked=change(state.yanked, {version})), version
    )


def _pinned(reference: str, store: str | os.PathLike[str] | None) -> tuple[StoredName, int]:
    name, _, version = reference.partition("@")
    if not NAME_PATTERN.fullmatch(name) or not VERSION_PATTERN.fullmatch(version):
        raise CoefficientsError(
            f"{reference!r} has no version number; use NAME@VERSION, such as {name}@1"
        )
    stored, number = find(reference, store)
    if store and stored.folder.parent != Path(store):
        raise CoefficientsError(
            f"{name!r} is not in {store} but in {stored.folder.parent}; give that as the store"
        )
    if stored.folder.parent not in stores(store)[:-1]:
        raise CoefficientsError(
            f"{reference} is published with the package, in {stored.folder.parent}, and cannot be "
            "changed; copy its folder into your own store, or give that store"
        )
    return stored, number


def _update(stored: StoredName, change: Callable[[State], State], version: int) -> StoredName:
    """Changes the state of a name, as it is once no other writer is at work."""
    folder = stored.folder
    _refuse_link(folder)
    with locked(folder.parent, CoefficientsError):
        state = change(read_state(folder))
        _write_state(folder, state._replace(highest=max(state.highest, version)))
    return open_name(folder.parent, folder.name)
