"""Scores of rules on the same items: tables, verdicts, and JSON."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from calibrate.evidence.baselines import HARD, PAPER, is_infinite
from calibrate.evidence.evidence import BASELINE, OWN, Evidence, OptionalHeadId
from calibrate.evidence.harm_limits import UNITS_OF_LOSS, check_limits
from calibrate.evidence.metrics import KL, LOG_P, NATS, Metric, placed
from calibrate.evidence.verdict import judge, judged_items
from calibrate.report.blocks import SHOWN_HEADS, Block, Facts, Heading, Table, Text, and_more
from calibrate.report.comparison import Parts, comparison_table, scores_of, size_table
from calibrate.report.labels import (
    LOG_N,
    change_text,
    estimate_text,
    explanation,
    label,
    mean_text,
    metric_note,
    metric_title,
)
from calibrate.report.rules import entry_heading, entry_text
from calibrate.report.sentences import limited_items, sentences
from calibrate.report.text_harm import text_harm_json, text_harm_table
from calibrate.rows.rows import head_label

FIRST_BASELINES = ("constant", PAPER, LOG_N, HARD)  # the order of rules that are no fits
RULES_AT_ONCE = 3  # in a table, so that lines are short
RULES_AT_ONCE_IN_NATS = 2  # whose cells are wider
RULE_WIDTH = 24  # letters of a line of a heading
JSON_NUMBERS = ("mean", "error", "gain", "gain_error", "p_value")  # p_value: of no gain


@dataclass(frozen=True)
class ScoresRecord:
    """Rules on the same items: the result of `calibrate evaluate`, and a part of others.

    Attributes:
      evidence: of the rules.
      fits: the rules that get a verdict.
      own: the name of the only fit, for people; "" is its name in the evidence.
      scored: describes the items; "" gives their numbers.
    """

    evidence: Evidence
    fits: Sequence[str] = (OWN,)
    own: str = ""
    scored: str = ""

    def blocks(self) -> Iterable[Block]:
        """The items that were scored, the tables, and the verdict on each fit."""
        yield Heading(f"Scores of {self.evidence.of.name}")
        yield Facts([("scored", self.scored_items()), *self.explained_rules()])
        yield from self.tables()
        yield self.comparison()
        if len(self.fits) > 1:
            yield Text(f"\n{self.recommendation()}")
        for verdict in self.verdict_sentences().values():
            yield Text("\n" + "\n".join(verdict))

    def explained_rules(self) -> list[tuple[str, str]]:
        """(name, explanation) of the rules beside the fits."""
        others = [rule for rule in self.rules if rule not in self.fits]
        return [(self.label(rule), explanation(rule)) for rule in others if explanation(rule)]

    def label(self, rule: str) -> str:
        """The name of a rule for people."""
        return self.own if self.own and rule in self.fits else label(rule)

    @property
    def names(self) -> dict[str, str]:
        """The rules, and their names for people."""
        return {rule: self.label(rule) for rule in self.rules}

    @property
    def rules(self) -> list[str]:
        """The baseline, the fits, `FIRST_BASELINES`, and the others."""
        order = {rule: i for i, rule in enumerate((BASELINE, *self.fits, *FIRST_BASELINES))}
        return sorted(self.evidence.rules, key=lambda rule: order.get(rule, len(order)))

    @cached_property
    def judged(self) -> Evidence:
        """The items that decide on a verdict."""
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
        """Scores by size, on retention text and by head; and, as details, by template."""
        metrics = placed(self.evidence.values)
        return [*(x for metric in metrics for x in self.size_tables(metric)), *self.part_tables()]

    def part_tables(self) -> list[Table]:
        """Scores on retention text and by head; and, as details, by template and length."""
        harms = [text_harm_table(self.evidence, fit, self.label(fit)) for fit in self.fits]
        tables = [table for table in harms if table is not None]
        if len(self.evidence.heads) > 1:
            tables.append(_head_table(self))
        if any(stratum.template for stratum in self.evidence.strata):
            for metric in placed(self.evidence.values):
                tables += _stratum_tables(self, metric)
        return tables

    def comparison(self) -> Table:
        """All rules on the items that decide, all sizes together."""
        own = self.fits[0] if len(self.fits) == 1 and self.fits[0] in self.rules else ""
        return comparison_table(self.judged, self.names, own)

    def compact_size_tables(self) -> list[Table]:
        """The mean scores of all rules by size."""
        return [
            size_table(*self._parts_by_size(score.of_text), self.names, score, self._size_heading)
            for score in scores_of(self.judged)
        ]

    def size_tables(self, metric: Metric) -> list[Table]:
        """Means of a metric by size, with errors and changes: a row for each size, and for means.

        Calibration templates have a row where held-out templates decide, and retention text where
        a metric is shown for text.
        """
        rows, means = self._parts_by_size(metric.of_text)
        return _scores_tables(self, self._size_heading, rows, means, metric, metric.detail)

    @property
    def _size_heading(self) -> str:
        return "tokens" if self.evidence.of.items.in_tokens else "n"

    def _parts_by_size(self, of_text: bool) -> tuple[Parts, Parts]:
        """Items by size, and items of several sizes, with retention text or without."""
        items, answers = self.judged, self.evidence.answers
        rows = {items.span(n): part for n, part in items.by("size").items()}
        means = {"all": items} if len(rows) > 1 else {}
        if 0 < answers.calibration_templates.n < answers.n:
            means["calibration templates"] = answers.calibration_templates
        if of_text and 0 < answers.n < self.evidence.n:
            means["retention text"] = self.evidence.text
        return rows, means

    def recommendation(self) -> str:
        """Names the best of the fits that are significantly better, or the baseline."""
        items = self.judged
        useful = [fit for fit in self.fits if judge(self.evidence, fit).use]
        if not useful:
            return "Recommendation: keep the baseline; no fit is significantly better."
        best = items.best(LOG_P, useful)
        level = [fit for fit in useful if fit != best and items.gain(best, LOG_P, fit).sign <= 0]
        beside = f"; {', '.join(map(self.label, level))} not significantly worse" if level else ""
        return f"Recommendation: {self.label(best)}{beside}."

    def verdict_sentences(self) -> dict[str, list[str]]:
        """The sentences of the verdict on each fit."""
        return {
            rule: sentences(self.evidence, rule, self.label(rule))
            for rule in self.fits
            if rule in self.evidence.rules
        }

    def scored_items(self) -> str:
        """The numbers of items, heads and groups that were scored, and of items left out."""
        if self.scored:
            return self.scored
        evidence = self.evidence
        words = f"{evidence.n:,} {evidence.of.items.name}"
        if len(evidence.heads) > 1:
            words += f" of {len(evidence.heads):,} heads"
        if evidence.n_groups:
            words += f" from {evidence.n_groups:,} groups"
        if evidence.weighed:
            words += ", weighted"
        counts = evidence.of.left_out.items()
        left_out = [f"{n:,} {reason.replace('_', ' ')}" for reason, n in counts if n]
        return f"{words}; left out: {', '.join(left_out)}" if left_out else words

    def as_json(self) -> dict[str, Any]:
        """The scores of every rule by size, template and head; shares, not per cent."""
        evidence, items = self.evidence, self.judged
        has_text = evidence.answers.n and evidence.text.n
        strata = evidence.by("stratum").items()
        is_of_heads = len(items.by("head")) > 1
        return {
            "of": evidence.of._asdict() | {"items": evidence.of.items.name},
            "scored": self.scored_items(),
            "rules": [self._rule_json(rule) for rule in self.rules],
            "all": scores_json(items),
            "text": scores_json(evidence.text) if has_text else None,
            "text_harm": {rule: text_harm_json(evidence, rule) for rule in self.rules[1:]},
            "sizes": sizes_json(items),
            "strata": [stratum._asdict() | scores_json(part) for stratum, part in strata],
            "heads": heads_json(self.ranked_heads(self.rules[1])) if is_of_heads else [],
            "verdicts": {
                rule: self._verdict_json(rule, " ".join(verdict))
                for rule, verdict in self.verdict_sentences().items()
            },
        }

    def _rule_json(self, rule: str) -> dict[str, Any]:
        return {
            "rule": rule,
            "label": self.label(rule),
            "oracle": rule == HARD,
            "heads": sum(self.evidence.names(rule, head) for head in self.judged.by("head")),
        }

    def _verdict_json(self, rule: str, text: str) -> dict[str, Any]:
        verdict = judge(self.evidence, rule)
        return {
            "text": text,
            "outcome": verdict.outcome,
            "better": verdict.better,
            "worse": verdict.worse,
            "held": held_json(self.evidence, rule),
        }


def _stratum_tables(scores: ScoresRecord, metric: Metric) -> list[Table]:
    """A row for each template and length."""
    rows = {
        f"{stratum.template}, {stratum.size:,}": part
        for stratum, part in scores.evidence.by("stratum").items()
        if metric.of_text or not stratum.protected
    }
    return _scores_tables(scores, "template, tokens", rows, {}, metric, detail=True)


def _scores_tables(
    scores: ScoresRecord, by: str, rows: Parts, means: Parts, metric: Metric, detail: bool
) -> list[Table]:
    """A table for every few rules; all but the first are details."""
    others = [rule for rule in scores.rules[1:] if not is_infinite(rule, metric)]
    step = _rules_at_once(metric)
    groups = [others[i : i + step] for i in range(0, max(len(others), 1), step)]
    tables = [_scores_table(scores, by, rows, means, metric, group) for group in groups]
    note = _scores_note(scores.evidence, metric)
    return [
        replace(table, detail=detail or i > 0, note="" if i else note)
        for i, table in enumerate(tables)
    ]


def _rules_at_once(metric: Metric) -> int:
    return RULES_AT_ONCE_IN_NATS if metric.unit == NATS else RULES_AT_ONCE


def _scores_note(evidence: Evidence, metric: Metric) -> str:
    return (
        "± standard error; in brackets, the change from the baseline on the same "
        f"{evidence.of.items.name}; {metric_note(metric)}."
    )


def _title(evidence: Evidence, metric: Metric, by: str) -> str:
    of = evidence.of
    name = f"{of.name}: " if of.name else ""
    return f"{name}{metric_title(metric, of.items)}, by {by}"


def _scores_table(
    scores: ScoresRecord,
    by: str,
    rows: Parts,
    means: Parts,
    metric: Metric,
    rules: Sequence[str],
) -> Table:
    """A row for each part of the items, and a column for each rule."""
    columns = [BASELINE, *rules]
    cells = [
        [name, *(_score_cell(items, rule, metric) for rule in columns), f"{items.n:,}"]
        for name, items in {**rows, **means}.items()
    ]
    headings = [_heading(scores, rule) for rule in columns]
    return Table(
        [by, *headings, scores.evidence.of.items.name],
        cells,
        _title(scores.evidence, metric, by),
        left=["template, tokens"],
        marked=range(len(rows), len(cells)),
    )


def _heading(scores: ScoresRecord, rule: str) -> str:
    return "\n".join(textwrap.wrap(scores.label(rule), width=RULE_WIDTH))


def _head_table(scores: ScoresRecord) -> Table:
    """A row for each head, the largest gain first; for a single fit also its rule."""
    items, metric = scores.judged, LOG_P
    lead, *_ = rules = scores.rules[1 : 1 + _rules_at_once(metric)]
    ranked = scores.ranked_heads(lead)
    fit = items.fits.get(lead) if len(scores.fits) == 1 else None
    rows = []
    for head, part in ranked[:SHOWN_HEADS]:
        cells = [
            _score_cell(part, rule, metric) if items.names(rule, head) else "unchanged"
            for rule in rules
        ]
        cells = [_score_cell(part, BASELINE, metric), *cells]
        row = [head_label(*head) or items.of.name, *cells, f"{part.n:,}"]
        rows.append(row if fit is None else [*row, entry_text(fit, fit.entry_of(*head))])
    headings = [_heading(scores, rule) for rule in (BASELINE, *rules)]
    columns, left = ["head", *headings, items.of.items.name], ["head"]
    if fit is not None:
        columns.append(entry_heading(fit))
        left.append(columns[-1])
    gain = f"the largest gain of {scores.label(lead)} first"
    title = f"{_title(scores.evidence, metric, 'head')}, {gain}"
    return Table(columns, rows, title, and_more(len(ranked)).strip(), left=left)


def _score_cell(items: Evidence, rule: str, metric: Metric) -> str:
    """The mean with its error for the baseline, and with the change from that for other rules."""
    more_decimals = int(not items.answers.n)  # text: per token
    mean = items.mean(rule, metric)
    if rule == BASELINE or not math.isfinite(mean.mean):
        return estimate_text(mean, metric, more_decimals)
    change = change_text(items.gain(rule, metric), metric, more_decimals)
    return f"{mean_text(mean.mean, metric, more_decimals)} ({change})"


def held_json(evidence: Evidence, rule: str) -> list[dict[str, Any]]:
    """The limits on the harm of a rule: where, the gain, and the margin (`allowed`)."""
    return [
        {
            "where": limited_items(evidence, rule, result),
            "gain": -result.loss,
            "unit": UNITS_OF_LOSS[result.limit.metric],
            "allowed": result.limit.margin,
        }
        for result in check_limits(evidence, rule)
    ]


def scores_json(items: Evidence) -> dict[str, Any]:
    """The number of items, and `JSON_NUMBERS` of each rule and metric."""
    rules: dict[str, dict[str, Any]] = {rule: {} for rule in items.rules}
    of_text = [KL] if KL in items.values and items.text.n else []
    for metric in [*placed(items.values), *of_text]:
        values = items.values[metric].astype(float)
        mean = items.estimate(values)
        gain = items.estimate(values - values[items.rules.index(BASELINE)])
        numbers = [mean.mean, mean.error, gain.mean, gain.error, gain.p_value]
        columns = np.transpose(numbers).tolist()
        for rule, column in zip(items.rules, columns, strict=True):
            if not is_infinite(rule, metric):
                rules[rule][metric.name] = dict(zip(JSON_NUMBERS, column, strict=True))
    return {"items": items.n, "rules": rules}


def sizes_json(items: Evidence) -> list[dict[str, Any]]:
    """The scores of each size."""
    return [{"size": n} | scores_json(part) for n, part in items.by("size").items()]


def heads_json(heads: Iterable[tuple[OptionalHeadId, Evidence]]) -> list[dict[str, Any]]:
    """The scores of heads, in the order given, and of each at each size."""
    return [
        {"layer": layer, "head": head} | scores_json(part) | {"sizes": sizes_json(part)}
        for (layer, head), part in heads
    ]
