"""Scores of rules on the same items: tables, verdicts, and JSON."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from calibrate.evidence.baselines import is_infinite
from calibrate.evidence.evidence import BASELINE, OWN, Evidence, OptionalHeadId
from calibrate.evidence.metrics import KL, LOG_P, RIGHT, SUMMARY, Metric
from calibrate.evidence.significance import judge
from calibrate.report.blocks import Block, Facts, Heading, Table, Text
from calibrate.report.labels import explanation, label
from calibrate.report.score_tables import (
    Parts,
    comparison_table,
    gains_table,
    heads_table,
    means_table,
    scores_of,
    text_table,
)
from calibrate.report.sentences import sentences

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
        """The baseline, the fits, and the others in their order."""
        known = self.evidence.rules
        return list(dict.fromkeys((BASELINE, *(x for x in self.fits if x in known), *known)))

    @property
    def _lead_rules(self) -> list[str]:
        """The fits; without any, the first of the other rules, the published polynomial."""
        return [rule for rule in self.fits if rule in self.rules] or self.rules[1:2]

    @cached_property
    def judged(self) -> Evidence:
        """The items that decide on a verdict."""
        return self.evidence.judged

    def ranked_heads(self) -> list[tuple[OptionalHeadId, Evidence]]:
        """Heads and their items: those of the first fit by falling gain, then the others."""
        items, rule = self.judged, self._lead_rules[0]

        def order(pair: tuple[OptionalHeadId, Evidence]) -> tuple[bool, float]:
            head, part = pair
            gain = float(part.gain(rule, LOG_P).mean)
            return not items.names(rule, head), -gain if math.isfinite(gain) else math.inf

        return sorted(items.by("head").items(), key=order)

    def tables(self) -> list[Table]:
        """Scores and gains by size, by text domain, by head, and by template and length."""
        return [*self.means_by_size().values(), self.gains_by_size(), *self.other_tables()]

    def means_by_size(self) -> dict[Metric, Table]:
        """Accuracy, NLL and ECE by size, as far as they are known."""
        parts, by = self._parts_by_size(), self.judged.of.items.unit_of_size
        return {x: means_table(*parts, self.names, x, by) for x in scores_of(self.judged)}

    def gains_by_size(self) -> Table:
        """Gains over the baseline by size, with their errors."""
        return gains_table(*self._parts_by_size(), self.names, self.judged.of.items.unit_of_size)

    def _parts_by_size(self) -> tuple[Parts, Parts]:
        """Items by size, and items of several sizes."""
        items, known = self.judged, self.evidence.answers.calibration_templates
        rows = {items.span(n): part for n, part in items.by("size").items()}
        means = {"all": items} if len(rows) > 1 else {}
        if 0 < known.n < self.evidence.answers.n:
            means["calibration templates"] = known
        return rows, means

    def other_tables(self) -> list[Table]:
        """Scores and gains by text domain, by head, and by template and length."""
        tables, text = [], self.evidence.text
        if text.n and KL in text.values:
            tables += [text_table(text, rule, self.label(rule)) for rule in self._lead_rules]
        if len(self.judged.heads) > 1:
            tables.append(heads_table(self.ranked_heads(), self.names, self._lead_rules))
        strata = self.evidence.answers.by("stratum").items()
        parts = {f"{x.template}, {x.size:,}": part for x, part in strata if x.template}
        by = "template, tokens"
        if parts and RIGHT in self.evidence.values:
            tables.append(means_table(parts, {}, self.names, RIGHT, by))
        return [*tables, gains_table(parts, {}, self.names, by)] if parts else tables

    def comparison(self, note: str = "") -> Table:
        """All rules on the items that decide, all sizes together."""
        own = self.fits[0] if len(self.fits) == 1 and self.fits[0] in self.rules else ""
        return comparison_table(self.judged, self.names, own, note)

    def verdict_sentences(self) -> dict[str, list[str]]:
        """The sentences of the verdict on each fit."""
        fits = [rule for rule in self.fits if rule in self.evidence.rules]
        return {rule: sentences(self.evidence, rule, self.label(rule)) for rule in fits}

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
        counts = evidence.of.left_out.items()
        left_out = [f"{n:,} {reason.replace('_', ' ')}" for reason, n in counts if n]
        return f"{words}; left out: {', '.join(left_out)}" if left_out else words

    def as_json(self) -> dict[str, Any]:
        """The scores of every rule by size, stratum and head; shares, not per cent."""
        evidence, items = self.evidence, self.judged
        heads = self.ranked_heads() if len(items.by("head")) > 1 else []
        verdicts, strata = self.verdict_sentences().items(), evidence.by("stratum").items()
        return {
            "of": evidence.of._asdict() | {"items": evidence.of.items.name},
            "scored": self.scored_items(),
            "rules": self.names,
            "all": scores_json(items),
            "sizes": [{"size": n} | scores_json(part) for n, part in items.by("size").items()],
            "strata": [x._asdict() | scores_json(part) for x, part in strata],
            "heads": [{"layer": i, "head": j} | scores_json(part) for (i, j), part in heads],
            "verdicts": {
                rule: {"text": " ".join(verdict), "outcome": judge(evidence, rule).outcome}
                for rule, verdict in verdicts
            },
        }


def scores_json(items: Evidence) -> dict[str, Any]:
    """The number of items, and `JSON_NUMBERS` of each rule and metric."""
    rules: dict[str, dict[str, Any]] = {rule: {} for rule in items.rules}
    of_text = [KL] if KL in items.values and items.text.n else []
    for metric in [*(x for x in SUMMARY if x in items.values), *of_text]:
        values = items.values[metric].astype(float)
        mean = items.estimate(values)
        gain = items.estimate(values - values[items.rules.index(BASELINE)])
        numbers = [mean.mean, mean.error, gain.mean, gain.error, gain.p_value]
        columns = np.transpose(numbers).tolist()
        for rule, column in zip(items.rules, columns, strict=True):
            if not is_infinite(rule, metric):
                rules[rule][metric.name] = dict(zip(JSON_NUMBERS, column, strict=True))
    return {"items": items.n, "rules": rules}
