"""Audits of a collection, and of stores of fits, in words, and as a record for --json."""

from collections import Counter
from typing import Any

from calibrate.files.collection_audit import FOREIGN, Audit
from calibrate.files.store_audit import AuditResult
from calibrate.report.console import stdout


def audit_record(audit: Audit) -> dict[str, Any]:
    """What `print_audit` says, for a machine."""
    return {
        "folder": str(audit.folder),
        "status": audit.status,
        "sound": audit.sound,
        "faults": [fault._asdict() | {"path": str(fault.path)} for fault in audit.faults],
    }


def print_audit(audit: Audit) -> None:
    """A line per fault, and how many shards are well."""
    for fault in audit.faults:
        stdout.print(f"{fault.kind:<8} {fault.error}")
    unfinished = "" if audit.status == "complete" else ", which is unfinished"
    stdout.print(f"{audit.sound:,} sound shards in {audit.folder}{unfinished}")


def remedy(audit: Audit) -> str:
    """In one line, what is wrong and what to do."""
    kinds = Counter(fault.kind for fault in audit.faults)
    counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    what = f"{audit.folder} has {counts}; see above for each"
    if set(kinds) == {FOREIGN}:
        return what
    return f"{what}; the same `calibrate collect` command as before repairs shards"


def verdict_records(verdicts: list[AuditResult]) -> list[dict[str, Any]]:
    """What `print_verdicts` says, for a machine."""
    return [
        {
            "path": str(verdict.path),
            "subject": verdict.subject,
            "ok": verdict.error is None,
            "error": verdict.error,
            "note": verdict.note,
        }
        for verdict in verdicts
    ]


def print_verdicts(verdicts: list[AuditResult]) -> None:
    """A line per file, log and alias."""
    for verdict in verdicts:
        what = f"{verdict.subject}  " if verdict.subject else ""
        if verdict.error:
            stdout.print(f"FAILED  {what}{verdict.error}")
        elif verdict.note:
            stdout.print(f"note    {verdict.note}")
        else:
            stdout.print(f"ok      {what}{verdict.path}")
