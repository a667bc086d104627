"""Publishing: the next version of a name, its aliases, and yanked versions.

Versions are integers, immutable, and never reused, even if the file was deleted. Writers take
turns, and files are written atomically.
"""

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from calibrate.errors import CoefficientsError
from calibrate.storage.atomic_io import check_writable, locked, remove_leftovers, write_atomically
from calibrate.store.coefficient_file import dumps, loads
from calibrate.store.coefficient_schema import NAME_PATTERN, NAME_REMEDY
from calibrate.store.coefficients import Coefficients
from calibrate.store.fits_store import find, open_name, stores
from calibrate.store.versions import ALIAS_PATTERN, STATE, State, StoredName, read_state
from calibrate.version import __version__

_ALIAS_REMEDY = "use lower-case letters, digits, '.', '_' and '-', the first a letter"
_TOOLS = ("numpy", "scipy", "scikit-learn", "jax")


def provenance(*more: str) -> dict[str, Any]:
    """When a fit is made and with which versions; `more` names distributions beside the usual."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"calibrate": __version__}
        | {tool: version_of(tool) for tool in (*_TOOLS, *more)},
    }


def writing_store(store: str | os.PathLike[str] | None = None) -> Path:
    """The store for new fits: the one given, $CALIBRATE_FITS, or ./fits."""
    return Path(store) if store else stores()[0]


def check_store(store: str | os.PathLike[str] | None = None) -> None:
    """Raises CoefficientsError unless new fits can be written there, before long work."""
    check_writable(writing_store(store) / STATE, CoefficientsError)


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
    number = max(stored.state.highest, *stored.versions[-1:], 0) + 1
    path = stored.path(number)
    numbered = replace(coefficients, version=number, path=path)
    data = dumps(numbered).encode()
    numbered = loads(data, path)  # raises unless the file can be loaded
    if has_locks:
        remove_leftovers(stored.folder, r"(state|[0-9]+)\.json")
    _write_state(stored.folder, stored.state._replace(highest=number))
    write_atomically(path, data, CoefficientsError, exclusive=True)
    return numbered, True


def _write_state(folder: Path, state: State) -> None:
    if folder.is_symlink():  # it would be written outside the store
        raise CoefficientsError(f"{folder} is a link; write into the store that it points to")
    document = state._asdict() | {"yanked": sorted(state.yanked)}
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
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
        raise CoefficientsError(f"{reference} was yanked; choose another version")
    stored.read(version)
    return _update(stored, version, lambda state: state.aliases.update({name: version}))


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
    change = set.discard if undo else set.add
    return _update(stored, version, lambda state: change(state.yanked, version))


def _pinned(reference: str, store: str | os.PathLike[str] | None) -> tuple[StoredName, int]:
    """A version of a store that can be changed."""
    stored, version = find(reference, store)
    if not reference.endswith(f"@{version}"):
        raise CoefficientsError(f"{reference!r} has no version number; use NAME@VERSION")
    changeable = [Path(store)] if store else stores()[:-1]
    if stored.folder.parent not in changeable:
        raise CoefficientsError(
            f"{reference} is in {stored.folder.parent}, which is not changed; name its store, or "
            "copy its folder into your own"
        )
    return stored, version


def _update(stored: StoredName, version: int, change: Callable[[State], None]) -> StoredName:
    """Changes the state of a name, as it is once no other writer is at work."""
    folder = stored.folder
    with locked(folder.parent, CoefficientsError):
        state = read_state(folder)
        change(state)
        _write_state(folder, state._replace(highest=max(state.highest, version)))
    return open_name(folder.parent, folder.name)
