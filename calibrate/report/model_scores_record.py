"""Rules on the examples of a model as a result to show: tables, verdicts, JSON and CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from calibrate.model.comparison import LOG_P, PLAIN, RIGHT, Estimate, ExampleComparison
from calibrate.model.verdict import best_sentence, verdict
from calibrate.report.blocks import Block, Facts, Heading, Table, Text
from calibrate.report.wording import with_error
from calibrate.rows.baselines import label

TITLES = {
    RIGHT: "Answers wholly right, %",
    LOG_P: "log p of the answer, nats; of text, per token",
}
FIRST_RULE = 3  # column of the tables


@dataclass(frozen=True)
class ModelScoresRecord:
    """The result of `calibrate model evaluate`."""

    comparison: ExampleComparison
    model: str
    fingerprint: str
    collection: str | None  # its digest; None if the examples were not kept
    scored: str  # which examples, in words
    fits: tuple[str, ...]  # the rules that get a verdict
    constants: tuple[str, ...]  # the rules that are one constant on every head

    def blocks(self) -> Iterable[Block]:
        """The tables, and what they say of each fit."""
        yield Heading(f"Scores of {self.model} by its own answers")
        yield Facts([("scored", self.scored)])
        yield from self.tables()
        yield Facts(self.sentences())
        yield Text("Chance: two standard errors.")

    def sentences(self) -> list[tuple[str, str]]:
        """Labelled: what each fit does, and which rule is best."""
        found = [
            (name, sentence)
            for name in self.fits
            for sentence in verdict(self.comparison, name, self.constants)
        ]
        return [*found, *self.best()]

    def best(self) -> list[tuple[str, str]]:
        """Labelled: which rule is best, by each measure."""
        return [("best", best_sentence(self.comparison, measure)) for measure in TITLES]

    def tables(self) -> list[Table]:
        """Of each measure, a row per template and length and their means."""
        return [self._table(measure) for measure in TITLES if self._rows(measure)]

    def _rows(self, measure: str) -> list[tuple[str, str, Sequence[int]]]:
        """(template, length, cells) of each row; the tokens of text that are right are left out."""
        comparison = self.comparison
        rows: list[tuple[str, str, Sequence[int]]] = []
        for text in (False, True)[: 1 + (measure == LOG_P)]:
            members = comparison.members(text)
            cells = [comparison.cells[i] for i in members]
            rows += [
                (c.template, f"{c.length:,}", [i]) for i, c in zip(members, cells, strict=True)
            ]
            if not text and len(lengths := comparison.lengths()) > 1:
                by_length = [(n, comparison.members(length=n)) for n in lengths]
                rows += [("all templates", f"{n:,}", some) for n, some in by_length if some[1:]]
            if len(members) > 1:
                rows.append(("text" if text else "all answers", "all", members))
        return rows

    def _table(self, measure: str) -> Table:
        comparison, table_rows, bold = self.comparison, list[list[str]](), set()
        for template, length, cells in (rows := self._rows(measure)):
            shown = [self._cell(rule, measure, cells) for rule in comparison.rules]
            best = comparison.rules.index(comparison.best(measure, cells))
            bold.add((len(table_rows), FIRST_RULE + best))
            table_rows.append([template, length, f"{comparison.count(cells):,}", *shown])
        return Table(
            columns=["template", "length", "examples", *map(label, comparison.rules)],
            rows=table_rows,
            title=TITLES[measure],
            note="± standard error; below, the difference to plain softmax on the same examples. "
            "In means, templates and lengths have the same weight. Bold: the highest.",
            left=["template"],
            marked=[i for i, (_, _, cells) in enumerate(rows) if len(cells) > 1],
            bold=bold,
            keys=FIRST_RULE,
        )

    def _cell(self, rule: str, measure: str, cells: Sequence[int]) -> str:
        comparison = self.comparison
        factor, digits = (100, 1) if measure == RIGHT else (1, 3)
        digits += comparison.cells[cells[0]].text

        def shown(estimate: Estimate, sign: str = "") -> str:
            mean, error = estimate
            return with_error(factor * mean, factor * error, f"{sign}.{digits}f")

        mean = shown(comparison.mean(rule, measure, cells))
        if rule == PLAIN:
            return mean
        return f"{mean}\n{shown(comparison.gain(rule, measure, cells), '+')}"

    def as_json(self) -> dict[str, Any]:
        """Every rule in every cell and in the means; shares, not per cent."""
        comparison = self.comparison
        groups = {"answers": comparison.members(), "text": comparison.members(text=True)}
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "collection": self.collection,
            "scored": self.scored,
            "rules": list(comparison.rules),
            "cells": [
                comparison.cells[i]._asdict() | self._scores([i])
                for i in range(len(comparison.cells))
            ],
            **{name: self._scores(cells) if cells else None for name, cells in groups.items()},
            "by_length": {
                str(n): self._scores(comparison.members(length=n)) for n in comparison.lengths()
            },
            "verdicts": {name: verdict(comparison, name, self.constants) for name in self.fits},
            "best": [sentence for _, sentence in self.best()],
        }

    def _scores(self, cells: Sequence[int]) -> dict[str, Any]:
        comparison = self.comparison
        return {
            "examples": comparison.count(cells),
            "scores": {
                rule: {
                    measure: comparison.mean(rule, measure, cells)._asdict()
                    | {"gain": comparison.gain(rule, measure, cells)}
                    for measure in TITLES
                }
                for rule in comparison.rules
            },
        }

    def as_csv(self) -> str:
        """One line per rule, template and length."""
        comparison, text = self.comparison, io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        numbers = ["mean", "error", "gain", "gain_error"]
        names = [f"{measure}_{number}" for measure in TITLES for number in numbers]
        writer.writerow(["rule", "template", "length", "text", "examples", *names])
        for rule in comparison.rules:
            for i, cell in enumerate(comparison.cells):
                values = [
                    value
                    for measure in TITLES
                    for estimate in (comparison.mean, comparison.gain)
                    for value in estimate(rule, measure, [i])
                ]
                about = [cell.template, cell.length, int(cell.text), comparison.count([i])]
                writer.writerow([rule, *about, *(f"{value:.6g}" for value in values)])
        return text.getvalue()
