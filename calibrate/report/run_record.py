"""Results of `calibrate report` and `calibrate run`: the verdict, the page, scores and the fit."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.report.blocks import Block, Facts, Text, as_detail
from calibrate.report.fit_record import FitRecord
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.usage import usage


@dataclass(frozen=True)
class ReportRecord:
    """The result of `calibrate report`."""

    verdict: str
    path: Path | None  # None: it could not be written

    def as_json(self) -> dict[str, Any]:
        """The verdict and the path."""
        return {"verdict": self.verdict, "report": self.path}

    def blocks(self) -> Iterable[Block]:
        """The verdict and the path."""
        yield Text(f"\n{self.verdict}")
        yield Facts([("report", str(self.path or "not written"))])


@dataclass(frozen=True)
class RunRecord:
    """The result of `calibrate run`: a fit, and its scores on what it was not made of."""

    fit: FitRecord
    scores: ScoresRecord
    report: ReportRecord

    def as_json(self) -> dict[str, Any]:
        """The fit, the verdict and the path of the report, and the scores."""
        return self.fit.as_json() | self.report.as_json() | {"scores": self.scores.as_json()}

    def blocks(self) -> Iterable[Block]:
        """The scores, the verdict, and the lines that load the fit; the fit itself is a detail."""
        yield from as_detail(self.fit.evidence())
        yield Facts([("scored", self.scores.scored_items())], detail=True)
        yield from self.scores.tables()
        yield from self.report.blocks()
        yield usage(self.fit.coefficients)
