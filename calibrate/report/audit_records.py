"""Audits of a collection and of stores of fits, as results to show."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from calibrate.files.collection_audit import FOREIGN, Audit
from calibrate.files.store_audit import AuditResult
from calibrate.report.blocks import Block, Text


@dataclass(frozen=True)
class CollectionAuditRecord:
    """The result of `calibrate verify`."""

    audit: Audit

    def as_json(self) -> dict[str, Any]:
        """The audit, with its faults as objects."""
        return self.audit._asdict()

    def blocks(self) -> Iterable[Block]:
        """A line per fault, and the number of intact shards."""
        for fault in self.audit.faults:
            yield Text(f"{fault.kind:<8} {fault.error}")
        unfinished = "" if self.audit.status == "complete" else " (unfinished)"
        yield Text(f"{self.audit.sound:,} intact shards in {self.audit.folder}{unfinished}")

    def failure(self) -> str | None:
        """What is wrong and the remedy, in one line; None if there is no fault."""
        kinds = Counter(fault.kind for fault in self.audit.faults)
        if not kinds:
            return None
        counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        summary = f"{self.audit.folder} has {counts}; see above for each"
        if set(kinds) == {FOREIGN}:
            return summary
        return f"{summary}; run the same `calibrate collect` command again to repair shards"


@dataclass(frozen=True)
class StoreAuditRecord:
    """The result of `calibrate fits verify`."""

    results: list[AuditResult]

    def as_json(self) -> list[dict[str, Any]]:
        """An object per file, log and alias."""
        return [
            {
                "path": result.path,
                "subject": result.subject,
                "ok": result.error is None,
                "error": result.error,
                "note": result.note,
            }
            for result in self.results
        ]

    def blocks(self) -> Iterable[Block]:
        """A line per file, log and alias."""
        for result in self.results:
            subject = f"{result.subject}  " if result.subject else ""
            if result.error:
                yield Text(f"FAILED  {subject}{result.error}")
            elif result.note:
                yield Text(f"note    {result.note}")
            else:
                yield Text(f"ok      {subject}{result.path}")

    def failure(self) -> str | None:
        """How many failed, in one line; None if none did."""
        failed = sum(result.error is not None for result in self.results)
        if not failed:
            return None
        return f"{failed} of {len(self.results)} failed; see above for each"
