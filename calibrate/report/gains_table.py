"""Gains of a fit and its rivals on logits, by set size: records that print as a table."""

from typing import NamedTuple

from markupsafe import escape

from calibrate.evidence.evidence import LOG_P, Evidence, P
from calibrate.report.blocks import Table
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.terminal import as_text


class GainRow(NamedTuple):
    """One rule on the rows of one set size; means and standard errors."""

    size: int | None  # None: all sizes together
    rows: int
    rule: str
    log_p: float  # of the target, nats
    p: float  # probability of the target
    gain: float  # of log p over plain softmax, row by row
    error: float  # standard error of the gain


class GainsTable(tuple[GainRow, ...]):
    """Records of each rule at each size, and of all sizes together; prints as tables."""

    tables: list[Table]  # as `calibrate evaluate` prints them

    def __str__(self) -> str:
        return "\n\n".join(map(as_text, self.tables))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(map(_html, self.tables))


def gains_table(evidence: Evidence, fit: str) -> GainsTable:
    """The records of all rules; plain softmax is the first of each size.

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
    return made


def _html(table: Table) -> str:
    rows = [(table.columns, "th"), *((row, "td") for row in table.rows)]
    lines = (
        f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
        for cells, tag in rows
    )
    return f"<table><caption>{escape(table.title)}</caption>{''.join(lines)}</table>"
