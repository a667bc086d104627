"""Rules on the same items as a result to show: tables by size, template, head; gains."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from calibrate.evidence.baselines import described, label
from calibrate.evidence.estimate import decimal
from calibrate.evidence.scores import LOG_P, OWN, PLAIN, RIGHT, Evidence, Head, P
from calibrate.evidence.verdict import check_margins, judge, judged_items, main_measure
from calibrate.evidence.verdict_text import HARD, sentences
from calibrate.report.blocks import SHOWN_HEADS, Block, Facts, Heading, Table, Text, and_more
from calibrate.report.fit_record import entry_heading, entry_text
from calibrate.report.scores_json import heads_json, scores_json, sizes_json
from calibrate.report.terminal import as_text
from calibrate.solver.solved_rows import head_label

BEST = "*"  # before a number
FIRST = ("paper", HARD, "log-n", "constant")  # of the rules that are no fits of the command


class Shown(NamedTuple):
    """The form in which a measure is printed."""

    factor: int  # of the mean: the NLL is -1 times the log-likelihood
    digits: int
    at_once: int  # rules in a table
    meaning: str


SHOWN = {
    LOG_P: Shown(-1, 3, 2, "NLL, negative log-likelihood: lower is better"),
    P: Shown(100, 1, 3, "changes are in points"),
    RIGHT: Shown(100, 1, 3, "changes are in points"),
}
TITLES = {  # by measure, and by what items are called
    (LOG_P, "answers"): "NLL of the answer; of text, per token; nats",
    (LOG_P, "rows"): "NLL of the target, nats",
    (LOG_P, "sets"): "NLL of the target, nats",
    (P, "rows"): "Probability of the target, %",
    (RIGHT, "answers"): "Exact match, %",
    (RIGHT, "sets"): "Accuracy, %",
}


class Sample(NamedTuple):
    """An example of a model to show."""

    item: int  # its place in the evidence
    title: str
    prompt: str
    answer: str


_Rows = dict[str, Evidence]  # the items of each row of a table


@dataclass(frozen=True)
class ScoresRecord:
    """The result of `calibrate evaluate`, and the scores in those of `run` and `fit`.

    Attributes:
      evidence: of the rules.
      fits: the rules that get a verdict.
      own: the name of the rule OWN, for people.
      scored: which items, in words; "" says it by their numbers.
      samples: a few of a model's examples.
    """

    evidence: Evidence
    fits: Sequence[str] = (OWN,)
    own: str = ""
    scored: str = ""
    samples: Sequence[Sample] = ()

    def blocks(self) -> Iterable[Block]:
        """Yields the scored items, the tables, and the verdict on each fit."""
        yield Heading(f"Scores of {self.evidence.of.name}")
        yield Facts([("scored", self.scored_items())])
        yield from self.tables()
        if len(self.fits) > 1:
            yield self.ranking()
            yield Text(f"\n{self.recommendation()}")
        yield from (Text("\n" + "\n".join(told)) for told in self.verdict_sentences().values())

    def ranking(self) -> Table:
        """All rules by the measure that decides, the best first, with changes from the baseline."""
        items, measure = judged_items(self.evidence), main_measure(self.evidence)
        factor, digits, *_ = SHOWN[measure]
        # The NLL of argmax is infinite wherever it is wrong.
        finite = [rule for rule in items.rules if (rule, measure) != (HARD, LOG_P)]
        ranked = sorted(finite, key=lambda rule: -float(items.mean(rule, measure).mean))
        rows = []
        for place, rule in enumerate(ranked, 1):
            gain = items.gain(rule, measure).shown(f"+.{digits}f", factor) if rule != PLAIN else ""
            mean = decimal(factor * items.mean(rule, measure).mean, f".{digits}f")
            rows.append([f"{place}", self.label(rule), mean, gain])
        columns = ["", "rule", TITLES.get((measure, items.of.items), measure), "change"]
        return Table(columns, rows, "Ranked", "Sizes have equal weight.", left=["rule"])

    def recommendation(self) -> str:
        """The best fit whose verdict is to use it; or to leave softmax as it is."""
        items, measure = judged_items(self.evidence), main_measure(self.evidence)
        useful = [fit for fit in self.fits if judge(self.evidence, fit).use]
        if not useful:
            return "Recommendation: keep the baseline; no fit is significantly better."
        best = items.best(measure, useful)
        level = [fit for fit in useful if fit != best and items.gain(best, measure, fit).sign <= 0]
        beside = f"; {', '.join(map(self.label, level))} not significantly worse" if level else ""
        return f"Recommendation: {self.label(best)}{beside}."

    def verdicts(self, rivals: bool = True) -> dict[str, str]:
        """Says in a few sentences what to do with each fit, and why."""
        return {rule: " ".join(told) for rule, told in self.verdict_sentences(rivals).items()}

    def verdict_sentences(self, rivals: bool = True) -> dict[str, list[str]]:
        """The sentences of each verdict; those on other rules are last, and left out on request."""
        return {
            rule: sentences(self.evidence, rule, self.label(rule), rivals)
            for rule in self.fits
            if rule in self.evidence.rules
        }

    def label(self, rule: str) -> str:
        """The name of a rule for people."""
        return self.own if rule == OWN and self.own else label(rule)

    @property
    def rules(self) -> list[str]:
        """The baseline, the fits, what people compare first, and the others."""

        def place(rule: str) -> tuple[bool, bool, int]:
            known = FIRST.index(rule) if rule in FIRST else len(FIRST)
            return rule != PLAIN, rule not in self.fits, known

        return sorted(self.evidence.rules, key=place)

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
        return f"{words}; left out: {', '.join(left_out)}" if left_out else words

    def tables(self) -> list[Table]:
        """By size and by head; details: by template and length."""
        measures = self._measures()
        tables = [table for measure in measures for table in self.size_tables(measure)]
        if len(self.evidence.heads) > 1:
            tables.append(self._head_table())
        if any(stratum.template for stratum in self.evidence.strata):
            for measure in measures:
                tables += self._stratum_tables(measure)
        return tables

    def size_tables(self, measure: str) -> list[Table]:
        """By size, for all, for calibration templates, if held-out ones judge a fit, and for
        retention text, whose exact match is left out.
        """
        items, answers = judged_items(self.evidence), self.evidence.answers
        rows = {items.span(n): part for n, part in items.by("size").items()}
        means = {"all": items} if len(rows) > 1 else {}
        if 0 < answers.calibration_templates.n < answers.n:
            means["calibration templates"] = answers.calibration_templates
        if measure == LOG_P and 0 < answers.n < self.evidence.n:
            means["retention text"] = self.evidence.text
        by = "tokens" if self.evidence.of.items == "answers" else "n"
        return self._tables(by, rows, means, measure, detail=measure == P)

    def _stratum_tables(self, measure: str) -> list[Table]:
        """By template and length."""
        rows = {
            f"{stratum.template}, {stratum.size:,}": part
            for stratum, part in self.evidence.by("stratum").items()
            if measure == LOG_P or not stratum.protected
        }
        return self._tables("template, tokens", rows, {}, measure, detail=True)

    def _measures(self) -> list[str]:
        """The measures that are shown; the one that decides stands first."""
        known = [measure for measure in SHOWN if measure in self.evidence.values]
        return sorted(known, key=lambda measure: measure != main_measure(self.evidence))

    def _tables(
        self, by: str, rows: _Rows, means: _Rows, measure: str, detail: bool
    ) -> list[Table]:
        """A few rules at a time; all but the first of these tables are details."""
        # The NLL of argmax is infinite wherever it is wrong.
        others = [rule for rule in self.rules[1:] if (rule, measure) != (HARD, LOG_P)]
        step = SHOWN[measure].at_once
        groups = [others[i : i + step] for i in range(0, max(len(others), 1), step)]
        tables = [self._table(by, rows, means, measure, group) for group in groups]
        return [
            replace(table, detail=detail or i > 0, note="" if i else self._note(measure))
            for i, table in enumerate(tables)
        ]

    def _note(self, measure: str) -> str:
        return (
            "± standard error; in brackets, the change from the baseline on the same "
            f"{self.evidence.of.items}; {SHOWN[measure].meaning}. {BEST} marks the best rule to "
            "use, of all tables."
        )

    def _title(self, measure: str, by: str) -> str:
        of = self.evidence.of
        name = f"{of.name}: " if of.name else ""
        return f"{name}{TITLES.get((measure, of.items), measure)}, by {by}"

    def _table(
        self, by: str, rows: _Rows, means: _Rows, measure: str, rules: Sequence[str]
    ) -> Table:
        cells, bold = list[list[str]](), set[tuple[int, int]]()
        columns = [PLAIN, *rules]
        deployable = [rule for rule in self.evidence.rules if rule != HARD]
        for i, (name, items) in enumerate((rows | means).items()):
            best = items.best(measure, deployable)
            shown = {rule: _cell(items, rule, measure) for rule in columns}
            if best in columns:
                bold.add((i, 1 + columns.index(best)))
                shown[best] = f"{BEST} {shown[best]}"
            cells.append([name, *shown.values(), f"{items.n:,}"])
        return Table(
            [by, *map(self._heading, columns), self.evidence.of.items], cells,
            self._title(measure, by), left=["template, tokens"],
            marked=range(len(rows), len(cells)), bold=bold,
        )  # fmt: skip

    def _heading(self, rule: str) -> str:
        return "\n".join(textwrap.wrap(self.label(rule), width=24))

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
            rows.append([head_label(*head) or found.of.name, *cells, f"{part.n:,}"])
        columns = ["head", *map(self._heading, [PLAIN, *rules]), found.of.items]
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
                "rule": rule, "label": self.label(rule), "oracle": rule == HARD,
                "heads": sum(found.names(rule, head) for head in heads),
            }
            for rule in self.rules
        ]  # fmt: skip
        verdicts = {}
        for rule, text in self.verdicts().items():
            verdict = judge(found, rule)
            words = {"outcome": verdict.outcome, "better": verdict.better, "worse": verdict.worse}
            verdicts[rule] = {"text": text, **words, "held": check_margins(found, rule)}
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


def _cell(items: Evidence, rule: str, measure: str) -> str:
    """The mean, with its error for the baseline, and else with the change from that."""
    factor, digits, *_ = SHOWN[measure]
    digits += not items.answers.n  # text: per token
    mean = items.mean(rule, measure)
    if rule == PLAIN or not math.isfinite(mean.mean):
        return mean.shown(f".{digits}f", factor)
    gain = items.gain(rule, measure).shown(f"+.{digits}f", factor)
    return f"{decimal(factor * mean.mean, f'.{digits}f')} ({gain})"


class GainRow(NamedTuple):
    """One rule on the rows of one set size; means and standard errors."""

    size: int | None  # None: all sizes together
    rows: int
    rule: str
    log_p: float  # of the target, nats
    p: float  # probability of the target
    gain: float  # of log p over the baseline, row by row
    error: float  # standard error of the gain


class GainsTable(tuple[GainRow, ...]):
    """Records of each rule at each size, and of all sizes together; prints as tables."""

    tables: list[Table]  # as `calibrate evaluate` prints them
    told: list[str]  # the rule of the fit, and what it does where it may cost little

    def __str__(self) -> str:
        first, *others = map(as_text, self.tables)
        return "\n\n".join(["\n".join([first, *self.told]), *others])

    __repr__ = __str__


def gains_table(evidence: Evidence, fit: str) -> GainsTable:
    """The records of all rules; the baseline is the first of each size.

    Args:
      evidence: of rows.
      fit: the rule that was fitted.
    """
    record = ScoresRecord(evidence, (fit,))
    sizes: list[tuple[int | None, Evidence]] = list(evidence.by("size").items())
    if len(sizes) > 1:
        sizes.append((None, evidence))
    made = GainsTable(
        GainRow(
            size, part.n, record.label(rule), float(part.mean(rule, LOG_P).mean),
            float(part.mean(rule, P).mean), *map(float, part.gain(rule, LOG_P)[:2]),
        )
        for size, part in sizes
        for rule in record.rules
    )  # fmt: skip
    made.tables = record.size_tables(LOG_P)
    of_fit = [f"{fit}: {words}"] if (words := described(evidence.fits[fit])) else []
    made.told = [*of_fit, *map(str, check_margins(evidence, fit))]
    return made
