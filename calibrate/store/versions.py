"""The versions of a name in a store: the newest, one by its alias, and those that were yanked."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from calibrate.errors import CoefficientsError
from calibrate.storage.json_shapes import TEXT, Integer, List, Map, Object, read_field
from calibrate.storage.strict_json import parse
from calibrate.store.coefficient_document import bytes_of
from calibrate.store.coefficient_file import read
from calibrate.store.coefficient_schema import VERSION
from calibrate.store.coefficients import Coefficients

STATE = "state.json"
# Version 0.1 wrote it before there was a state. Unread, its yanked versions would load again.
LOG = "log.jsonl"
MAX_STATE_BYTES = 1 << 20
VERSION_PATTERN = re.compile(r"[1-9][0-9]{0,8}")
ALIAS_PATTERN = re.compile(r"[a-z][a-z0-9._-]{0,63}(?<!\.json)")
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
    def newest(self) -> int | None:
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
        elif self.newest is None:
            raise CoefficientsError(
                f"every version of {self.name!r} in {self.folder} was yanked; pin one, such as "
                f"{self.name}@{self.versions[-1]}, or publish another"
            )
        else:
            return self.newest
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
