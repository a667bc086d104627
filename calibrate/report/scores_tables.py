"""Tables of rules on the same items: by size, template and head, and all rules ranked."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from calibrate.evidence.baselines import HARD, is_infinite
from calibrate.evidence.evidence import BASELINE, OWN, Evidence, OptionalHeadId
from calibrate.evidence.metrics import LOG_P, NATS, Metric, placed
from calibrate.evidence.verdict import judged_items
from calibrate.report.blocks import SHOWN_HEADS, Table, and_more
from calibrate.report.labels import label
from calibrate.report.metric_text import (
    change_text,
    estimate_text,
    mean_text,
    metric_note,
    metric_title,
)
from calibrate.report.rules import entry_heading, entry_text
from calibrate.report.text_harm import text_harm_table
from calibrate.solver.solved_rows import head_label

BEST = "*"  # before a number
FIRST = ("paper", HARD, "log-n", "constant")  # of the rules that are no fits of the command
RULES_AT_ONCE = 3  # in a table, so that lines are short
RULES_AT_ONCE_IN_NATS = 2  # whose cells are wider
HEADING_WIDTH = 24  # letters

Parts = dict[str, Evidence]  # by the name of a table's row, its items


@dataclass(frozen=True)
class ScoredRules:
    """Rules on the same items, with their names for people and their order.

    Attributes:
      evidence: of the rules.
      fits: the rules that get a verdict.
      own: the name of the rule OWN, for people.
    """

    evidence: Evidence
    fits: Sequence[str] = (OWN,)
    own: str = ""

    def label(self, rule: str) -> str:
        """The name of a rule for people."""
        return label(rule, self.own)

    @property
    def rules(self) -> list[str]:
        """The baseline, the fits, what people compare first, and the others."""

        def place(rule: str) -> tuple[bool, bool, int]:
            known = FIRST.index(rule) if rule in FIRST else len(FIRST)
            return rule != BASELINE, rule not in self.fits, known

        return sorted(self.evidence.rules, key=place)

    @cached_property
    def judged(self) -> Evidence:
        """The items that decide."""
        return judged_items(self.evidence)

    def ranked_heads(self, rule: str) -> list[tuple[OptionalHeadId, Evidence]]:
        """Heads and their items: those that a rule names, by falling gain, and then the others."""
        items = self.judged

        def order(pair: tuple[OptionalHeadId, Evidence]) -> tuple[bool, float]:
            head, part = pair
            gain = float(part.gain(rule, LOG_P).mean)
            return not items.names(rule, head), -gain if math.isfinite(gain) else math.inf

        return sorted(items.by("head").items(), key=order)

    def tables(self) -> list[Table]:
        """By size and by head; details: by template and length."""
        metrics = placed(self.evidence.values)
        tables = [table for metric in metrics for table in self.size_tables(metric)]
        harms = [text_harm_table(self.evidence, fit, self.label(fit)) for fit in self.fits]
        tables += [table for table in harms if table is not None]
        if len(self.evidence.heads) > 1:
            tables.append(_head_table(self))
        if any(stratum.template for stratum in self.evidence.strata):
            for metric in metrics:
                tables += _stratum_tables(self, metric)
        return tables

    def size_tables(self, metric: Metric) -> list[Table]:
        """By size, for all, for calibration templates, if held-out ones judge a fit, and for
        retention text, for metrics that are shown of it.
        """
        items, answers = self.judged, self.evidence.answers
        rows = {items.span(n): part for n, part in items.by("size").items()}
        means = {"all": items} if len(rows) > 1 else {}
        if 0 < answers.calibration_templates.n < answers.n:
            means["calibration templates"] = answers.calibration_templates
        if metric.of_text and 0 < answers.n < self.evidence.n:
            means["retention text"] = self.evidence.text
        by = "tokens" if self.evidence.of.items.in_tokens else "n"
        return _tables(self, by, rows, means, metric, detail=metric.detail)

    def ranking(self) -> Table:
        """All rules by their NLL, the best first, with changes from the baseline."""
        items = self.judged
        finite = [rule for rule in items.rules if not is_infinite(rule, LOG_P)]
        means = {rule: float(items.mean(rule, LOG_P).mean) for rule in finite}
        best_first = sorted(finite, key=lambda rule: -means[rule])
        rows = []
        for place, rule in enumerate(best_first, 1):
            change = change_text(items.gain(rule, LOG_P), LOG_P) if rule != BASELINE else ""
            rows.append([f"{place}", self.label(rule), mean_text(means[rule], LOG_P), change])
        columns = ["", "rule", metric_title(LOG_P, items.of.items), "change"]
        return Table(columns, rows, "Ranked", left=["rule"])


def _stratum_tables(scored: ScoredRules, metric: Metric) -> list[Table]:
    """By template and length."""
    rows = {
        f"{stratum.template}, {stratum.size:,}": part
        for stratum, part in scored.evidence.by("stratum").items()
        if metric.of_text or not stratum.protected
    }
    return _tables(scored, "template, tokens", rows, {}, metric, detail=True)


def _tables(
    scored: ScoredRules, by: str, rows: Parts, means: Parts, metric: Metric, detail: bool
) -> list[Table]:
    """A few rules at a time; all but the first of these tables are details."""
    others = [rule for rule in scored.rules[1:] if not is_infinite(rule, metric)]
    step = _rules_at_once(metric)
    groups = [others[i : i + step] for i in range(0, max(len(others), 1), step)]
    tables = [_table(scored, by, rows, means, metric, group) for group in groups]
    return [
        replace(table, detail=detail or i > 0, note="" if i else _note(scored.evidence, metric))
        for i, table in enumerate(tables)
    ]


def _rules_at_once(metric: Metric) -> int:
    return RULES_AT_ONCE_IN_NATS if metric.unit == NATS else RULES_AT_ONCE


def _note(evidence: Evidence, metric: Metric) -> str:
    return (
        "± standard error; in brackets, the change from the baseline on the same "
        f"{evidence.of.items.name}; {metric_note(metric)}. {BEST} marks the best mean of a row."
    )


def _title(evidence: Evidence, metric: Metric, by: str) -> str:
    of = evidence.of
    name = f"{of.name}: " if of.name else ""
    return f"{name}{metric_title(metric, of.items)}, by {by}"


def _table(
    scored: ScoredRules,
    by: str,
    rows: Parts,
    means: Parts,
    metric: Metric,
    rules: Sequence[str],
) -> Table:
    """A row for each part of the items, and a column for each rule."""
    cells, bold = list[list[str]](), set[tuple[int, int]]()
    columns = [BASELINE, *rules]
    deployable = [rule for rule in scored.evidence.rules if rule != HARD]
    for i, (name, items) in enumerate((rows | means).items()):
        best = items.best(metric, deployable)
        of_rules = {rule: _cell(items, rule, metric) for rule in columns}
        if best in columns:
            bold.add((i, 1 + columns.index(best)))
            of_rules[best] = f"{BEST} {of_rules[best]}"
        cells.append([name, *of_rules.values(), f"{items.n:,}"])
    headings = [_heading(scored, rule) for rule in columns]
    return Table(
        [by, *headings, scored.evidence.of.items.name],
        cells,
        _title(scored.evidence, metric, by),
        left=["template, tokens"],
        marked=range(len(rows), len(cells)),
        bold=bold,
    )


def _heading(scored: ScoredRules, rule: str) -> str:
    return "\n".join(textwrap.wrap(scored.label(rule), width=HEADING_WIDTH))


def _head_table(scored: ScoredRules) -> Table:
    """A row per head, the largest gain first; of a single fit also its rule for the head."""
    items, metric = scored.judged, LOG_P
    lead, *_ = rules = scored.rules[1 : 1 + _rules_at_once(metric)]
    ranked = scored.ranked_heads(lead)
    fit = items.fits.get(lead) if len(scored.fits) == 1 else None
    rows = []
    for head, part in ranked[:SHOWN_HEADS]:
        cells = [_cell(part, BASELINE, metric)]
        for rule in rules:
            cells.append(_cell(part, rule, metric) if items.names(rule, head) else "unchanged")
        row = [head_label(*head) or items.of.name, *cells, f"{part.n:,}"]
        rows.append(row if fit is None else [*row, entry_text(fit, fit.entry_of(*head))])
    headings = [_heading(scored, rule) for rule in (BASELINE, *rules)]
    columns = ["head", *headings, items.of.items.name]
    if fit is not None:
        columns.append(entry_heading(fit))
    gain = f"the largest gain of {scored.label(lead)} first"
    title = f"{_title(scored.evidence, metric, 'head')}, {gain}"
    return Table(columns, rows, title, and_more(len(ranked)).strip(), left=["head"])


def _cell(items: Evidence, rule: str, metric: Metric) -> str:
    """The mean, with its error for the baseline, and else with the change from that."""
    more_decimals = int(not items.answers.n)  # text: per token
    mean = items.mean(rule, metric)
    if rule == BASELINE or not math.isfinite(mean.mean):
        return estimate_text(mean, metric, more_decimals)
    change = change_text(items.gain(rule, metric), metric, more_decimals)
    return f"{mean_text(mean.mean, metric, more_decimals)} ({change})"
