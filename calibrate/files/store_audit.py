"""Audit: is everything in a store whole, in its place, and what was published?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from calibrate.errors import CoefficientsError
from calibrate.files.coefficient_file import read
from calibrate.files.event_log import LOG
from calibrate.files.store import Held, find, find_name, hold, is_path, names


class Verdict(NamedTuple):
    """What the audit of one file, log or alias came to."""

    path: Path
    subject: str | None  # the reference, where it is one
    error: str | None  # None if all is well
    note: str | None = None  # an alias that does not load, which commands alone can bring about


def audit_reference(reference: str, store: Path | None = None) -> list[Verdict]:
    """Audits a file, a version, or every version of a name.

    Raises:
      CoefficientsError: nothing has that reference.
    """
    if is_path(reference):
        return [_judge(Path(reference), None, lambda: read(Path(reference)))]
    if "@" in reference:
        held, version = find(reference, store)
        return [_judge_version(held, version)]
    return _audit_name(find_name(reference, store).folder)


def audit_store(store: Path) -> list[Verdict]:
    """Audits every name of a store: its log, its versions, and where its aliases lead."""
    return [verdict for name in names(store) for verdict in _audit_name(store / name)]


def _audit_name(folder: Path) -> list[Verdict]:
    try:
        held = hold(folder.parent, folder.name)
    except CoefficientsError as failure:
        return [Verdict(folder / LOG, None, str(failure))]
    verdicts = [_judge_version(held, version) for version in held.versions]
    for alias in sorted(held.history.aliases):
        led = _judge(folder / LOG, f"{held.name}@{alias}", lambda which=alias: held.resolve(which))  # type: ignore[misc]
        verdicts.append(led._replace(error=None, note=led.error))
    return verdicts


def _judge_version(held: Held, version: int) -> Verdict:
    subject = f"{held.name}@{version}"
    return _judge(held.path(version), subject, lambda: held.read(version))


def _judge(path: Path, subject: str | None, check: Callable[[], Any]) -> Verdict:
    try:
        check()
    except CoefficientsError as failure:
        return Verdict(path, subject, str(failure))
    return Verdict(path, subject, None)
