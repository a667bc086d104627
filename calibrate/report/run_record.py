"""Results of `calibrate run` and `calibrate report`: verdict, scores by n, and the rule."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calibrate.core.rule import CONSTANT
from calibrate.evidence.baselines import HARD, PAPER, is_infinite
from calibrate.evidence.calibration_error import expected_calibration_error, reliability_of
from calibrate.evidence.estimate import NOTHING
from calibrate.evidence.evidence import BASELINE, Evidence
from calibrate.evidence.metrics import LOG_P, RIGHT, Metric
from calibrate.report.blocks import Block, Facts, Result, Table, Text, as_detail
from calibrate.report.collection_record import theta_facts
from calibrate.report.fit_record import FitRecord, load_line
from calibrate.report.fit_tables import kinds_tables
from calibrate.report.labels import mean_text, metric_title
from calibrate.report.rules import short_rule_facts, value_text
from calibrate.report.scores_record import ScoresRecord
from calibrate.store.fit import Fit

COLUMN_WIDTH = 18  # letters of a line of a heading


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
        shown += as_detail([*scores.tables(), *kinds_tables(fit)])
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


def rules_table(items: Evidence, fit: Fit, misranked: Mapping[int, str]) -> Table:
    """The baseline, the published polynomial, a fit, the best constant and argmax, by n.

    Args:
      items: scores on new inputs. The table shows accuracy, or NLL if the head has none.
      fit: one of the rules, by its reference.
      misranked: numbers of misranked collected inputs, by size.
    """
    names = {
        BASELINE: "baseline",
        PAPER: "published polynomial",
        fit.reference: f"this fit: {fit.rule.kind}",
        CONSTANT: "constant (maximum likelihood)",
        HARD: "argmax",
    }
    rules = [rule for rule in names if rule in items.rules]
    metric = RIGHT if RIGHT in items.values else LOG_P
    by_size = items.by("size")
    rows = [
        [f"{n:,}", misranked.get(n, ""), *_means(part, rules, metric)]
        for n, part in by_size.items()
    ]
    if len(by_size) > 1:
        rows.append(["all", "", *_means(items, rules, metric)])
    if metric != LOG_P:
        rows.append(["NLL, nats", "", *_means(items, rules, LOG_P)])
    rows.append(["ECE, %", "", *_calibration_errors(items, rules)])
    headings = ["\n".join(textwrap.wrap(names[rule], width=COLUMN_WIDTH)) for rule in rules]
    title = f"{metric_title(metric, items.of.items)}, of {items.n:,} new inputs"
    marked = range(len(by_size), len(rows))
    return Table(["n", "misranked", *headings], rows, title, _run_note(rules), marked=marked)


def _run_note(rules: Sequence[str]) -> str:
    note = (
        "Misranked: collected inputs in which another item has a higher logit than the target. "
        "ECE: expected calibration error, the mean distance between the top item's probability and "
        "the share of inputs whose top item is the target."
    )
    if HARD in rules:
        note += " Argmax puts all weight on one item, and so has no finite NLL."
    return note


def _means(items: Evidence, rules: Sequence[str], metric: Metric) -> list[str]:
    return [
        NOTHING if is_infinite(rule, metric) else mean_text(items.mean(rule, metric).mean, metric)
        for rule in rules
    ]


def _calibration_errors(items: Evidence, rules: Sequence[str]) -> list[str]:
    errors = (expected_calibration_error(reliability_of(items, rule)) for rule in rules)
    return [f"{100 * error:.1f}" for error in errors]
