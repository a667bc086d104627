"""Tables of a fit's selection: kinds of rule that were compared, and interpolation weights."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from calibrate.core.rule_kinds import kind_label
from calibrate.errors import command
from calibrate.evidence.baselines import chosen_kind
from calibrate.evidence.estimate import NOTHING, Estimate, decimal
from calibrate.fitting.options import LIKELIHOOD
from calibrate.report.blocks import Table
from calibrate.store.coefficients import Coefficients

GAIN_NOTE = "Gain: in log-likelihood over the baseline."
PRIOR_NOTE = "Intervals include ten pseudo-observations drawn from the baseline."
TRADE_NOTE = (
    "beta(s) = 1 + s (beta - 1) at interpolation weight s; "
    f"`{command('model fit', interpolation=True)}` publishes another one. KL of retention text: "
    "per token, from the baseline's predictions."
)


class Column(NamedTuple):
    """A column of a table of records: numbers of each, and how they are shown."""

    heading: str
    shape: str
    fields: tuple[str, ...]  # of a record
    factor: int = 1

    def is_in(self, record: Mapping[str, Any]) -> bool:
        """True if a record has the numbers."""
        return record.keys() >= set(self.fields)

    def cell(self, record: Mapping[str, Any]) -> str:
        """The numbers of a record; a dot for what it lacks."""
        if not self.is_in(record):
            return NOTHING
        return " to ".join(decimal(self.factor * record[x], self.shape) for x in self.fields)


INTERVAL = Column("95 % interval", "+.4f", ("low", "high"))
OF_CANDIDATES = (
    Column("log-likelihood", ".4f", ("log_p",)),
    Column("gain", "+.4f", ("gain",)),
    INTERVAL,
    Column("probability, %", ".1f", ("p",), factor=100),
)
GAIN_KL_COLUMNS = (
    Column("gain in log-likelihood", "+.3f", ("gain", "gain_error")),
    Column("gain in calibration templates", "+.3f", ("seen", "seen_error")),
    Column("KL of retention text", ".4f", ("kl", "kl_error")),
    Column("99.9 % KL", ".3f", ("kl_999",)),
    Column("same top token, %", ".2f", ("same_top",), factor=100),
)
MAX_NUMBERS = 2  # coefficients of a rule that a table has room for


def selection_tables(fit: Coefficients) -> list[Table]:
    """The kinds of a head that were compared, each at its smallest q, and the selected rule.

    A kind has a record for each q, the smallest first, in `quality.candidates`; files of schema 1.1
    name neither q, which was 0, nor p. Every field of a record is optional. No table if the file
    has none.
    """
    records = [record for record in fit.quality.get("candidates", []) if "kind" in record]
    firsts = dict[str, Mapping[str, Any]]()
    for record in records:
        firsts.setdefault(record["kind"], record)
    if not firsts or fit.of_whole_model:
        return []
    objective = _objective(firsts)
    label = _with_objective if _is_mixed(firsts) else _label
    shown = {label(record): record for record in firsts.values()}
    if fit.has_heads:
        return [_kinds_table(shown, None, "", f"{objective}, means of heads that could be fitted")]
    chosen, q = chosen_kind(fit), fit.quality.get("q", 0)
    first = firsts.get(chosen, {})
    is_tuned = first.get("q", q) != q
    selected = label(first) if first else None
    if is_tuned:
        selected = f"selected: {chosen}, accuracy-tuned, q = {q:.2g}"
        tuned = (x for x in records if x["kind"] == chosen and x.get("q") == q)
        shown[selected] = next(tuned, {"coefficients": fit.only.coefficients})
    return [_kinds_table(shown, selected, "" if is_tuned else "selected", objective)]


def _objective(firsts: Mapping[str, Mapping[str, Any]]) -> str:
    """Names the q that all kinds were fitted with; empty if the records have several objectives."""
    if _is_mixed(firsts):
        return ""
    given = {record.get("q", 0) for record in firsts.values()}
    if given == {0}:
        return " at maximum likelihood (q = 0)"
    return f" at q = {given.pop():.3g}" if len(given) == 1 else ""


def _is_mixed(firsts: Mapping[str, Mapping[str, Any]]) -> bool:
    """True if some rule was fitted by least squares, and so not by the loss of the others."""
    return any(record.get("loss", LIKELIHOOD) != LIKELIHOOD for record in firsts.values())


def _label(record: Mapping[str, Any]) -> str:
    return kind_label(record["kind"])


def _with_objective(record: Mapping[str, Any]) -> str:
    """The kind of a record and its objective: "constant (maximum likelihood)"."""
    loss = record.get("loss", LIKELIHOOD)
    return f"{_label(record)} ({'maximum likelihood' if loss == LIKELIHOOD else loss})"


def _kinds_table(
    shown: Mapping[str, Mapping[str, Any]], selected: str | None, word: str, objective: str
) -> Table:
    """A row for each record; columns that no record has are left out."""
    known = [column for column in OF_CANDIDATES if any(map(column.is_in, shown.values()))]
    columns = ["rule", *(column.heading for column in known)]
    rows = [[label, *(column.cell(record) for column in known)] for label, record in shown.items()]
    numbers = [_numbers(record) for record in shown.values()]
    if any(numbers):
        columns.append("coefficients")
        rows = [[*row, text] for row, text in zip(rows, numbers, strict=True)]
    if word and selected is not None:
        columns.append("")
        rows = [[*row, word if row[0] == selected else ""] for row in rows]
    note = f"{GAIN_NOTE} {PRIOR_NOTE}" if INTERVAL in known else GAIN_NOTE
    title = f"Kinds of rule{objective}, held out, nats"
    return Table(columns, rows, title, note, left=["rule", "coefficients", ""])


def _numbers(record: Mapping[str, Any]) -> str:
    """The coefficients of a record by name, if they are few; "" else."""
    numbers = list(record.get("coefficients", ()))
    if record.get("kind") == "constant" or not any(numbers[:-1]):
        numbers = numbers[-1:]
    if not 0 < len(numbers) <= MAX_NUMBERS:
        return ""
    names = ("kappa", "b") if len(numbers) == 2 else ("beta",)
    return ", ".join(f"{name} = {x:.3g}" for name, x in zip(names, numbers, strict=True))


def gain_kl_tables(fit: Coefficients) -> list[Table]:
    """Gain and cost of a fit of a model by interpolation weight; none if not in the file."""
    trade = fit.quality.get("trade", [])
    chosen = fit.source.get("options", {}).get("strength")
    known = [column for column in GAIN_KL_COLUMNS if any(column.fields[0] in x for x in trade)]
    rows = []
    for record in trade:
        cells = [_estimate(record, column) for column in known]
        selected = "selected" if record.get("strength") == chosen else ""
        rows.append([f"{record.get('strength', math.nan):g}", *cells, selected])
    columns = ["interpolation weight s", *(column.heading for column in known), ""]
    title = "Gain and cost by interpolation weight, held out, nats"
    return [Table(columns, rows, title, TRADE_NOTE, left=[""])] if rows else []


def _estimate(record: Mapping[str, Any], column: Column) -> str:
    """A number; or a mean with its standard error, and without that where a record lacks it."""
    if len(column.fields) == 1:
        return column.cell(record)
    return Estimate(*(record.get(x, math.nan) for x in column.fields)).shown(column.shape)
