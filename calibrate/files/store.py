"""The fits store: its names and versions, and loading a fit by a reference.

A store is a folder of NAME/VERSION.json. NAME/state.json, which a name can do without, holds the
highest version ever used, the ids of published versions, aliases, and yanked versions. Reading
looks through the stores in order: the one given, $CALIBRATE_FITS, ./fits, and the fits published
with the package; the first that has the name is used. `publishing.py` writes.
"""

import difflib
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from calibrate.errors import CoefficientsError
from calibrate.files.atomic_io import read_file
from calibrate.files.coefficient_file import digest, read
from calibrate.files.coefficient_schema import DIGEST, NAME_PATTERN, VERSION
from calibrate.files.coefficients import Coefficients
from calibrate.files.json_shapes import Integer, List, Map, Object, Pattern, Word, read_field
from calibrate.files.strict_json import parse

STATE, LOG = "state.json", "log.jsonl"  # the log is of stores from before the state
MAX_STATE_BYTES = 1 << 26
VERSION_PATTERN = re.compile(r"[1-9][0-9]{0,8}")
ALIAS_PATTERN = re.compile(r"[a-z][a-z0-9._-]{0,63}(?<!\.json)")
_VERSION_FILE = re.compile(rf"({VERSION_PATTERN.pattern})\.json")

_VERSION_KEY, _ALIAS = (
    Pattern(VERSION_PATTERN, "give a version"),
    Pattern(ALIAS_PATTERN, "give an alias"),
)
_STATE = Object(
    {
        "highest": Integer(0, VERSION.highest),
        "published": Map(DIGEST, _VERSION_KEY),
        "aliases": Map(VERSION, _ALIAS),
        "yanked": List(VERSION),
    },
    required=True,
)
_EVENT = Word(("publish", "alias", "yank", "unyank"))


class State(NamedTuple):
    """What a store knows of a name beside its files."""

    highest: int  # version ever used; the next one is higher, whatever was deleted
    published: dict[int, str]  # id of each version, as far as it is known
    aliases: dict[str, int]
    yanked: set[int]


def read_state(folder: Path) -> State:
    """The state of the name that has this folder; that of an old log if there is no state.

    Raises:
      CoefficientsError: the state or the log cannot be read or is damaged.
    """
    path = folder / STATE
    data = _bytes_of(path)
    if data is None:
        return _state_of_log(folder / LOG)
    try:
        found = _STATE(parse(data))
    except CoefficientsError as refusal:
        remedy = "or remove it, and with it aliases and yanks"
        raise CoefficientsError(f"{path}: {refusal}; {remedy}") from None
    published = {int(version): id_ for version, id_ in found["published"].items()}
    return State(found["highest"], published, found["aliases"], set(found["yanked"]))


def _bytes_of(path: Path) -> bytes | None:
    try:
        data = read_file(path, MAX_STATE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise CoefficientsError(f"cannot read {path}: {reason}; check the path") from failure
    if len(data) > MAX_STATE_BYTES:
        raise CoefficientsError(f"{path} is longer than {MAX_STATE_BYTES >> 20} MiB; restore it")
    return data


def _state_of_log(path: Path) -> State:
    """The state after the events of a log, one a line, oldest first."""
    highest, ids, aliases, yanked = 0, dict[int, set[str]](), dict[str, int](), set[int]()
    for number, line in enumerate((_bytes_of(path) or b"").splitlines(), start=1):
        try:
            event = parse(line)
            kind = read_field(event, "event", _EVENT)
            version = read_field(event, "version", VERSION)
            highest = max(highest, version)
            if kind == "publish":
                ids.setdefault(version, set()).add(read_field(event, "id", DIGEST))
            elif kind == "alias":
                aliases[read_field(event, "alias", _ALIAS)] = version
            else:
                (yanked.add if kind == "yank" else yanked.discard)(version)
        except CoefficientsError as refusal:
            remedy = "or remove the log, and with it aliases and yanks"
            raise CoefficientsError(f"{path}, line {number}: {refusal}; {remedy}") from None
    # Without locks two writers could log one version with two ids.
    published = {version: id_ for version, (id_, *more) in ids.items() if not more}
    return State(highest, published, aliases, yanked)


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
            state = "was published, but its file is gone" if version in self.state.published else (
                "does not exist"
            )  # fmt: skip
            raise CoefficientsError(
                f"'{self.name}@{which}' {state} in {self.folder.absolute()}; "
                f"there is {'..., ' if len(self.versions) > 8 else ''}{present}"
            )
        return version

    def _follow(self, alias: str) -> int:
        version = self.state.aliases.get(alias)
        if version is None:
            known = ", ".join(sorted(self.state.aliases)[:8]) or "none"
            raise CoefficientsError(
                f"{self.name!r} in {self.folder.absolute()} has no alias {alias!r} (it has "
                f"{known}); `calibrate fits alias {self.name}@VERSION {alias}` makes it"
            )
        if version in self.state.yanked:
            raise CoefficientsError(
                f"{self.name}@{alias} leads to {self.name}@{version}, which was yanked; "
                "move the alias, or load the version by its number"
            )
        return version

    def read(self, version: int) -> Coefficients:
        """Reads a version, which must be the one published under that number."""
        coefficients = read(self.path(version))
        if (coefficients.name, coefficients.version) != (self.name, version):
            raise CoefficientsError(
                f"{coefficients.path} is {coefficients.reference}; its path must have that "
                "name and version: restore the file, or load it by its path"
            )
        published = self.state.published.get(version)
        if published and digest(coefficients) != published:
            raise CoefficientsError(
                f"{coefficients.path}: id is not {published}, with which it was published; "
                "versions never change: restore it, and publish yours as another"
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
      CoefficientsError: `store` is given and is not a folder; the others need not exist yet.
    """
    if store and not os.path.isdir(store):
        raise CoefficientsError(f"{store} is not a folder; give a folder of fits")
    chosen = [("--store", store), ("$CALIBRATE_FITS", os.environ.get("CALIBRATE_FITS"))]
    folders = [(origin, Path(folder)) for origin, folder in chosen if folder]
    return [*folders, ("./fits", Path("fits")), ("package", published_store())]


def stores(store: str | os.PathLike[str] | None = None) -> list[Path]:
    """The folders that a reference is looked up in, first to last."""
    return [folder for _, folder in origins(store)]


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
        stored, version = find(str(reference), store)
        coefficients = stored.read(version)
        if version in stored.state.yanked:
            warnings.warn(
                f"{coefficients.reference} was yanked; load {coefficients.name!r} for the newest "
                "version that was not",
                stacklevel=2,
            )
    if fingerprint is not None and coefficients.fingerprint != fingerprint:
        raise CoefficientsError(_for_another_head(coefficients, fingerprint))
    return coefficients


def _for_another_head(coefficients: Coefficients, fingerprint: str) -> str:
    own = coefficients.fingerprint
    made_for = f"made for head {coefficients.source.get('head', 'without a name')!r} ({own})"
    return (
        f"{coefficients.reference} is {made_for if own else 'made for no head in particular'}, "
        f"not for {fingerprint}; calibrate this head, or leave `fingerprint` out if you mean it"
    )


def is_path(reference: str | os.PathLike[str]) -> bool:
    """Whether a reference is the path of a file, not a name."""
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
    known = [other for folder in searched for other in names(folder)]
    similar = difflib.get_close_matches(name, known, 1)
    remedy = f"did you mean {similar[0]!r}?" if similar else "`calibrate fit` makes one"
    raise CoefficientsError(f"no fit is named {name!r} in {places}; {remedy}")


def open_name(store: Path, name: str) -> StoredName:
    """A name as one store has it."""
    return StoredName(store / name, versions(store, name), read_state(store / name))


def versions(store: Path, name: str) -> list[int]:
    """The versions of a name in one store, lowest first."""
    matches = map(_VERSION_FILE.fullmatch, _entries(store / name))
    return sorted(int(match[1]) for match in matches if match)


def names(store: Path) -> list[str]:
    """The names in one store, also those of which only the state is left."""
    entries = filter(NAME_PATTERN.fullmatch, _entries(store))
    return sorted(name for name in entries if _is_name(store, name))


def _entries(folder: Path) -> list[str]:
    """The names in a folder; empty if it is absent."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the path
        raise CoefficientsError(f"cannot read {folder}: {failure}") from failure


def _is_name(store: Path, name: str) -> bool:
    try:
        beside = any(os.path.lexists(store / name / file) for file in (STATE, LOG))
        return beside or bool(versions(store, name))
    except CoefficientsError:
        return True  # reading it raises the same error


class AuditResult(NamedTuple):
    """Whether one file, state or alias is sound."""

    path: Path
    subject: str | None  # the reference, where it is one
    error: str | None  # None if it is sound
    note: str | None = None  # an alias that does not load, which needs no damage to come about


def audit_reference(reference: str, store: Path | None = None) -> list[AuditResult]:
    """Audits a file, a version, or every version of a name.

    Raises:
      CoefficientsError: nothing has that reference.
    """
    if is_path(reference):
        return [AuditResult(Path(reference), None, _error(lambda: read(Path(reference))))]
    if "@" in reference:
        return [_audit_version(*find(reference, store))]
    return _audit_name(find_name(reference, store).folder)


def audit_store(store: Path) -> list[AuditResult]:
    """Audits every name of a store: its state, its versions and its aliases."""
    return [result for name in names(store) for result in _audit_name(store / name)]


def _audit_name(folder: Path) -> list[AuditResult]:
    path = next((p for p in (folder / STATE, folder / LOG) if p.exists()), folder / STATE)
    if error := _error(lambda: open_name(folder.parent, folder.name)):
        return [AuditResult(path, None, error)]
    stored = open_name(folder.parent, folder.name)
    results = [_audit_version(stored, version) for version in stored.versions]
    for alias in sorted(stored.state.aliases):
        note = _error(lambda: stored.resolve(alias))  # noqa: B023
        results.append(AuditResult(path, f"{stored.name}@{alias}", None, note))
    return results


def _audit_version(stored: StoredName, version: int) -> AuditResult:
    error = _error(lambda: stored.read(version))
    return AuditResult(stored.path(version), f"{stored.name}@{version}", error)


def _error(check: Callable[[], Any]) -> str | None:
    try:
        check()
    except CoefficientsError as failure:
        return str(failure)
    return None
