"""Audits of stores of fits, as results to show."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from calibrate.files.store import AuditResult
from calibrate.report.blocks import Block, Text


@dataclass(frozen=True)
class StoreAuditRecord:
    """The result of `calibrate fits verify`."""

    results: list[AuditResult]

    def as_json(self) -> list[dict[str, Any]]:
        """An object per file, state and alias."""
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
        """A line per file, state and alias."""
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
