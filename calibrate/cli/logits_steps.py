"""Scoring logits on disk as commands take it: with progress on stderr."""

from collections.abc import Mapping
from pathlib import Path

from calibrate.cli.progress import Steps
from calibrate.collecting.work_units import Unit, plan_units
from calibrate.evaluation.score_logits import LogitScores, score_logits
from calibrate.files.atomic_io import check_writable
from calibrate.files.coefficients import Coefficients
from calibrate.heads.logits_files import Arrays
from calibrate.report.console import stderr
from calibrate.report.logits_page import write_logits_page
from calibrate.report.logits_record import FIRST_FIT
from calibrate.report.verdict import verdict_on_logits


def score(path: Path, fits: Mapping[str, Coefficients]) -> LogitScores:
    """Scores fits on the rows of a file or folder, with a line per set size."""
    stderr.print(f"reading {path}")
    arrays = Arrays(path)
    units = sum(len(plan_units(size, arrays.count(size))) for size in arrays.sizes)
    with Steps("scoring", units) as steps:

        def report(unit: Unit) -> None:
            count = arrays.count(unit.size)
            done = unit.first + unit.sets == count
            line = f"  n = {unit.size:>6,}  {count:,} rows"
            steps.advance(line if done else None)

        return score_logits(arrays, fits, report)


def report(path: Path, fit: Coefficients, logits: Path) -> dict[str, str]:
    """Scores a fit, and writes the page on it; returns its sentence, and its path."""
    check_writable(path)
    scores = score(logits, {fit.reference: fit})
    stderr.print(f"drawing the report {path}")
    write_logits_page(path, fit, scores)
    return {"verdict": verdict_on_logits(scores, FIRST_FIT), "report": str(path)}
