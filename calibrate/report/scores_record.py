"""Scores of rules on the same items: tables, verdicts, and JSON."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from calibrate.evidence.baselines import HARD, PAPER, is_infinite
from calibrate.evidence.evidence import BASELINE, OWN, Evidence, OptionalHeadId
from calibrate.evidence.harm_limits import UNITS_OF_LOSS, check_limits
from calibrate.evidence.metrics import KL, LOG_P, RIGHT, Metric, placed
from calibrate.evidence.verdict import best_rules, judge, judged_items
from calibrate.report.blocks import Block, Facts, Heading, Table, Text
from calibrate.report.comparison import (
    Parts,
    comparison_table,
    gains_table,
    heads_table,
    means_table,
    scores_of,
    text_table,
)
from calibrate.report.labels import LOG_N, explanation, label
from calibrate.report.sentences import limited_items, sentences
from calibrate.rows.rows import head_label

FIRST_BASELINES = ("constant", PAPER, LOG_N, HARD)  # the order of rules that are no fits
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

    @property
    def _lead_rules(self) -> list[str]:
        """The fits; without any, the first of the other rules, the published polynomial."""
        return [rule for rule in self.fits if rule in self.rules] or self.rules[1:2]

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
        """Scores and gains by size, by text domain, by head, and by template and length."""
        by_size = self.means_by_size()
        return [*by_size.values(), self.gains_by_size(), *self.other_tables()]

    def means_by_size(self) -> dict[Metric, Table]:
        """Accuracy, NLL and ECE by size, as far as they are known."""
        parts, by = self._parts_by_size(), self._size_heading
        return {x: means_table(*parts, self.names, x, by) for x in scores_of(self.judged)}

    def gains_by_size(self) -> Table:
        """Gains over the baseline by size, with their errors."""
        return gains_table(*self._parts_by_size(), self.names, self._size_heading)

    def other_tables(self) -> list[Table]:
        """Scores and gains by text domain, by head, and by template and length."""
        tables = []
        text = self.evidence.text
        if text.n and KL in text.values and text.of.items.knows_nll_of_text:
            tables += [text_table(text, rule, self.label(rule)) for rule in self._lead_rules]
        if len(self.judged.heads) > 1:
            tables.append(self._heads_table())
        return [*tables, *self._template_tables()]

    def _heads_table(self) -> Table:
        """The gain of each of the leading rules by head."""
        lead, *_ = rules = self._lead_rules
        heads = [
            (head_label(*head) or part.of.name, head, part)
            for head, part in self.ranked_heads(lead)
        ]
        return heads_table(heads, self.names, rules)

    def _template_tables(self) -> list[Table]:
        """Exact match and gains by prompt template and length; nothing without templates."""
        parts = {
            f"{stratum.template}, {stratum.size:,}": part
            for stratum, part in self.evidence.answers.by("stratum").items()
            if stratum.template
        }
        if not parts:
            return []
        by = "template, tokens"
        right = [RIGHT] if RIGHT in self.evidence.values else []
        tables = [means_table(parts, {}, self.names, score, by) for score in right]
        return [*tables, gains_table(parts, {}, self.names, by)]

    def comparison(self) -> Table:
        """All rules on the items that decide, all sizes together."""
        own = self.fits[0] if len(self.fits) == 1 and self.fits[0] in self.rules else ""
        return comparison_table(self.judged, self.names, own)

    @property
    def _size_heading(self) -> str:
        return "tokens" if self.evidence.of.items.in_tokens else "n"

    def _parts_by_size(self) -> tuple[Parts, Parts]:
        """Items by size, and items of several sizes."""
        items, known = self.judged, self.evidence.answers.calibration_templates
        rows = {items.span(n): part for n, part in items.by("size").items()}
        means = {"all": items} if len(rows) > 1 else {}
        if 0 < known.n < self.evidence.answers.n:
            means["calibration templates"] = known
        return rows, means

    def recommendation(self) -> str:
        """Names the best of the fits that are significantly better, or the baseline."""
        items = self.judged
        useful = [fit for fit in self.fits if judge(self.evidence, fit).use]
        if not useful:
            return "Recommendation: keep the baseline; no fit is significantly better."
        best = items.best(useful)
        level = [fit for fit in best_rules(items, useful) if fit != best]
        beside = f"; as good: {', '.join(map(self.label, level))}" if level else ""
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
