"""Scores on logits in words: a table by set size, one by head, and all of it for a machine."""

import math
from typing import Any

from rich import box
from rich.table import Table

from calibrate.evaluation.baselines import label
from calibrate.evaluation.score_logits import MEASURES, Estimate, LogitScores
from calibrate.files.collection import BAD
from calibrate.report.comparison_views import NOTHING, with_error
from calibrate.report.console import print_whole, stdout
from calibrate.report.per_head_views import SHOWN
from calibrate.report.verdict import verdict_on_logits

FIRST_FIT = 2  # rules: plain softmax, the paper's numbers, and then fits
# What each measure is called, its unit, what to multiply it by, and its digits; then its gain's.
TOLD = {
    "log_p": ("log-probability of the target, nats", 1, 3, 4),
    "p": ("probability of the target, % (gains in points)", 100, 1, 2),
}
Cells = tuple[list[str], list[list[str]]]  # headings, rows


def print_scores(scores: LogitScores) -> None:
    """By set size and by head, each number with its standard error, and a sentence on each fit."""
    stdout.print(f"\nScores on the rows of {scores.name}", style="bold")
    stdout.print(f"  scored     {rows_in_words(scores)}")
    for measure, (told, *_) in TOLD.items():
        title = f"\nMean {told} ± standard error; gain over plain softmax, row by row"
        _print_table(title, size_cells(scores, measure))
    if len(scores.heads) > 1:
        headings, rows, rest = head_cells(scores)
        by = label(scores.rules[lead(scores)])
        title = f"\nBy head, the largest gain of {by} first (log p in nats, p in %, sizes alike)"
        _print_table(title, (headings, rows))
        if rest:
            stdout.print(f"  and {rest:,} more (--json lists them all)")
    for rule in range(FIRST_FIT, len(scores.rules)):
        stdout.print(f"  verdict    {verdict_on_logits(scores, rule)}")


def _print_table(title: str, cells: Cells) -> None:
    headings, rows = cells
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "head" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    print_whole(table)


def rows_in_words(scores: LogitScores) -> str:
    """How many were scored, of how many heads, and what was left out."""
    bad = {reason: sum(size[reason] for size in scores.counts) for reason in BAD}
    left_out = ", ".join(f"{n:,} {reason.replace('_', ' ')}" for reason, n in bad.items() if n)
    heads = f"{len(scores.heads):,} head{'s' * (len(scores.heads) > 1)}"
    by = ", which count by their weights" * scores.weighed
    return f"{scores.estimate().rows:,} rows of {heads}{by}; left out: {left_out or 'none'}"


def lead(scores: LogitScores) -> int:
    """The rule that heads are ranked by: the first fit, or else the paper's numbers."""
    return min(FIRST_FIT, len(scores.rules) - 1)


def size_cells(scores: LogitScores, measure: str) -> Cells:
    """One measure of every rule, a row per set size, and one of all sizes alike."""
    headings = ["n", "rows", label("plain")]
    for name in scores.rules[1:]:
        headings += [label(name), "gain"]
    sizes = [(f"{n:,}", scores.estimate(size=i)) for i, n in enumerate(scores.sizes)]
    if len(sizes) > 1:
        sizes.append(("all, alike", scores.estimate()))
    rows = []
    for n_items, found in sizes:
        row = [n_items, f"{found.rows:,}", _cell(found, 0, measure)]
        for rule in range(1, len(scores.rules)):
            row += [_cell(found, rule, measure), _gain(found, rule, measure)]
        rows.append(row)
    return headings, rows


def head_cells(scores: LogitScores) -> tuple[list[str], list[list[str]], int]:
    """A row per head, the largest gain first, sizes alike; and how many heads are left out.

    Of the paper's numbers, which are a yardstick here, the gain alone.
    """
    fits = range(FIRST_FIT, len(scores.rules))
    headings = ["head", "rows", "log p, plain", "p, plain"]
    for rule in fits:
        headings += [f"gain of {scores.rules[rule]}", "p"]
    headings.append("gain of the paper's")
    ranked = scores.ranked(lead(scores))
    rows = []
    for head in ranked[:SHOWN]:
        found = scores.estimate(head=head)
        row = [scores.head_in_words(head), f"{found.rows:,}"]
        row += [_cell(found, 0, "log_p"), _cell(found, 0, "p")]
        for rule in fits:
            if scores.names(rule, head):
                row += [_gain(found, rule, "log_p"), _cell(found, rule, "p")]
            else:
                row += ["as it is", NOTHING]
        rows.append([*row, _gain(found, FIRST_FIT - 1, "log_p")])
    return headings, rows, max(0, len(ranked) - SHOWN)


def _cell(found: Estimate, rule: int, measure: str) -> str:
    _, factor, digits, _ = TOLD[measure]
    mean, error = found.of(rule, measure)
    return with_error(factor * mean, factor * error, f".{digits}f")


def _gain(found: Estimate, rule: int, measure: str) -> str:
    _, factor, _, digits = TOLD[measure]
    mean, error = found.of(rule, f"{measure}_gain")
    return with_error(factor * mean, factor * error, f"+.{digits}f")


def scores_record(scores: LogitScores) -> dict[str, Any]:
    """All of it for a machine: by size, by head, and of each head at each size; null is nothing."""
    heads = [{"layer": layer, "head": head} for layer, head in scores.heads]
    rules = range(len(scores.rules))
    n_heads = range(len(heads))
    return {
        "logits": scores.name,
        "fingerprint": scores.fingerprint,
        "rules": [
            {
                "rule": scores.rules[i],
                "label": label(scores.rules[i]),
                "held_out": scores.held_out(i),
                "heads": sum(scores.names(i, j) for j in n_heads),
            }
            for i in rules
        ],
        "rows": scores.counts,
        "all": _estimate_record(scores, scores.estimate()),
        "sizes": [
            {"size": size} | _estimate_record(scores, scores.estimate(size=i))
            for i, size in enumerate(scores.sizes)
        ],
        "heads": [
            heads[j]
            | _estimate_record(scores, scores.estimate(head=j))
            | {
                "sizes": [
                    {"size": size} | _estimate_record(scores, scores.estimate(i, j))
                    for i, size in enumerate(scores.sizes)
                ]
            }
            for j in scores.ranked(lead(scores))
        ],
        "verdicts": {
            scores.rules[i]: verdict_on_logits(scores, i) for i in rules if i >= FIRST_FIT
        },
    }


def _estimate_record(scores: LogitScores, found: Estimate) -> dict[str, Any]:
    def told(rule: int, measure: str) -> dict[str, float | None]:
        both = zip(("mean", "error"), found.of(rule, measure), strict=True)
        return {name: x if math.isfinite(x) else None for name, x in both}

    return {
        "rows": found.rows,
        "rules": {
            name: {measure: told(rule, measure) for measure in MEASURES}
            for rule, name in enumerate(scores.rules)
        },
    }
