"""Scores on logits on disk as a result to show: tables by set size and by head, and all as JSON."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from calibrate.files.coefficients import Coefficients, Entry
from calibrate.files.rows import BAD
from calibrate.report.blocks import SHOWN_HEADS, Block, Facts, Heading, Table
from calibrate.report.fit_verdict import verdict_on_logits
from calibrate.report.rule_curves import all_constant, beta_text
from calibrate.report.wording import NOTHING, argument, polynomial, with_error
from calibrate.rows.baselines import label
from calibrate.rows.score_logits import MEASURES, Estimate, LogitScores

FIRST_FIT = 2  # rules: plain softmax, the paper's numbers, and then fits


@dataclass(frozen=True)
class _Measure:
    """How one measure is printed."""

    name: str
    factor: int
    shape: str
    gain_shape: str


LOG_P = _Measure("log-probability of the target, nats", 1, ".3f", "+.4f")
P = _Measure("probability of the target, % (gains in points)", 100, ".1f", "+.2f")
SHOWN_MEASURES = {"log_p": LOG_P, "p": P}


@dataclass(frozen=True)
class LogitsRecord:
    """The result of `calibrate evaluate --logits`."""

    scores: LogitScores

    def blocks(self) -> Iterable[Block]:
        """By set size and by head, each number with its standard error, and a verdict per fit."""
        scores = self.scores
        yield Heading(f"Scores on the rows of {scores.name}")
        yield Facts([("scored", self.scored_rows())])
        yield from self.size_tables()
        if len(scores.heads) > 1:
            yield self.head_table()
        verdicts = [verdict_on_logits(scores, i) for i in range(FIRST_FIT, len(scores.rules))]
        if verdicts:
            yield Facts([("verdict", text) for text in verdicts])

    def scored_rows(self) -> str:
        """The rows that were scored, their heads, and how many were left out."""
        scores = self.scores
        bad = {reason: sum(size[reason] for size in scores.counts) for reason in BAD}
        scored = scores.estimate().rows
        bad["without weight"] = (
            sum(size["rows"] for size in scores.counts) - sum(bad.values()) - scored
        )
        left_out = ", ".join(f"{n:,} {reason.replace('_', ' ')}" for reason, n in bad.items() if n)
        heads = f"{len(scores.heads):,} head{'s' * (len(scores.heads) > 1)}"
        n = scores.n_groups
        groups = f" from {n:,} group{'s' * (n > 1)}" * bool(n)
        weighed = ", weighted" * scores.weighed
        return f"{scored:,} rows of {heads}{groups}{weighed}; left out: {left_out or 'none'}"

    def size_tables(self) -> list[Table]:
        """log p and p of every rule: a row per set size, and one for all sizes."""
        return [self._size_table(key, measure) for key, measure in SHOWN_MEASURES.items()]

    def _size_table(self, key: str, measure: _Measure) -> Table:
        scores = self.scores
        columns = ["n", "rows", label("plain")]
        for name in scores.rules[1:]:
            columns += [label(name).removesuffix(" numbers"), "gain"]
        sizes = [(f"{n:,}", scores.estimate(size=i)) for i, n in enumerate(scores.sizes)]
        if len(sizes) > 1:
            sizes.append(("all", scores.estimate()))
        rows = []
        for size, estimate in sizes:
            row = [size, f"{estimate.rows:,}", _mean(estimate, 0, key)]
            for rule in range(1, len(scores.rules)):
                row += [_mean(estimate, rule, key), _gain(estimate, rule, key)]
            rows.append(row)
        title = f"Mean {measure.name} ± standard error; gain over plain softmax, row by row"
        marked = [len(scores.sizes)]
        return Table(columns, rows, title, marked=marked, keys=3, together=2)

    def head_table(self) -> Table:
        """A row per head, the largest gain first; of a single fit also its rule for the head.

        The paper's numbers, a yardstick here, have their gain alone.
        """
        scores = self.scores
        fits = range(FIRST_FIT, len(scores.rules))
        lead = min(FIRST_FIT, len(scores.rules) - 1)
        columns = ["head", "rows", "log p, plain", "p, plain"]
        for rule in fits:
            columns += [f"gain of {scores.rules[rule]}", "p"]
        columns.append("the paper's gain")
        ranked = scores.ranked(lead)
        rows = [self._head_row(head, fits) for head in ranked[:SHOWN_HEADS]]
        if len(fits) == 1:
            fit = scores.fits[FIRST_FIT]
            beta = f"beta({argument(fit.rule)})" + ", range" * fit.rule.by_entropy
            columns.append("beta" if all_constant(fit) else beta)
            for row, head in zip(rows, ranked, strict=False):
                row.append(_entry_text(fit, fit.entry_of(*scores.heads[head])))
        rest = len(ranked) - len(rows)
        return Table(
            columns, rows,
            f"By head, the largest gain of {label(scores.rules[lead])} first "
            "(log p in nats, p of the target in %, equal weight per set size)",
            note=f"and {rest:,} more (`calibrate evaluate --json` lists them all)" * bool(rest),
            left=["head"],
        )  # fmt: skip

    def _head_row(self, head: int, fits: range) -> list[str]:
        scores, estimate = self.scores, self.scores.estimate(head=head)
        row = [scores.head_label(head), f"{estimate.rows:,}"]
        row += [_mean(estimate, 0, "log_p"), _mean(estimate, 0, "p")]
        for rule in fits:
            if scores.names(rule, head):
                row += [_gain(estimate, rule, "log_p"), _mean(estimate, rule, "p")]
            else:
                row += ["unchanged", NOTHING]
        return [*row, _gain(estimate, FIRST_FIT - 1, "log_p")]

    def as_json(self) -> dict[str, Any]:
        """All scores by size, by head, and of each head at each size."""
        scores = self.scores
        rules, heads = range(len(scores.rules)), range(len(scores.heads))
        return {
            "logits": scores.name,
            "fingerprint": scores.fingerprint,
            "rules": [
                {
                    "rule": scores.rules[i],
                    "label": label(scores.rules[i]),
                    "held_out": scores.held_out(i),
                    "heads": sum(scores.names(i, j) for j in heads),
                }
                for i in rules
            ],
            "rows": scores.counts,
            "all": self._estimate_json(),
            "sizes": self._sizes_json(),
            "heads": [
                dict(zip(("layer", "head"), scores.heads[j], strict=True))
                | self._estimate_json(head=j)
                | {"sizes": self._sizes_json(j)}
                for j in scores.ranked(min(FIRST_FIT, len(rules) - 1))
            ],
            "verdicts": {scores.rules[i]: verdict_on_logits(scores, i) for i in rules[FIRST_FIT:]},
        }

    def _sizes_json(self, head: int | None = None) -> list[dict[str, Any]]:
        return [
            {"size": size} | self._estimate_json(i, head)
            for i, size in enumerate(self.scores.sizes)
        ]

    def _estimate_json(self, size: int | None = None, head: int | None = None) -> dict[str, Any]:
        estimate = self.scores.estimate(size, head)
        return {
            "rows": estimate.rows,
            "rules": {
                name: {
                    measure: dict(zip(("mean", "error"), estimate.of(rule, measure), strict=True))
                    for measure in MEASURES
                }
                for rule, name in enumerate(self.scores.rules)
            },
        }


def _mean(estimate: Estimate, rule: int, key: str) -> str:
    measure = SHOWN_MEASURES[key]
    mean, error = estimate.of(rule, key)
    return with_error(measure.factor * mean, measure.factor * error, measure.shape)


def _gain(estimate: Estimate, rule: int, key: str) -> str:
    measure = SHOWN_MEASURES[key]
    mean, error = estimate.of(rule, f"{key}_gain")
    return with_error(measure.factor * mean, measure.factor * error, measure.gain_shape)


def _entry_text(fit: Coefficients, entry: Entry | None) -> str:
    """A line in log n; of other rules, which are too long for a table, the least and most beta."""
    if entry is None:
        return "1"
    if not fit.rule.by_entropy:
        return polynomial(entry.coefficients)
    return beta_text(fit, entry)
