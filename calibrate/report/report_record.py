"""A written report as a result to show: its verdict, and where the page is."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.report.blocks import Block, Facts, Text


@dataclass(frozen=True)
class ReportRecord:
    """The result of `calibrate report`."""

    verdict: str
    path: Path | None  # None: it could not be written
    rivals: str | None = None  # how the fit compares with simpler rules, if they were scored

    def as_json(self) -> dict[str, Any]:
        """The sentences and the path."""
        rivals = {} if self.rivals is None else {"rivals": self.rivals}
        return {"verdict": self.verdict, **rivals, "report": self.path}

    def blocks(self) -> Iterable[Block]:
        """The sentences and the path."""
        yield Text(f"\n{self.verdict}")
        if self.rivals:
            yield Text(self.rivals)
        yield Facts([("report", str(self.path or "not written"))])
