"""The fits store: its names and versions, and loading a fit by a reference.

A store is a folder of NAME/VERSION.json. NAME/state.json, which a name can do without, holds the
highest version ever used, aliases, and yanked versions. Reading looks through the stores in order:
the one given, $CALIBRATE_FITS, ./fits, and the fits published with the package; the first that has
the name is used. `publishing.py` writes.
"""

import difflib
import os
import re
import tomllib
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from calibrate.errors import CoefficientsError
from calibrate.storage.atomic_io import not_a
from calibrate.storage.json_shapes import TEXT, Integer, List, Map, Object, read_field
from calibrate.storage.strict_json import parse
from calibrate.store.coefficient_document import bytes_of
from calibrate.store.coefficient_file import ADAPTER_FIT, read
from calibrate.store.coefficient_schema import NAME_PATTERN, VERSION
from calibrate.store.coefficients import Coefficients

PROJECT = "calibrate-softmax"  # the name of this project in pyproject.toml
PUBLISHED = "published_fits"  # the folder inside an installed package
STATE = "state.json"
# Version 0.1 wrote it before there was a state. Unread, its yanked versions would load again.
LOG = "log.jsonl"
MAX_STATE_BYTES = 1 << 20
VERSION_PATTERN = re.compile(r"[1-9][0-9]{0,8}")
ALIAS_PATTERN = re.compile(r"[a-z][a-z0-9._-]{0,63}(?<!\.json)")
_ADDRESS = re.compile(r"hf:|[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_VERSION_FILE = re.compile(rf"({VERSION_PATTERN.pattern})\.json")

_STATE = Object(
    {"highest": Integer(0, VERSION.highest), "aliases": Map(VERSION), "yanked": List(VERSION)},
    required=True,
    others="",
)


class State(NamedTuple):
    """The state of a name in a store, beside its files."""

    highest: int  # version ever used; the next one is higher, whatever was deleted
    aliases: dict[str, int]
    yanked: set[int]


def read_state(folder: Path) -> State:
    """The state of the name that has this folder; that of an old log if there is no state.

    Raises:
      CoefficientsError: the state or the log cannot be read or is damaged.
    """
    path = folder / STATE if os.path.lexists(folder / STATE) else folder / LOG
    if not os.path.lexists(path):
        return State(0, {}, set())
    data = bytes_of(path, MAX_STATE_BYTES)
    try:
        if path.name == LOG:
            return _state_of_log(data)
        state = _STATE(parse(data))
    except CoefficientsError as refusal:
        remedy = "restore it, or remove it and with it aliases and yanks"
        raise CoefficientsError(f"{path}: {refusal}; {remedy}") from None
    return State(state["highest"], state["aliases"], set(state["yanked"]))


def _state_of_log(data: bytes) -> State:
    """The state after the events of a log, one a line, oldest first."""
    aliases, yanked, highest = dict[str, int](), set[int](), 0
    for event in map(parse, data.splitlines()):
        kind, version = read_field(event, "event", TEXT), read_field(event, "version", VERSION)
        highest = max(highest, version)
        if kind == "alias":
            aliases[read_field(event, "alias", TEXT)] = version
        elif kind == "yank":
            yanked.add(version)
        elif kind == "unyank":
            yanked.discard(version)
    return State(highest, aliases, yanked)


class StoredName(NamedTuple):
    """A name in a store: its versions and its state."""

    folder: Path  # STORE/NAME
    versions: list[int]  # those present, lowest first
    state: State

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def default(self) -> int | None:
        """The version that the bare name stands for: the highest not yanked."""
        usable = [number for number in self.versions if number not in self.state.yanked]
        return usable[-1] if usable else None

    def path(self, version: int) -> Path:
        """The path of a version."""
        return self.folder / f"{version}.json"

    def resolve(self, which: str) -> int:
        """The version that "3", an alias, or "" for the bare name stands for; it is present."""
        if VERSION_PATTERN.fullmatch(which):
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
            raise CoefficientsError(
                f"'{self.name}@{which}' does not exist in {self.folder.absolute()}; the newest "
                f"versions there: {present}"
            )
        return version

    def _follow(self, alias: str) -> int:
        version = self.state.aliases.get(alias)
        if version is None:
            known = ", ".join(sorted(self.state.aliases)[:8]) or "none"
            raise CoefficientsError(
                f"{self.name!r} in {self.folder.absolute()} has no alias {alias!r}; it has {known}"
            )
        if version in self.state.yanked:
            raise CoefficientsError(
                f"{self.name}@{alias} leads to {self.name}@{version}, which was yanked; "
                "move the alias, or load the version by its number"
            )
        return version

    def read(self, version: int) -> Coefficients:
        """Reads a version; its file must have that name and number."""
        coefficients = read(self.path(version))
        if (coefficients.name, coefficients.version) != (self.name, version):
            raise CoefficientsError(
                f"{coefficients.path} is {coefficients.reference}; its path must have that "
                "name and version: restore the file, or load it by its path"
            )
        return coefficients


def published_store() -> Path:
    """The package's own fits: inside the package in a wheel, beside it in the repository."""
    package = Path(__file__).resolve().parents[1]
    inside = package / PUBLISHED
    return inside if os.path.isdir(inside) else package.parent / "fits"


def shipped_files() -> list[Path]:
    """The coefficient files that come with the package, in `published_store()`.

    In a clone that folder may hold fits of a user too: there pyproject.toml lists those that go
    into the wheel. A copy of the package in another project has none that a wheel brings.
    """
    store = published_store()
    if store.name == PUBLISHED:
        return sorted(store.glob("*/*.json"))
    try:
        project = tomllib.loads((store.parent / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent, or neither UTF-8 nor TOML
        return []
    if _table(project, "project").get("name") != PROJECT:
        return []
    included = _table(project, "tool", "hatch", "build", "targets", "wheel", "force-include")
    return [store.parent / file for file in included]


def _table(document: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The table of a TOML document under these keys; empty if there is none."""
    for key in keys:
        found = document.get(key)
        document = found if isinstance(found, dict) else {}
    return document


def origins(store: str | os.PathLike[str] | None = None) -> list[tuple[str, Path]]:
    """The folders that a reference is looked up in, first to last, and how each was chosen.

    Raises:
      CoefficientsError: `store` is given and is not a folder; the others need not exist yet.
    """
    if store and not os.path.isdir(store):
        raise CoefficientsError(f"{not_a('folder', Path(store))}; give a folder of fits")
    chosen = [("store", store), ("$CALIBRATE_FITS", os.environ.get("CALIBRATE_FITS"))]
    folders = [(origin, Path(folder)) for origin, folder in chosen if folder]
    return [*folders, ("./fits", Path("fits")), ("package", published_store())]


def stores(store: str | os.PathLike[str] | None = None) -> list[Path]:
    """The folders that a reference is looked up in, first to last."""
    return [folder for _, folder in origins(store)]


def load(
    reference: str | os.PathLike[str],
    store: str | os.PathLike[str] | None = None,
    fingerprint: str | None = None,
    *,
    allow_unpinned: bool = False,
) -> Coefficients:
    """Loads a fit.

    Args:
      reference: "name" (its highest version that is not yanked), "name@3", "name@alias", or the
        path of a coefficient file or of an adapter's folder; or an address with the digest of the
        file's bytes: "https://HOST/FILE#sha256:HEX" or "hf:ORG/NAME@REVISION#sha256:HEX".
      store: a folder to look in first; then $CALIBRATE_FITS, ./fits and the package's own fits.
      fingerprint: of the head that the fit is meant for.
      allow_unpinned: load an address without a digest, whatever lies there now.
    Returns:
      Coefficients, whose `.path` is the file that was read, and `.address` the pinned address.
    Raises:
      CoefficientsError: nothing has that reference, the file is damaged, cannot be fetched or has
        another digest, or the fit is for another head than `fingerprint`. There is no fallback.
    Warns:
      UserWarning: a yanked version that was asked for by its number.
    """
    if isinstance(reference, str) and _ADDRESS.match(reference):
        from calibrate.store.addresses import load_address  # loads urllib

        coefficients = load_address(reference, allow_unpinned)
    elif is_path(reference):
        path = Path(reference)
        coefficients = read(path / ADAPTER_FIT if path.is_dir() else path)
    else:
        stored, version = find(str(reference), store)
        coefficients = stored.read(version)
        if version in stored.state.yanked:
            warnings.warn(
                f"{coefficients.reference} was yanked; load {coefficients.name!r} for the newest "
                "version that was not",
                stacklevel=2,
            )
    if fingerprint is not None and coefficients.fingerprint != fingerprint:
        head = coefficients.source.get("head", "none in particular")
        raise CoefficientsError(
            f"{coefficients.reference} was made for head {head!r} ({coefficients.fingerprint}), "
            f"not for {fingerprint}; calibrate this head, or leave `fingerprint` out if you mean it"
        )
    return coefficients


def is_path(reference: str | os.PathLike[str]) -> bool:
    """True if a reference is the path or address of a file, not a name."""
    if not isinstance(reference, str | os.PathLike):
        raise CoefficientsError(f"{reference!r} is not a valid reference; use a name or a path")
    return not isinstance(reference, str) or "/" in reference or reference.endswith(".json")


def find(reference: str, store: str | os.PathLike[str] | None = None) -> tuple[StoredName, int]:
    """The name and version that "name", "name@3" or "name@alias" stands for.

    Raises:
      CoefficientsError: no store has it, or the alias or bare name leads to a yanked version.
    """
    name, at, which = reference.partition("@")
    known = VERSION_PATTERN.fullmatch(which) or ALIAS_PATTERN.fullmatch(which)
    if not NAME_PATTERN.fullmatch(name) or (at and not known):
        raise CoefficientsError(
            f"{reference!r} is not a valid reference; use NAME, NAME@VERSION, NAME@ALIAS or "
            "a path to a .json file"
        )
    stored = find_name(name, store)
    return stored, stored.resolve(which)


def find_name(name: str, store: str | os.PathLike[str] | None = None) -> StoredName:
    """A name in the first store that has it."""
    searched = stores(store)
    for folder in searched:
        present = versions(folder, name)
        if present:
            return StoredName(folder / name, present, read_state(folder / name))
    places = ", ".join(str(folder.absolute()) for folder in searched)
    raise CoefficientsError(f"no fit is named {name!r} in {places}; {_instead_of(name, searched)}")


def _instead_of(name: str, searched: list[Path]) -> str:
    """The reference that may have been meant, where no store has a name."""
    if os.path.isfile(f"{name}.json"):
        return f"for the file write ./{name}.json"
    if os.path.isdir(name):
        return f"the folder is ./{name}"
    known = {known for folder in searched for known in names(folder)}
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {near[0]}?" if near else "`calibrate fit` makes one"


def open_name(store: Path, name: str) -> StoredName:
    """A name as one store has it."""
    return StoredName(store / name, versions(store, name), read_state(store / name))


def versions(store: Path, name: str) -> list[int]:
    """The versions of a name in one store, lowest first."""
    matches = map(_VERSION_FILE.fullmatch, _entries(store / name))
    return sorted(int(match[1]) for match in matches if match)


def names(store: Path) -> list[str]:
    """The names in one store, also those of which only the state is left."""
    return sorted(name for name in _entries(store) if _is_name(store, name))


def _entries(folder: Path) -> list[str]:
    """The names in a folder; empty if it is absent."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the path
        raise CoefficientsError(f"cannot read {folder}: {failure}") from failure


def _is_name(store: Path, name: str) -> bool:
    entries = _entries(store / name) if NAME_PATTERN.fullmatch(name) else []
    return any(entry in (STATE, LOG) or _VERSION_FILE.fullmatch(entry) for entry in entries)
