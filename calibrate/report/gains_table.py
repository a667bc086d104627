"""Gains of a fit and its rivals on logits, by set size: records that print as a table."""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import escape

from calibrate.evidence.baselines import label
from calibrate.evidence.evidence import LOG_P, Evidence, P
from calibrate.report.blocks import GAP, Table
from calibrate.report.wording import with_error


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
    """Records of each rule at each size, and of all sizes together; prints as a table."""

    def block(self) -> Table:
        """log p of plain softmax, and what rules add to it: a line for each size."""
        rules = list(dict.fromkeys(row.rule for row in self))
        lines = []
        for i in range(0, len(self), len(rules)):
            plain, *others = self[i : i + len(rules)]
            size = "all" if plain.size is None else f"{plain.size:,}"
            gains = [with_error(row.gain, row.error, "+.3f") for row in others]
            lines.append([size, f"{plain.rows:,}", f"{plain.log_p:.3f}", *gains])
        title = "Mean log p of the target in nats, and what rules add ± standard error"
        columns = ["n", "rows", *(rule.removesuffix(", fitted") for rule in rules)]
        return Table(columns, lines, title, keys=3)

    def __str__(self) -> str:
        return "\n\n".join(map(_text, self.block().split()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        block = self.block()

        def line(cells: Sequence[str], tag: str) -> str:
            return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

        lines = [line(block.columns, "th"), *(line(row, "td") for row in block.rows)]
        return f"<table><caption>{escape(block.title)}</caption>{''.join(lines)}</table>"


def _text(block: Table) -> str:
    widths = block.widths()

    def line(cells: Sequence[str]) -> str:
        return (" " * GAP).join(cell.rjust(n) for cell, n in zip(cells, widths, strict=True))

    return "\n".join([block.title] * bool(block.title) + [*map(line, [block.columns, *block.rows])])


def gains_table(evidence: Evidence) -> GainsTable:
    """The records of all rules that were scored; plain softmax is the first of each size."""
    parts: list[tuple[int | None, Evidence]] = list(evidence.by("size").items())
    if len(parts) > 1:
        parts.append((None, evidence))
    return GainsTable(_gain_row(size, part, rule) for size, part in parts for rule in part.rules)


def _gain_row(size: int | None, part: Evidence, rule: str) -> GainRow:
    log_p, p = (float(part.mean(rule, measure).mean) for measure in (LOG_P, P))
    gain = part.gain(rule, LOG_P)
    return GainRow(size, part.n, label(rule), log_p, p, float(gain.mean), float(gain.error))
