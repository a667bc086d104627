"""The event log of a fit's name: versions published, aliases, versions yanked.

`NAME/log.jsonl` holds one event a line, oldest first. It is rewritten atomically, by one writer at
a time, and checked as strictly as the coefficient files. A name needs no log.
"""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from calibrate.errors import CoefficientsError
from calibrate.files.atomic_io import read_file, write_atomically
from calibrate.files.coefficient_schema import DIGEST, TIME, VERSION
from calibrate.files.json_shapes import Object, Pattern, Word, read_field
from calibrate.files.strict_json import parse

LOG = "log.jsonl"
MAX_BYTES = 1 << 20
ALIAS_PATTERN = re.compile(r"[a-z][a-z0-9._-]{0,63}(?<!\.json)")

_EVENTS = {
    event: Object({"event": Word((event,)), "at": TIME, "version": VERSION, **fields}, True)
    for event, fields in {
        "publish": {"id": DIGEST},
        "alias": {"alias": Pattern(ALIAS_PATTERN, "give an alias")},
        "yank": {},
        "unyank": {},
    }.items()
}
_EVENT = Word(tuple(_EVENTS))


class History(NamedTuple):
    """The state of one name after the events of its log."""

    # Version -> ids that it was published with: one, unless two writers met without locks.
    ids: dict[int, set[str]]
    aliases: dict[str, int]
    yanked: set[int]
    mentioned: set[int]  # every version in any event; none is published again


def read_history(folder: Path) -> History:
    """The history of the name that has this folder; an empty one if it has no log.

    Raises:
      CoefficientsError: the log cannot be read or is damaged.
    """
    history = History({}, {}, set(), set())
    path = folder / LOG
    for number, line in enumerate(_lines(path), start=1):
        try:
            event = parse(line)
            event = _EVENTS[read_field(event, "event", _EVENT)](event)
        except CoefficientsError as refusal:
            raise CoefficientsError(
                f"{path}, line {number}: {refusal}; "
                "or remove the log, and with it aliases and yanks"
            ) from None
        _apply(history, event)
    return history


def _lines(path: Path) -> list[bytes]:
    try:
        data = read_file(path, MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise CoefficientsError(f"cannot read {path}: {reason}; check the path") from failure
    if len(data) > MAX_BYTES:
        raise CoefficientsError(f"{path} is longer than 1 MiB, the limit of a log; restore it")
    return data.splitlines()


def _apply(history: History, event: dict[str, Any]) -> None:
    version = event["version"]
    history.mentioned.add(version)
    if event["event"] == "publish":
        history.ids.setdefault(version, set()).add(event["id"])
    elif event["event"] == "alias":
        history.aliases[event["alias"]] = version
    elif event["event"] == "yank":
        history.yanked.add(version)
    else:
        history.yanked.discard(version)


def append_event(folder: Path, event: str, version: int, **fields: str) -> None:
    """Appends an event to the log; the caller has locked the store.

    Raises:
      CoefficientsError: it cannot be written, or is full; it is then unchanged.
    """
    at = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps({"at": at, "event": event, "version": version, **fields})
    path = folder / LOG
    data = b"\n".join([*_lines(path), line.encode()]) + b"\n"
    if len(data) > MAX_BYTES:
        raise CoefficientsError(f"{path} is full, at 1 MiB; publish under another name")
    write_atomically(path, data, CoefficientsError)
