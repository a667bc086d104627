"""The results of `calibrate run` and `report`: the verdict of a fit, scores by n, and the rule."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.core.rule import CONSTANT, constant_text
from calibrate.datasets.row_collection import RowCollection
from calibrate.evidence.baselines import HARD, PAPER, is_infinite
from calibrate.evidence.calibration_error import expected_calibration_error, reliability_of
from calibrate.evidence.estimate import NOTHING
from calibrate.evidence.evidence import BASELINE, Evidence
from calibrate.evidence.metrics import LOG_P, RIGHT, Metric
from calibrate.report.blocks import Block, Facts, Result, Table, Text, as_detail
from calibrate.report.fit_facts import numbers, r_squared_text, term_names
from calibrate.report.fit_record import FitRecord, load_line
from calibrate.report.kinds_table import kinds_table
from calibrate.report.metric_text import mean_text, metric_title
from calibrate.report.rules import span, value_text
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.solved_record import misranked_by_size, theta_facts
from calibrate.solver.solved_rows import Rows
from calibrate.store.fit import Fit

HEADING_WIDTH = 18  # letters


@dataclass(frozen=True, eq=False)
class SolvedHead:
    """The inputs of a head, solved.

    Attributes:
      collection: of the inputs.
      rows: the same, solved.
    """

    collection: RowCollection
    rows: Rows

    @property
    def misranked(self) -> dict[int, str]:
        """The number of misranked inputs, by size: "123 of 256 (48.0%)"."""
        return misranked_by_size(self.collection)


def run_result(record: FitRecord, scores: ScoresRecord | None, page: Path | None) -> Result:
    """The verdict of a fit, its scores by n, the rule, and the line that loads it.

    Args:
      record: of the fit, as it was saved.
      scores: of a head, on new inputs; None shows the held-out scores of the fit itself.
      page: the report; None if it could not be written.
    """
    fit = record.fit
    shown: list[Block] = [Text(value_text(fit.verdict))]
    if scores is None:
        shown += [block for block in record.evidence() if isinstance(block, Table)]
    else:
        shown.append(rules_table(scores.evidence, fit, record.misranked))
        shown += as_detail([*scores.tables(), *filter(None, [kinds_table(fit)])])
    theta = [] if record.rows is None else theta_facts(record.rows)
    rule = [] if len(fit.entries) > 1 else short_rule_facts(fit)
    places = [("load", f"fit = {load_line(fit)}"), report_fact(page)]
    shown.append(Facts([*theta, *record.head_facts(), *rule, *places]))
    found: dict[str, Any] = {"verdict": fit.verdict, "report": page}
    if scores is not None:
        found["scores"] = scores.as_json()
    return Result(shown, record.as_json() | found)


def report_result(fit: Fit, scores: ScoresRecord | None, page: Path) -> Result:
    """The verdict of a fit, that on its new scores, and the path of the page."""
    texts = [] if scores is None else [" ".join(x) for x in scores.verdict_sentences().values()]
    shown: list[Block] = [Text(value_text(text)) for text in filter(None, [fit.verdict, *texts])]
    shown.append(Facts([report_fact(page)]))
    return Result(shown, {"verdict": fit.verdict, "scores": texts, "report": page})


def report_fact(page: Path | None) -> tuple[str, str]:
    """The path of a page."""
    return "report", str(page or "not written")


def short_rule_facts(fit: Fit) -> Iterable[tuple[str, str]]:
    """The coefficients by name, where they apply, and how much of them the inputs support."""
    rule, coefficients = fit.rule, fit.entries[0].coefficients
    if rule.kind == CONSTANT:
        yield "beta", constant_text(coefficients[0])
        return
    domain = span(fit.entries[0].domain, rule)
    yield "coefficients", f"{numbers(coefficients)} (of {term_names(rule)}); domain {domain}"
    if fit.effective_degrees is not None:
        yield (
            "degrees of freedom",
            f"{fit.effective_degrees:.1f} of {len(coefficients)} (effective)",
        )
    if fit.r_squared is not None:
        yield "R^2 of log beta", r_squared_text(fit.r_squared)


def rules_table(items: Evidence, fit: Fit, misranked: Mapping[int, str]) -> Table:
    """The baseline, the published polynomial, a fit, the best constant and argmax, by n.

    Args:
      items: scores on new inputs; by accuracy, or, where the head has none, by NLL.
      fit: by its reference among the rules.
      misranked: numbers of collected inputs, by size.
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
    headings = ["\n".join(textwrap.wrap(names[rule], width=HEADING_WIDTH)) for rule in rules]
    title = f"{metric_title(metric, items.of.items)}, of {items.n:,} new inputs"
    marked = range(len(by_size), len(rows))
    return Table(["n", "misranked", *headings], rows, title, _note(rules), marked=marked)


def _note(rules: Sequence[str]) -> str:
    note = "Misranked: collected inputs in which another item has a higher logit than the target."
    if HARD in rules:
        note += " Argmax puts all weight on one item: no probability, and so it has no NLL."
    return note


def _means(items: Evidence, rules: Sequence[str], metric: Metric) -> list[str]:
    return [
        NOTHING if is_infinite(rule, metric) else mean_text(items.mean(rule, metric).mean, metric)
        for rule in rules
    ]


def _calibration_errors(items: Evidence, rules: Sequence[str]) -> list[str]:
    errors = (expected_calibration_error(reliability_of(items, rule)) for rule in rules)
    return [f"{100 * error:.1f}" for error in errors]
