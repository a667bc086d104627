"""The audit of a collection in words, and as a record for --json."""

from collections import Counter
from typing import Any

from calibrate.faces.console import stdout
from calibrate.files.collection_audit import FOREIGN, Audit


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
