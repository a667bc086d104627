"""The fits store: references resolved, versions published, aliased and yanked.

A store is a folder of NAME/VERSION.json, with the log of each name beside its versions
(`history.py`). Reading looks through the stores in order: the one given, $CALIBRATE_FITS, ./fits,
and the fits published with the package; the first that holds the name decides. Versions are
integers, immutable, and never given out twice, even if the file was deleted.
"""

import difflib
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from calibrate.errors import CoefficientsError
from calibrate.files.coefficient_file import NAME_PATTERN, NAME_REMEDY, digest, dumps, loads, read
from calibrate.files.coefficients import Coefficients
from calibrate.files.history import ALIAS_PATTERN, LOG, History, append_event, read_history
from calibrate.files.whole import locked, remove_leftovers, write_whole

_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_VERSION_FILE = re.compile(rf"({_VERSION.pattern})\.json")


class Held(NamedTuple):
    """A name in the store that holds it."""

    folder: Path  # STORE/NAME
    versions: list[int]  # those present, lowest first
    history: History

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def default(self) -> int | None:
        """The version that the bare name stands for: the highest not yanked."""
        usable = [number for number in self.versions if number not in self.history.yanked]
        return usable[-1] if usable else None

    def path(self, version: int) -> Path:
        """Where a version is."""
        return self.folder / f"{version}.json"

    def resolve(self, which: str) -> int:
        """The version present that "3", an alias, or "" for the bare name stands for."""
        if _VERSION.fullmatch(which):
            version = int(which)
        elif which:
            version = self._follow(which)
        elif self.default is None:
            raise CoefficientsError(
                f"every version of {self.name!r} in {self.folder} was yanked; pin one, such as "
                f"{self.name}@{self.versions[-1]}, or publish another"
            )
        else:
            return self.default
        if version not in self.versions:
            present = ", ".join(f"{self.name}@{number}" for number in self.versions[-8:])
            state = "was published, but its file is gone" if version in self.history.ids else (
                "does not exist"
            )  # fmt: skip
            raise CoefficientsError(
                f"'{self.name}@{which}' {state} in {self.folder.absolute()}; "
                f"there is {'..., ' if len(self.versions) > 8 else ''}{present}"
            )
        return version

    def _follow(self, alias: str) -> int:
        version = self.history.aliases.get(alias)
        if version is None:
            known = ", ".join(sorted(self.history.aliases)[:8]) or "none"
            raise CoefficientsError(
                f"{self.name!r} in {self.folder.absolute()} has no alias {alias!r} (it has "
                f"{known}); `calibrate fits alias {self.name}@VERSION {alias}` makes it"
            )
        if version in self.history.yanked:
            raise CoefficientsError(
                f"{self.name}@{alias} leads to {self.name}@{version}, which was yanked; "
                "move the alias, or load the version by its number"
            )
        return version

    def read(self, version: int) -> Coefficients:
        """A version that is present; it must be the one published under that number."""
        coefficients = read(self.path(version))
        if (coefficients.name, coefficients.version) != (self.name, version):
            raise CoefficientsError(
                f"{coefficients.path} holds {coefficients.reference}; versions keep their place: "
                "restore the file, or load it by its path"
            )
        published = self.history.ids.get(version)
        if published and digest(coefficients) not in published:
            raise CoefficientsError(
                f"{coefficients.path}: id is not {' or '.join(sorted(published))}, with which it "
                "was published; versions never change: restore it, and publish yours as another"
            )
        return coefficients


def published_store() -> Path:
    """The package's own fits: inside the package in a wheel, beside it in the repository."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "published_fits"
    return inside if os.path.isdir(inside) else package.parent / "fits"


def origins(store: str | os.PathLike[str] | None = None) -> list[tuple[str, Path]]:
    """The folders that a reference is looked up in, first to last, and how each was chosen.

    Raises:
      CoefficientsError: `store` is given and is no folder; the others need not exist yet.
    """
    if store and not os.path.isdir(store):
        raise CoefficientsError(f"{store} is no folder; give a store of fits")
    chosen = [("--store", store), ("$CALIBRATE_FITS", os.environ.get("CALIBRATE_FITS"))]
    found = [(origin, Path(folder)) for origin, folder in chosen if folder]
    return [*found, ("./fits", Path("fits")), ("package", published_store())]


def stores(store: str | os.PathLike[str] | None = None) -> list[Path]:
    """The folders that a reference is looked up in, first to last."""
    return [folder for _, folder in origins(store)]


def writing_store(store: str | os.PathLike[str] | None = None) -> Path:
    """The folder that new fits go to: the one given, $CALIBRATE_FITS, or ./fits."""
    return Path(store) if store else stores()[0]


def load(
    reference: str | os.PathLike[str],
    store: str | os.PathLike[str] | None = None,
    fingerprint: str | None = None,
) -> Coefficients:
    """Loads a fit.

    Args:
      reference: "name" (its highest version that is not yanked), "name@3", "name@alias", or the
        path of a coefficient file.
      store: a folder to look in first; then $CALIBRATE_FITS, ./fits and the package's own fits.
      fingerprint: of the head that the fit is meant for.
    Returns:
      Coefficients, whose `.path` is the file that was read.
    Raises:
      CoefficientsError: nothing has that reference, the file is damaged, or the fit is for another
        head than `fingerprint`. There is no fallback.
    Warns:
      UserWarning: a yanked version that was asked for by its number.
    """
    if fingerprint is not None and not isinstance(fingerprint, str):
        raise CoefficientsError(f"fingerprint is {fingerprint!r}; give that of a head, a text")
    if is_path(reference):
        coefficients = read(Path(reference))
    else:
        held, version = find(str(reference), store)
        coefficients = held.read(version)
        if version in held.history.yanked:
            warnings.warn(
                f"{coefficients.reference} was yanked; load {coefficients.name!r} for the newest "
                "version that was not",
                stacklevel=2,
            )
    if fingerprint is not None and coefficients.fingerprint != fingerprint:
        raise CoefficientsError(_for_another_head(coefficients, fingerprint))
    return coefficients


def _for_another_head(coefficients: Coefficients, fingerprint: str) -> str:
    theirs = coefficients.fingerprint
    made_for = f"made for head {coefficients.source.get('head', 'without a name')!r} ({theirs})"
    return (
        f"{coefficients.reference} is {made_for if theirs else 'made for no head in particular'}, "
        f"not for {fingerprint}; calibrate this head, or leave `fingerprint` out if you mean it"
    )


def is_path(reference: str | os.PathLike[str]) -> bool:
    """Whether a reference is the path of a file, not a name."""
    if not isinstance(reference, str | os.PathLike):
        raise CoefficientsError(f"{reference!r} is no reference; use a name or a path")
    return not isinstance(reference, str) or "/" in reference or reference.endswith(".json")


def find(reference: str, store: str | os.PathLike[str] | None = None) -> tuple[Held, int]:
    """The name and version that "name", "name@3" or "name@alias" stands for.

    Raises:
      CoefficientsError: no store has it, or the alias or bare name leads to a yanked version.
    """
    name, at, which = reference.partition("@")
    known = _VERSION.fullmatch(which) or ALIAS_PATTERN.fullmatch(which)
    if not NAME_PATTERN.fullmatch(name) or (at and not known):
        raise CoefficientsError(
            f"{reference!r} is no reference; use NAME, NAME@VERSION, NAME@ALIAS or a path to a "
            ".json file"
        )
    held = find_name(name, store)
    return held, held.resolve(which)


def find_name(name: str, store: str | os.PathLike[str] | None = None) -> Held:
    """A name in the first store that holds it."""
    searched = stores(store)
    for folder in searched:
        if versions(folder, name):
            held = hold(folder, name)
            if held.versions:
                return held
    places = ", ".join(str(folder.absolute()) for folder in searched)
    known = [other for folder in searched for other in names(folder)]
    meant = difflib.get_close_matches(name, known, 1)
    remedy = f"did you mean {meant[0]!r}?" if meant else "`calibrate fit` makes one"
    raise CoefficientsError(f"no fit is named {name!r} in {places}; {remedy}")


def hold(store: Path, name: str) -> Held:
    """A name as one store has it, with its history."""
    return Held(store / name, versions(store, name), read_history(store / name))


def versions(store: Path, name: str) -> list[int]:
    """The versions of a name in one store, lowest first."""
    try:
        found = [_VERSION_FILE.fullmatch(entry) for entry in os.listdir(store / name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the path
        raise CoefficientsError(f"cannot read {store / name}: {failure}") from failure
    return sorted(int(match[1]) for match in found if match)


def names(store: Path) -> list[str]:
    """The names that one store holds, also those that only their log remembers."""
    try:
        found = os.listdir(store)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as failure:
        raise CoefficientsError(f"cannot read {store}: {failure}") from failure
    return sorted(name for name in found if NAME_PATTERN.fullmatch(name) and _holds(store, name))


def _holds(store: Path, name: str) -> bool:
    try:
        return bool(versions(store, name)) or os.path.lexists(store / name / LOG)
    except CoefficientsError:
        return True  # whoever looks at it will say what is wrong


def check_name(name: str) -> None:
    """Raises CoefficientsError unless a store can hold a fit of that name."""
    if not NAME_PATTERN.fullmatch(name) or name.endswith(".json"):
        raise CoefficientsError(
            f"{name!r} is no name for a fit; {NAME_REMEDY}, and no .json at the end"
        )


def publish(
    coefficients: Coefficients,
    store: Path,
    unchanged: Callable[[Coefficients, Coefficients], bool] = lambda newest, new: False,
) -> tuple[Coefficients, bool]:
    """Writes a fit as the next version of its name.

    The log takes note of the version before the file appears, so that no crash can make a number
    be given out twice; a crash in between leaves a number without a file.

    Args:
      unchanged: (newest, new) -> whether the new fit says nothing that the newest does not.
    Returns:
      (the fit with its version and path, whether a file was written); the newest version as it
      stands if it is `unchanged`.
    Raises:
      CoefficientsError: a name that the store cannot hold, a fit that could not be loaded again,
        or a disk that cannot be written.
    """
    check_name(coefficients.name)
    while True:
        try:
            with locked(store, CoefficientsError) as alone:
                return _publish(coefficients, store, unchanged, alone)
        except FileExistsError:
            continue  # without locks, another writer took the number


def _publish(
    coefficients: Coefficients,
    store: Path,
    unchanged: Callable[[Coefficients, Coefficients], bool],
    alone: bool,
) -> tuple[Coefficients, bool]:
    held = hold(store, coefficients.name)
    newest = _newest(held)
    if newest and unchanged(newest, coefficients):
        return newest, False
    _refuse_link(held.folder)
    number = max([0, *held.versions, *held.history.mentioned]) + 1
    path = held.path(number)
    numbered = replace(coefficients, version=number, path=path)
    data = dumps(numbered).encode()
    numbered = loads(data, path)  # what cannot be loaded is not published
    if alone:
        remove_leftovers(held.folder, "*.json*")
    append_event(held.folder, "publish", number, id=digest(numbered))
    write_whole(path, data, CoefficientsError, exclusive=True)
    return numbered, True


def _refuse_link(folder: Path) -> None:
    """Nothing is written outside the store."""
    if folder.is_symlink():
        raise CoefficientsError(f"{folder} is a link; write into the store that it leads to")


def _newest(held: Held) -> Coefficients | None:
    """The highest version present; one that is damaged does not stand in the way of the next."""
    if not held.versions:
        return None
    try:
        return held.read(held.versions[-1])
    except CoefficientsError as failure:
        warnings.warn(f"{failure}; the new fit becomes the next version", stacklevel=4)
        return None


def alias(reference: str, name: str, store: str | os.PathLike[str] | None = None) -> Held:
    """Makes NAME@alias lead to the version that "name@version" names, and logs it.

    Args:
      store: the store to change; else the first of $CALIBRATE_FITS and ./fits that has the name.
    Raises:
      CoefficientsError: no alias, no such version, a yanked or damaged one, or a store that cannot
        be written.
    """
    if not ALIAS_PATTERN.fullmatch(name):
        raise CoefficientsError(
            f"{name!r} is no alias; {NAME_REMEDY.replace('letter or digit', 'letter')}"
        )
    held, version = _pinned(reference, store)
    if version in held.history.yanked:
        raise CoefficientsError(
            f"{reference} was yanked; choose another version, or take it back by "
            f"`calibrate fits yank {reference} --undo`"
        )
    held.read(version)
    if held.history.aliases.get(name) == version:
        return held
    return _log(held, "alias", version, alias=name)


def yank(reference: str, store: str | os.PathLike[str] | None = None, undo: bool = False) -> Held:
    """Takes "name@version" out of what a bare name stands for, or puts it back, and logs it.

    Args:
      store: the store to change; else the first of $CALIBRATE_FITS and ./fits that has the name.
    Raises:
      CoefficientsError: no such version, or a store that cannot be written.
    """
    held, version = _pinned(reference, store)
    if (version in held.history.yanked) != undo:
        return held
    return _log(held, "unyank" if undo else "yank", version)


def _pinned(reference: str, store: str | os.PathLike[str] | None) -> tuple[Held, int]:
    name, _, version = reference.partition("@")
    if not NAME_PATTERN.fullmatch(name) or not _VERSION.fullmatch(version):
        raise CoefficientsError(
            f"{reference!r} names no version by its number; use NAME@VERSION, such as {name}@1"
        )
    held, number = find(reference, store)
    if store and held.folder.parent != Path(store):
        raise CoefficientsError(
            f"{name!r} is not in {store} but in {held.folder.parent}; give that as the store"
        )
    if held.folder.parent not in stores(store)[:-1]:
        raise CoefficientsError(
            f"{reference} came with the package, in {held.folder.parent}, which stays as it is; "
            "copy its folder into a store of yours, or give that store"
        )
    return held, number


def _log(held: Held, event: str, version: int, **fields: str) -> Held:
    _refuse_link(held.folder)
    with locked(held.folder.parent, CoefficientsError):
        append_event(held.folder, event, version, **fields)
    return hold(held.folder.parent, held.folder.name)
