"""Results of `calibrate report` and `calibrate run`: the verdict, the page, scores and the fit."""

from pathlib import Path

from calibrate.report.blocks import Block, Facts, Result, Text, as_detail
from calibrate.report.fit_record import FitRecord
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.usage import usage


def report_result(scores: ScoresRecord, path: Path | None) -> Result:
    """The verdict, with rivals as a detail, and the path of the page; None if not written."""
    short, verdict = (" ".join(scores.verdicts(r).values()) for r in (False, True))
    rivals = [Text(verdict.removeprefix(short).strip(), detail=True)] if verdict != short else []
    shown: list[Block] = [Text(f"\n{short}"), *rivals]
    shown.append(Facts([("report", str(path or "not written"))]))
    return Result(shown, {"verdict": verdict, "report": path})


def run_result(fit: FitRecord, scores: ScoresRecord, report: Result) -> Result:
    """Scores of a fit on what it was not made of, the verdict, and the lines that load the fit."""
    shown: list[Block] = [
        *as_detail(fit.evidence()),
        Facts([("scored", scores.scored_items())], detail=True),
        *scores.tables(),
        *report.shown,
        usage(fit.coefficients),
    ]
    return Result(shown, fit.as_json() | report.found | {"scores": scores.as_json()})
