"""Tables of rules on the same items: all sizes together, by size, by head and by text domain."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from calibrate.evidence.baselines import is_infinite
from calibrate.evidence.calibration_error import expected_calibration_error, reliability_of
from calibrate.evidence.estimate import MIN_GAIN, NOTHING
from calibrate.evidence.evidence import BASELINE, Evidence, OptionalHeadId
from calibrate.evidence.metrics import CONFIDENCE, KL, LOG_P, PER_CENT, RIGHT, SETS, Metric
from calibrate.evidence.significance import best_rules
from calibrate.report.blocks import BEST, SHOWN_HEADS, Table, and_more
from calibrate.report.labels import capitalised, mean_text, metric_title
from calibrate.report.rule_text import entry_heading, entry_text
from calibrate.rows.rows import head_label

BEST_NOTE = (
    f"{BEST} the best NLL, or one within {MIN_GAIN} nats of it or not significantly worse (paired "
    "test, 5 %)."
)
PRACTICE_NOTE = f"We treat differences below {MIN_GAIN} nats as negligible."
NEW_INPUTS_NOTE = (
    "The verdict is from cross-validation on the collected inputs, this table from new inputs."
)
GAIN_NOTE = "Gain: paired difference in log-likelihood, nats, ± standard error."
HEADS_NOTE = "A model may lose where its heads gain: `calibrate model evaluate` scores its answers."
ACCURACY_NOTE = (
    "Accuracy: of the head's output, so it can change although the order of the items does not."
)
ECE = Metric("ece", "expected calibration error", "ECE", PER_CENT, 100, decimals=1)
ECE_NOTE = (
    "ECE: expected calibration error, the mean distance between the top item's probability and the "
    "share of inputs where it is the target; over several n, errors of opposite sign cancel."
)
TEXT_NOTE = (
    "NLL: baseline → fit. KL: mean divergence of the next token's distribution from the "
    "baseline's, ± standard error."
)
COLUMN_WIDTH = 18  # letters of a line of a heading

Names = Mapping[str, str]  # rules, and their names for people
Parts = Mapping[str, Evidence]  # items by the name of their row in a table


def comparison_table(items: Evidence, names: Names, own: str = "", note: str = "") -> Table:
    """A row for each rule, the best NLL first: its scores, and its gain over the baseline.

    Args:
      items: of all sizes together.
      names: of the rules to compare.
      own: the only fit among them, whose row is marked, and over which others gain; "" of several.
      note: the end of the note.
    """
    means = {rule: float(items.mean(rule, LOG_P).mean) for rule in names}
    rules = sorted(names, key=lambda rule: (is_infinite(rule, LOG_P), -means[rule]))
    columns = {"rule": [names[rule] for rule in rules]}
    for score in scores_of(items):
        columns[metric_title(score, items.of.items)] = _cells(items, rules, score)
    columns[wrapped("gain over the baseline, nats")] = _gains(items, rules, BASELINE)
    if own and len(rules) > 2:
        over_own = _gains(items, rules, own, more_decimals=1)
        columns[wrapped(f"gain over {names[own]}, nats")] = over_own
    title = f"Rules on {items.n:,} {items.of.items.name} of {items.of.name}"
    more = [
        ACCURACY_NOTE if items.of.items == SETS and RIGHT in items.values else "",
        GAIN_NOTE,
        ECE_NOTE if CONFIDENCE in items.values else "",
    ]
    marked = [rules.index(own)] if own else []
    rows = list(zip(*columns.values(), strict=True))
    note = f"{BEST_NOTE} {PRACTICE_NOTE} {note}".strip()
    return Table(list(columns), rows, title, note, " ".join(filter(None, more)), ["rule"], marked)


def means_table(parts: Parts, means: Parts, names: Names, score: Metric, by: str) -> Table:
    """The mean of a score: a row for each part and then for means of parts, a column for each rule.

    Args:
      parts: items by size, or by template and size.
      means: items of several parts.
      names: of the rules.
      score: the number to show.
      by: heading of the parts.
    """
    rules = [rule for rule in names if not is_infinite(rule, score)]
    cells = [_cells(items, rules, score) for items in (*parts.values(), *means.values())]
    title = capitalised(metric_title(score, next(iter(parts.values())).of.items))
    note = BEST_NOTE if score == LOG_P else ""
    table = _table_of_parts(parts, means, [names[rule] for rule in rules], cells, by)
    return replace(table, title=f"{title}, by {by}", note=note)


def gains_table(parts: Parts, means: Parts, names: Names, by: str) -> Table:
    """The paired gains over the baseline, with their errors; arguments as of `means_table`."""
    rules = [rule for rule in names if rule != BASELINE and not is_infinite(rule, LOG_P)]
    cells = [_gains(items, rules, BASELINE) for items in (*parts.values(), *means.values())]
    table = _table_of_parts(parts, means, [names[rule] for rule in rules], cells, by)
    return replace(table, title=f"Gain over the baseline, nats, by {by}", note=GAIN_NOTE)


def _table_of_parts(
    parts: Parts, means: Parts, headings: Sequence[str], cells: Iterable[list[str]], by: str
) -> Table:
    """A row for each part of the items; their numbers of items are shown if they differ."""
    columns, rows = [by, *map(wrapped, headings)], {**parts, **means}
    lines = [[name, *row] for name, row in zip(rows, cells, strict=True)]
    if len({items.n for items in parts.values()}) > 1:
        columns.append(next(iter(rows.values())).of.items.name)
        lines = [[*row, f"{rows[row[0]].n:,}"] for row in lines]
    left = [by] if any(" " in name for name in rows) else []
    return Table(columns, lines, left=left, marked=range(len(parts), len(rows)))


def heads_table(
    heads: Sequence[tuple[OptionalHeadId, Evidence]], names: Names, fits: Sequence[str]
) -> Table:
    """The NLL of the baseline and the gain of each fit, by head; of a single fit also its rule.

    Args:
      heads: (layer and head, items), in the order of the rows.
      names: of the rules.
      fits: the rules with a column.
    """
    fit = heads[0][1].fits.get(fits[0]) if len(fits) == 1 else None
    columns = ["head", "inputs", "NLL of the baseline", *(f"gain of {names[x]}" for x in fits)]
    left = ["head"]
    if fit is not None:
        columns.append(entry_heading(fit))
        left.append(entry_heading(fit))
    rows = []
    for head, part in heads[:SHOWN_HEADS]:
        name = head_label(*head) or part.of.name
        row = [name, f"{part.n:,}", _cell(part, BASELINE, LOG_P)]
        for rule in fits:
            named = part.names(rule, head)
            row.append(_gains(part, [rule], BASELINE)[0] if named else "unchanged")
        rows.append(row if fit is None else [*row, entry_text(fit, fit.entry_of(*head))])
    title = f"Gain by head, nats, the largest of {names[fits[0]]} first"
    note = f"{GAIN_NOTE} {HEADS_NOTE}{and_more(len(heads))}"
    return Table([*map(wrapped, columns)], rows, title, note, left=left)


def text_table(text: Evidence, fit: str, name: str) -> Table:
    """The harm of a fit to retention text, by domain: NLL per token before and after, and KL."""
    parts = {str(domain): part for domain, part in text.by("template").items()}
    rows = {**parts, "all": text} if len(parts) > 1 else parts
    cells = [
        [
            domain,
            f"{part.n:,}",
            f"{_cell(part, BASELINE, LOG_P)} → {_cell(part, fit, LOG_P)}",
            part.mean(fit, KL).shown(f".{KL.decimals}f"),
        ]
        for domain, part in rows.items()
    ]
    columns = ["text", "windows", "NLL per token", "KL per token"]
    title = f"Retention text under {name}, nats"
    marked = range(len(parts), len(rows))
    return Table(columns, cells, title, TEXT_NOTE, left=["text"], marked=marked)


def scores_of(items: Evidence) -> list[Metric]:
    """The scores that are compared: accuracy, NLL and ECE, as far as they are known."""
    known = {RIGHT: RIGHT in items.values, LOG_P: True, ECE: CONFIDENCE in items.values}
    return [score for score, is_known in known.items() if is_known]


def wrapped(heading: str) -> str:
    """A heading in lines of at most `COLUMN_WIDTH` letters."""
    return "\n".join(textwrap.wrap(heading, width=COLUMN_WIDTH))


def _cells(items: Evidence, rules: Sequence[str], score: Metric) -> list[str]:
    """The score of each rule, with the best NLLs marked."""
    best = best_rules(items, rules) if score == LOG_P else []
    return [f"{BEST} " * (rule in best) + _cell(items, rule, score) for rule in rules]


def _cell(items: Evidence, rule: str, score: Metric) -> str:
    if is_infinite(rule, score):
        return NOTHING
    if score == ECE:
        return mean_text(expected_calibration_error(reliability_of(items, rule)), ECE)
    more_decimals = int(not items.answers.n)  # text: per token
    return mean_text(items.mean(rule, score).mean, score, more_decimals)


def _gains(items: Evidence, rules: Sequence[str], over: str, more_decimals: int = 0) -> list[str]:
    """The paired gain in log-likelihood of each rule over another."""
    shape = f"+.{LOG_P.decimals + more_decimals + int(not items.answers.n)}f"  # text: per token
    return [
        ""
        if rule == over
        else NOTHING
        if is_infinite(rule, LOG_P)
        else items.gain(rule, LOG_P, over).shown(shape)
        for rule in rules
    ]
