"""`Fit.table`: gains of rules over the baseline by set size, as records that print as tables."""

from typing import NamedTuple

from calibrate.evidence.evidence import Evidence
from calibrate.evidence.metrics import LOG_P, P
from calibrate.report.blocks import Table
from calibrate.report.labels import described
from calibrate.report.scores_tables import ScoredRules
from calibrate.report.sentences import margin_clauses
from calibrate.report.terminal import as_text


class GainRow(NamedTuple):
    """One rule on the rows of one set size; means and standard errors."""

    size: int | None  # None: all sizes together
    rows: int
    rule: str
    log_p: float  # of the target, nats
    p: float  # probability of the target
    gain: float  # of log p over the baseline, row by row
    error: float  # standard error of the gain


class GainsTable(tuple[GainRow, ...]):
    """Records of each rule at each size, and of all sizes together; prints as tables."""

    tables: list[Table]  # as `calibrate evaluate` prints them
    notes: list[str]  # the rule of the fit, and what it loses where a margin limits that

    def __str__(self) -> str:
        first, *others = map(as_text, self.tables)
        return "\n\n".join(["\n".join([first, *self.notes]), *others])

    __repr__ = __str__


def gains_table(evidence: Evidence, fit: str) -> GainsTable:
    """The records of all rules; the baseline is the first of each size.

    Args:
      evidence: of rows.
      fit: the rule that was fitted.
    """
    scored = ScoredRules(evidence, (fit,))
    parts: dict[int | None, Evidence] = dict(evidence.by("size"))
    if len(parts) > 1:
        parts[None] = evidence
    table = GainsTable(
        _gain_row(size, part, rule, scored.label(rule))
        for size, part in parts.items()
        for rule in scored.rules
    )
    table.tables = scored.size_tables(LOG_P)
    words = described(evidence.fits[fit])
    of_fit = [f"{fit}: {words}"] if words else []
    table.notes = [*of_fit, *margin_clauses(evidence, fit)]
    return table


def _gain_row(size: int | None, items: Evidence, rule: str, label: str) -> GainRow:
    gain = items.gain(rule, LOG_P)
    log_p, p = (float(items.mean(rule, metric).mean) for metric in (LOG_P, P))
    return GainRow(size, items.n, label, log_p, p, float(gain.mean), float(gain.error))
