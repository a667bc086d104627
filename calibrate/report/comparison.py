"""Rules compared on the same items: all sizes together, and by size."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace

from calibrate.core.rule import CONSTANT
from calibrate.evidence.baselines import HARD, PAPER, is_infinite
from calibrate.evidence.calibration_error import expected_calibration_error, reliability_of
from calibrate.evidence.estimate import MIN_GAIN, NOTHING
from calibrate.evidence.evidence import BASELINE, Evidence, OptionalHeadId
from calibrate.evidence.metrics import CONFIDENCE, KL, LOG_P, PER_CENT, RIGHT, SETS, Metric
from calibrate.evidence.verdict import best_rules
from calibrate.report.blocks import SHOWN_HEADS, Table, and_more
from calibrate.report.labels import (
    THIS_FIT,
    label,
    mean_text,
    metric_label,
    metric_title,
)
from calibrate.report.rules import entry_heading, entry_text
from calibrate.store.fit import Fit

BEST = "*"  # before the NLL of the best rules, see `best_rules`
BEST_NOTE = (
    f"{BEST} best NLL, within {MIN_GAIN} nats of the best, or not significantly worse (paired "
    "test, 5 %)."
)
PRACTICE_NOTE = f"Differences below {MIN_GAIN} nats do not matter in practice."
NEW_INPUTS_NOTE = "These inputs are new: the NLL of the verdict is that of the collected inputs."
GAIN_NOTE = "Gain: paired difference in log-likelihood, nats, ± standard error."
ECE = Metric("ece", "expected calibration error", "ECE", PER_CENT, 100, decimals=1)
ECE_NOTE = (
    "ECE: expected calibration error, the mean distance between the top item's probability and the "
    "share of inputs where it is the target; over several n, errors of opposite sign cancel."
)
MISRANKED_NOTE = (
    "Misranked: collected inputs in which another item has a higher logit than the target."
)
TEXT_NOTE = (
    "NLL: baseline → fit. KL: mean divergence of the next token's distribution from the "
    "baseline's, ± standard error."
)
COLUMN_WIDTH = 18  # letters of a line of a heading

Names = Mapping[str, str]  # rules, and their names for people
Parts = Mapping[str, Evidence]  # items by the name of their row in a table


def scored_items(items: Evidence) -> str:
    """The items, their number and their source: "9,216 new inputs of max-retrieval-0"."""
    new = "new " if items.of.items == SETS else ""
    name = f" of {items.of.name}" if items.of.name else ""
    return f"{items.n:,} {new}{items.of.items.name}{name}"


def comparison_table(items: Evidence, names: Names, own: str = "") -> Table:
    """A row for each rule, the best NLL first: its scores, and its gain over the baseline.

    Args:
      items: of all sizes together.
      names: of the rules to compare.
      own: the only fit among them, whose row is marked, and over which others gain; "" of several.
    """
    means = {rule: float(items.mean(rule, LOG_P).mean) for rule in names}
    rules = sorted(names, key=lambda rule: (is_infinite(rule, LOG_P), -means[rule]))
    scores = scores_of(items)
    columns = {"rule": [names[rule] for rule in rules]}
    columns |= {_title(x, items): _cells(items, rules, x) for x in scores}
    columns["gain over the baseline"] = _gains(items, rules, BASELINE)
    if own and len(rules) > 2:
        columns[f"gain over {names[own]}"] = _gains(items, rules, own, more_decimals=1)
    rows = list(zip(*columns.values(), strict=True))
    title = f"Rules on {scored_items(items)}"
    note = f"{BEST_NOTE} {PRACTICE_NOTE}"
    more = f"{GAIN_NOTE} {ECE_NOTE if ECE in scores else ''}".strip()
    marked = [rules.index(own)] if own else []
    return Table(list(columns), rows, title, note, more, ["rule"], marked, _best_cells(rows))


def means_table(parts: Parts, means: Parts, names: Names, score: Metric, by: str) -> Table:
    """The mean of a score: a row for each part and then for means of parts, a column for each rule.

    Args:
      parts: items by size, or by template and size.
      means: items of several parts.
      names: of the rules.
      score: the number to show.
      by: heading of the parts.
    """
    rows = {**parts, **means}
    rules = [rule for rule in names if not is_infinite(rule, score)]
    cells = [[name, *_cells(items, rules, score)] for name, items in rows.items()]
    title = metric_title(score, next(iter(rows.values())).of.items)
    note = BEST_NOTE if score == LOG_P else ""
    table = _table_of_parts(parts, means, [names[rule] for rule in rules], cells, by)
    return replace(table, title=f"{title}, by {by}", note=note, bold=_best_cells(cells))


def gains_table(parts: Parts, means: Parts, names: Names, by: str) -> Table:
    """The paired gains over the baseline, with their errors; arguments as of `means_table`."""
    rules = [rule for rule in names if rule != BASELINE and not is_infinite(rule, LOG_P)]
    cells = [[name, *_gains(items, rules, BASELINE)] for name, items in {**parts, **means}.items()]
    table = _table_of_parts(parts, means, [names[rule] for rule in rules], cells, by)
    return replace(table, title=f"Gain over the baseline, nats, by {by}", note=GAIN_NOTE)


def _table_of_parts(
    parts: Parts, means: Parts, headings: Sequence[str], cells: list[list[str]], by: str
) -> Table:
    """A row for each part of the items; their numbers of items are shown if they differ."""
    rows = [*parts.values(), *means.values()]
    columns = [by, *map(wrapped, headings)]
    if len({items.n for items in parts.values()}) > 1:
        columns.append(rows[0].of.items.name)
        cells = [[*row, f"{items.n:,}"] for row, items in zip(cells, rows, strict=True)]
    left = [by] if any(" " in row[0] for row in cells) else []
    return Table(columns, cells, left=left, marked=range(len(parts), len(rows)))


def heads_table(
    heads: Sequence[tuple[str, OptionalHeadId, Evidence]], names: Names, fits: Sequence[str]
) -> Table:
    """The NLL of the baseline and the gain of each fit, by head; of a single fit also its rule.

    Args:
      heads: (name, layer and head, items), in the order of the rows.
      names: of the rules.
      fits: the rules with a column.
    """
    _, _, items = heads[0]
    fit = items.fits.get(fits[0]) if len(fits) == 1 else None
    columns = ["head", "inputs", "NLL of the baseline", *(f"gain of {names[x]}" for x in fits)]
    rows = []
    for name, head, part in heads[:SHOWN_HEADS]:
        gains = [
            _gains(part, [rule], BASELINE)[0] if part.names(rule, head) else "unchanged"
            for rule in fits
        ]
        row = [name, f"{part.n:,}", _cell(part, BASELINE, LOG_P), *gains]
        rows.append(row if fit is None else [*row, entry_text(fit, fit.entry_of(*head))])
    if fit is not None:
        columns.append(entry_heading(fit))
    title = f"Gain by head, nats, the largest of {names[fits[0]]} first"
    note = f"{GAIN_NOTE}{and_more(len(heads))}"
    left = [columns[0], *columns[4:]] if fit is not None else columns[:1]
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


def rules_table(items: Evidence, fit: Fit, misranked: Mapping[int, str]) -> Table:
    """Accuracy by n of the baseline, a fit, a constant, the published polynomial and argmax.

    Args:
      items: scores on new inputs. The table shows accuracy, or NLL if the head has none.
      fit: one of the rules, by its reference.
      misranked: numbers of misranked collected inputs, by size.
    """
    names = {BASELINE: label(BASELINE), fit.reference: f"{THIS_FIT}: {fit.rule.kind}"}
    names |= {CONSTANT: "constant (maximum likelihood)", PAPER: label(PAPER), HARD: label(HARD)}
    rules = [rule for rule in names if rule in items.rules]
    first, *others = scores_of(items)
    by_size = items.by("size")
    rows = [
        [f"{n:,}", misranked.get(n, ""), *(_cell(part, rule, first) for rule in rules)]
        for n, part in by_size.items()
    ]
    of_all = {_title(score, items): score for score in others}
    if len(by_size) > 1:
        of_all = {"all": first, **of_all}
    rows += [
        [name, "", *(_cell(items, rule, score) for rule in rules)] for name, score in of_all.items()
    ]
    headings = [wrapped(names[rule]) for rule in rules]
    title = f"{metric_title(first, items.of.items)}, of {items.n:,} new inputs"
    note = " ".join([NEW_INPUTS_NOTE, MISRANKED_NOTE, *[ECE_NOTE] * (ECE in others)])
    marked = range(len(by_size), len(rows))
    return Table(["n", "misranked", *headings], rows, title, note, marked=marked)


def scores_of(items: Evidence) -> list[Metric]:
    """The scores that are compared: accuracy, NLL and ECE, as far as they are known."""
    known = {RIGHT: RIGHT in items.values, LOG_P: True, ECE: CONFIDENCE in items.values}
    return [score for score, is_known in known.items() if is_known]


def wrapped(heading: str) -> str:
    """A heading in lines of at most `COLUMN_WIDTH` letters."""
    return "\n".join(textwrap.wrap(heading, width=COLUMN_WIDTH))


def _title(score: Metric, items: Evidence) -> str:
    """The heading of a score with its unit: "NLL, nats"."""
    return f"{metric_label(score, items.of.items)}, {score.unit}"


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


def _best_cells(rows: Sequence[Sequence[str]]) -> set[tuple[int, int]]:
    """(row, column) of the cells that are marked as best."""
    return {(i, j) for i, row in enumerate(rows) for j, cell in enumerate(row) if cell[:1] == BEST}


def _gains(items: Evidence, rules: Sequence[str], over: str, more_decimals: int = 0) -> list[str]:
    """The paired gain in log-likelihood of each rule over another."""
    more_decimals += int(not items.answers.n)  # text: per token
    return [
        ""
        if rule == over
        else NOTHING
        if is_infinite(rule, LOG_P)
        else items.gain(rule, LOG_P, over).shown(f"+.{LOG_P.decimals + more_decimals}f")
        for rule in rules
    ]
