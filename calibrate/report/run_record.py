"""Results of `calibrate run` and `calibrate report`: verdict, scores by n, and the rule."""

from pathlib import Path
from typing import Any

from calibrate.report.blocks import Block, Facts, Result, Table, Text
from calibrate.report.collection_record import theta_facts
from calibrate.report.comparison import rules_table
from calibrate.report.fit_record import FitRecord, load_line
from calibrate.report.rules import short_rule_facts, value_text
from calibrate.report.scores_record import ScoresRecord
from calibrate.store.fit import Fit


def run_result(record: FitRecord, scores: ScoresRecord | None, page: Path | None) -> Result:
    """The verdict of a fit, its scores by n, the rule, and the line that loads it.

    Args:
      record: of the saved fit.
      scores: of a head on new inputs; None shows the held-out scores of the fit itself.
      page: path of the report; None if it could not be written.
    """
    fit = record.fit
    shown: list[Block] = [Text(value_text(fit.verdict))]
    if scores is None:
        shown += [block for block in record.evidence() if isinstance(block, Table)]
    else:
        shown.append(rules_table(scores.evidence, fit, record.misranked))
    theta = [] if record.rows is None else theta_facts(record.rows)
    rule = [] if len(fit.entries) > 1 else short_rule_facts(fit)
    places = [("load", f"fit = {load_line(fit)}"), report_fact(page)]
    shown.append(Facts([*theta, *record.head_facts(), *rule, *places]))
    data: dict[str, Any] = {"verdict": fit.verdict, "report": page}
    if scores is not None:
        data["scores"] = scores.as_json()
    return Result(shown, record.as_json() | data)


def report_result(fit: Fit, scores: ScoresRecord | None, page: Path) -> Result:
    """The verdicts of a fit, in its file and on its new scores, and the path of the page."""
    texts = [] if scores is None else [" ".join(x) for x in scores.verdict_sentences().values()]
    shown: list[Block] = [Text(value_text(text)) for text in filter(None, [fit.verdict, *texts])]
    shown.append(Facts([report_fact(page)]))
    return Result(shown, {"verdict": fit.verdict, "scores": texts, "report": page})


def report_fact(page: Path | None) -> tuple[str, str]:
    """The path of the report."""
    return "report", str(page or "not written")
