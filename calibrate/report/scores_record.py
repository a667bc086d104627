"""Rules on the same items as a result to show: tables, verdicts, and the same as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from calibrate.evidence.baselines import HARD, is_infinite
from calibrate.evidence.evidence import BASELINE, Evidence, OptionalHeadId
from calibrate.evidence.limit_clauses import UNITS_OF_LOSS
from calibrate.evidence.metrics import KL, LOG_P, placed
from calibrate.evidence.non_inferiority import check_limits
from calibrate.evidence.verdict import judge
from calibrate.report.blocks import Block, Facts, Heading, Text
from calibrate.report.scores_tables import ScoredRules
from calibrate.report.sentences import limited_items, sentences
from calibrate.report.text_harm import text_harm_json

NUMBERS = ("mean", "error", "gain", "gain_error", "p_value")  # p_value: of no gain


class Sample(NamedTuple):
    """An example of a model to show."""

    item: int  # its place in the evidence
    title: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class ScoresRecord(ScoredRules):
    """The result of `calibrate evaluate`, and the scores in those of `run` and `fit`.

    Attributes:
      scored: which items, in words; "" says it by their numbers.
      samples: a few of a model's examples.
    """

    scored: str = ""
    samples: Sequence[Sample] = ()

    def blocks(self) -> Iterable[Block]:
        """The items that were scored, the tables, and the verdict on each fit."""
        yield Heading(f"Scores of {self.evidence.of.name}")
        yield Facts([("scored", self.scored_items())])
        yield from self.tables()
        if len(self.fits) > 1:
            yield self.ranking()
            yield Text(f"\n{self.recommendation()}")
        for verdict in self.verdict_sentences().values():
            yield Text("\n" + "\n".join(verdict))

    def recommendation(self) -> str:
        """The best fit whose verdict is to use it; or to leave softmax as it is."""
        items = self.judged
        useful = [fit for fit in self.fits if judge(self.evidence, fit).use]
        if not useful:
            return "Recommendation: keep the baseline; no fit is significantly better."
        best = items.best(LOG_P, useful)
        level = [fit for fit in useful if fit != best and items.gain(best, LOG_P, fit).sign <= 0]
        beside = f"; {', '.join(map(self.label, level))} not significantly worse" if level else ""
        return f"Recommendation: {self.label(best)}{beside}."

    def verdict_sentences(self, baselines: bool = True) -> dict[str, list[str]]:
        """The sentences of each verdict; those on other rules are last, and left out on request."""
        return {
            rule: sentences(self.evidence, rule, self.label(rule), baselines)
            for rule in self.fits
            if rule in self.evidence.rules
        }

    def scored_items(self) -> str:
        """The items that were scored, their heads and groups, and how many were left out."""
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
        """Every rule by size, template and head; shares, not per cent."""
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
    """The number of items, and the `NUMBERS` of each rule and metric."""
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
                rules[rule][metric.name] = dict(zip(NUMBERS, column, strict=True))
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
