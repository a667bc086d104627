"""Rules on the same items as a result to show: tables by size, template and head."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from calibrate.evidence.baselines import label
from calibrate.evidence.evidence import LOG_P, OWN, PLAIN, RIGHT, Evidence, Head, P
from calibrate.evidence.verdict import HARD, judge, judged_items, main_measure, sentences
from calibrate.report.blocks import SHOWN_HEADS, Block, Facts, Heading, Table, Text, and_more
from calibrate.report.fit_record import entry_heading, entry_text
from calibrate.report.scores_json import heads_json, scores_json, sizes_json
from calibrate.rows.solved_rows import head_label

FIRST = ("paper", HARD, "log-n", "constant")  # of the rules that are no fits of the command
HEADING_WIDTH = 24  # letters of a line


class Shown(NamedTuple):
    """How a measure is printed."""

    factor: int
    digits: int
    at_once: int  # rules in a table
    meaning: str


SHOWN = {
    LOG_P: Shown(1, 3, 2, "log p, of a probability, is in nats: 0 is certain, 0.69 less is half"),
    P: Shown(100, 1, 3, "gains are in points"),
    RIGHT: Shown(100, 1, 3, "gains are in points"),
}
TITLES = {  # by measure, and by what items are called
    (LOG_P, "answers"): "log p of the answer; of text, per token",
    (LOG_P, "rows"): "log p of the target",
    (P, "rows"): "p of the target, %",
    (RIGHT, "answers"): "Answers wholly right, %",
    (RIGHT, "sets"): "Accuracy, %",
}


@dataclass(frozen=True)
class ScoresRecord:
    """The result of `calibrate evaluate`, and the scores in those of `run` and `fit`.

    Attributes:
      evidence: of the rules.
      fits: the rules that get a verdict.
      own: the name of the rule OWN, for people.
      scored: which items, in words; "" says it by their numbers.
    """

    evidence: Evidence
    fits: Sequence[str] = (OWN,)
    own: str = ""
    scored: str = ""

    def blocks(self) -> Iterable[Block]:
        """What was scored, the tables, and the verdict on each fit."""
        yield Heading(f"Scores of {self.evidence.of.name}")
        yield Facts([("scored", self.scored_items())])
        yield from self.tables()
        yield from (Text(f"\n{verdict}") for verdict in self.verdicts().values())

    def verdicts(self, rivals: bool = True) -> dict[str, str]:
        """What to do with each fit, and why, in a few sentences."""
        return {
            rule: " ".join(sentences(self.evidence, rule, self.label(rule), rivals))
            for rule in self.fits
            if rule in self.evidence.rules
        }

    def label(self, rule: str) -> str:
        """The name of a rule for people."""
        return self.own if rule == OWN and self.own else label(rule)

    @property
    def rules(self) -> list[str]:
        """Plain softmax, the fits, what people compare first, and the others."""

        def place(rule: str) -> tuple[bool, bool, int]:
            known = FIRST.index(rule) if rule in FIRST else len(FIRST)
            return rule != PLAIN, rule not in self.fits, known

        return sorted(self.evidence.rules, key=place)

    def _is_oracle(self, rule: str) -> bool:
        return rule == HARD

    def scored_items(self) -> str:
        """The items that were scored, their heads and groups, and how many were left out."""
        if self.scored:
            return self.scored
        found = self.evidence
        words = f"{found.n:,} {found.of.items}"
        if len(found.heads) > 1:
            words += f" of {len(found.heads):,} heads"
        if found.n_groups:
            words += f" from {found.n_groups:,} groups"
        if found.weighed:
            words += ", weighted"
        left_out = [f"{n:,} {why.replace('_', ' ')}" for why, n in found.of.left_out.items() if n]
        return f"{words}; left out: {', '.join(left_out) or 'none'}"

    def tables(self) -> list[Table]:
        """By size and by head; details: by template and length."""
        measures = self._measures()
        tables = [table for measure in measures for table in self.size_tables(measure)]
        if len(self.evidence.heads) > 1:
            tables.append(self._head_table())
        if any(stratum.template for stratum in self.evidence.strata):
            for measure in measures:
                tables += self._tables(_by_stratum(self.evidence, measure), measure, detail=True)
        return tables

    def size_tables(self, measure: str) -> list[Table]:
        """By size, a few rules at a time; all but the first are details, and what decides not."""
        return self._tables(_by_size(self.evidence, measure), measure, detail=measure == P)

    def _measures(self) -> list[str]:
        """Those that are shown, the one that decides first."""
        known = [measure for measure in SHOWN if measure in self.evidence.values]
        return sorted(known, key=lambda measure: measure != main_measure(self.evidence))

    def _tables(self, rows: "list[_Row]", measure: str, detail: bool) -> list[Table]:
        """A few rules at a time; all but the first of these tables are details."""
        _, *others = self.rules
        step = SHOWN[measure].at_once
        groups = [others[i : i + step] for i in range(0, max(len(others), 1), step)]
        tables = [self._table(rows, measure, group) for group in groups]
        return [
            replace(table, detail=detail or i > 0, note="" if i else self._note(measure))
            for i, table in enumerate(tables)
        ]

    def _note(self, measure: str) -> str:
        return (
            "± standard error; in brackets, the gain over plain softmax on the same "
            f"{self.evidence.of.items}; {SHOWN[measure].meaning}. Bold: the best rule to use."
        )

    def _title(self, measure: str, by: str) -> str:
        of = self.evidence.of
        return f"{of.name}: {TITLES.get((measure, of.items), measure)}, by {by}"

    def _table(self, rows: "list[_Row]", measure: str, rules: Sequence[str]) -> Table:
        cells, bold = list[list[str]](), set[tuple[int, int]]()
        columns = [PLAIN, *rules]
        deployable = [rule for rule in self.evidence.rules if not self._is_oracle(rule)]
        for i, row in enumerate(rows):
            best = row.items.best(measure, deployable)
            bold |= {(i, 2 + columns.index(best))} if best in columns else set()
            numbers = (_cell(row.items, rule, measure) for rule in columns)
            cells.append([row.name, f"{row.items.n:,}", *numbers])
        headings = [rows[0].by, self.evidence.of.items, *map(self._heading, columns)]
        return Table(
            headings, cells, self._title(measure, rows[0].by), left=["template, tokens"],
            marked=[i for i, row in enumerate(rows) if row.is_mean], bold=bold,
        )  # fmt: skip

    def _heading(self, rule: str) -> str:
        return "\n".join(textwrap.wrap(self.label(rule), HEADING_WIDTH))

    def _head_table(self) -> Table:
        """A row per head, the largest gain first; of a single fit also its rule for the head."""
        found, measure = judged_items(self.evidence), main_measure(self.evidence)
        _, *others = self.rules
        lead, rules = others[0], others[: SHOWN[measure].at_once]
        ranked = self.ranked(lead)
        rows = []
        for head, part in ranked[:SHOWN_HEADS]:
            cells = [_cell(part, rule, measure) for rule in (PLAIN, *rules)]
            known = [True, *(found.names(rule, head) for rule in rules)]
            cells = [x if named else "unchanged" for x, named in zip(cells, known, strict=True)]
            rows.append([head_label(*head) or found.of.name, f"{part.n:,}", *cells])
        columns = ["head", found.of.items, *map(self._heading, [PLAIN, *rules])]
        fit = found.fits.get(lead)
        if fit is not None and len(self.fits) == 1:
            columns.append(entry_heading(fit))
            rows = [
                [*row, entry_text(fit, fit.entry_of(*head))]
                for row, (head, _) in zip(rows, ranked, strict=False)
            ]
        title = f"{self._title(measure, 'head')}, the largest gain of {self.label(lead)} first"
        note = "Sizes have equal weight." + and_more(len(ranked))
        return Table(columns, rows, title, note, left=["head"])

    def ranked(self, rule: str) -> list[tuple[Head, Evidence]]:
        """Heads and their items: those that a rule names, by falling gain, and then the others."""
        found, measure = judged_items(self.evidence), main_measure(self.evidence)

        def order(item: tuple[Head, Evidence]) -> tuple[bool, float]:
            gain = float(item[1].gain(rule, measure).mean)
            return not found.names(rule, item[0]), -gain if math.isfinite(gain) else math.inf

        return sorted(found.by("head").items(), key=order)

    def as_json(self) -> dict[str, Any]:
        """Every rule by size, template and head; shares, not per cent."""
        found, answers = self.evidence, judged_items(self.evidence)
        heads = answers.by("head")
        rules = [
            {
                "rule": rule, "label": self.label(rule), "oracle": self._is_oracle(rule),
                "heads": sum(found.names(rule, head) for head in heads),
            }
            for rule in self.rules
        ]  # fmt: skip
        verdicts = {
            rule: {"text": text, **_verdict_json(found, rule)}
            for rule, text in self.verdicts().items()
        }
        return {
            "of": found.of._asdict(),
            "scored": self.scored_items(),
            "rules": rules,
            "all": scores_json(answers),
            "text": scores_json(found.text) if found.answers.n and found.text.n else None,
            "sizes": sizes_json(answers),
            "strata": [s._asdict() | scores_json(part) for s, part in found.by("stratum").items()],
            "heads": heads_json(self.ranked(self.rules[1])) if len(heads) > 1 else [],
            "verdicts": verdicts,
        }


class _Row(NamedTuple):
    """A row of a table: what it is of, and its items."""

    by: str
    name: str
    items: Evidence
    is_mean: bool = False


def _by_size(evidence: Evidence, measure: str) -> list[_Row]:
    """A row for each size, for all, and for protected text, whose tokens right are left out."""
    items = judged_items(evidence)
    by = "tokens" if evidence.of.items == "answers" else "n"
    rows = [_Row(by, f"{n:,}", part) for n, part in items.by("size").items()]
    rows += [_Row(by, "all", items, True)] if len(rows) > 1 else []
    if measure == LOG_P and items is not evidence:
        rows.append(_Row(by, "text", evidence.text, True))
    return rows


def _by_stratum(evidence: Evidence, measure: str) -> list[_Row]:
    """A row for each template and length."""
    return [
        _Row("template, tokens", f"{stratum.template}, {stratum.size:,}", part)
        for stratum, part in evidence.by("stratum").items()
        if measure == LOG_P or not stratum.protected
    ]


def _cell(items: Evidence, rule: str, measure: str) -> str:
    """The mean, with its error for plain softmax, and else with the gain over that."""
    factor, digits, *_ = SHOWN[measure]
    digits += not items.answers.n  # text: per token
    mean = items.mean(rule, measure)
    if rule == PLAIN or not math.isfinite(mean.mean):
        return mean.shown(f".{digits}f", factor)
    gain = items.gain(rule, measure).shown(f"+.{digits}f", factor)
    return f"{factor * mean.mean:.{digits}f} ({gain})"


def _verdict_json(evidence: Evidence, rule: str) -> dict[str, Any]:
    verdict = judge(evidence, rule)
    return {"outcome": verdict.outcome, "better": verdict.better, "worse": verdict.worse}
