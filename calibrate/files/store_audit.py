"""Audit of a store: damaged or replaced files, wrong names, and aliases that do not load."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.errors import CoefficientsError
from calibrate.files.coefficient_file import read
from calibrate.files.event_log import LOG
from calibrate.files.store import StoredName, find, find_name, is_path, names, open_name


@dataclass(frozen=True)
class AuditResult:
    """The result for one file, log or alias."""

    path: Path
    subject: str | None  # the reference, where it is one
    error: str | None  # None if it is valid
    note: str | None = None  # an alias that does not load, which needs no damage to come about


def audit_reference(reference: str, store: Path | None = None) -> list[AuditResult]:
    """Audits a file, a version, or every version of a name.

    Raises:
      CoefficientsError: nothing has that reference.
    """
    if is_path(reference):
        return [_audit(Path(reference), None, lambda: read(Path(reference)))]
    if "@" in reference:
        stored, version = find(reference, store)
        return [_audit_version(stored, version)]
    return _audit_name(find_name(reference, store).folder)


def audit_store(store: Path) -> list[AuditResult]:
    """Audits every name of a store: its log, its versions and its aliases."""
    return [result for name in names(store) for result in _audit_name(store / name)]


def _audit_name(folder: Path) -> list[AuditResult]:
    try:
        stored = open_name(folder.parent, folder.name)
    except CoefficientsError as failure:
        return [AuditResult(folder / LOG, None, str(failure))]
    results = [_audit_version(stored, version) for version in stored.versions]
    for alias in sorted(stored.history.aliases):
        subject = f"{stored.name}@{alias}"
        note = _audit(folder / LOG, subject, lambda: stored.resolve(alias)).error  # noqa: B023
        results.append(AuditResult(folder / LOG, subject, None, note))
    return results


def _audit_version(stored: StoredName, version: int) -> AuditResult:
    subject = f"{stored.name}@{version}"
    return _audit(stored.path(version), subject, lambda: stored.read(version))


def _audit(path: Path, subject: str | None, check: Callable[[], Any]) -> AuditResult:
    try:
        check()
    except CoefficientsError as failure:
        return AuditResult(path, subject, str(failure))
    return AuditResult(path, subject, None)
