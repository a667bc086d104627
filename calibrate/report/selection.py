"""Tables of a fit's selection: kinds of rule that were compared, and interpolation weights."""

import math
from collections.abc import Mapping
from typing import Any

from calibrate.core.rule_kinds import kind_label
from calibrate.evidence.baselines import chosen_kind
from calibrate.evidence.estimate import NOTHING, Estimate, decimal
from calibrate.report.blocks import Table
from calibrate.store.coefficients import Coefficients

GAIN_NOTE = "Gain: in log-likelihood over the baseline."
PRIOR_NOTE = "Intervals include ten pseudo-observations drawn from the baseline."
TRADE_NOTE = (
    "beta(s) = 1 + s (beta - 1) at interpolation weight s; `calibrate model fit --interpolation` "
    "publishes another one. KL of retention text: per token, from the baseline's predictions."
)
_TRADED = {
    "gain": ("gain in log-likelihood", "+.3f"),
    "seen": ("gain in calibration templates", "+.3f"),
    "kl": ("KL of retention text", ".4f"),
}
INTERVAL = "95 % interval"
_COLUMNS = {  # heading: factor, shape and names of the fields of a record
    "log-likelihood": (1, ".4f", ("log_p",)),
    "gain": (1, "+.4f", ("gain",)),
    INTERVAL: (1, "+.4f", ("low", "high")),
    "probability, %": (100, ".1f", ("p",)),
}
MAX_NUMBERS = 2  # coefficients of a rule that a table has room for


def selection_tables(fit: Coefficients) -> list[Table]:
    """The kinds that were compared, each at its smallest q, and the selected rule if it has more.

    A kind has a record for each q, the smallest first, in `quality.candidates`; files of schema 1.1
    name neither q, which was 0, nor p. Every field of a record is optional. No table if the file
    has none.
    """
    records = [record for record in fit.quality.get("candidates", []) if "kind" in record]
    firsts = dict[str, Mapping[str, Any]]()
    for record in records:
        firsts.setdefault(record["kind"], record)
    if not firsts:
        return []
    chosen, q = chosen_kind(fit), fit.quality.get("q", 0)
    first = firsts.get(chosen, {})
    is_tuned = first.get("q", q) != q
    shown = {kind_label(kind): record for kind, record in firsts.items()}
    selected = kind_label(chosen) if chosen in firsts else None
    if is_tuned:
        selected = f"selected: {chosen}, accuracy-tuned, q = {q:.2g}"
        tuned = (x for x in records if x["kind"] == chosen and x.get("q") == q)
        shown[selected] = next(tuned, {"coefficients": fit.only.coefficients})
    return [_kinds_table(shown, selected, "" if is_tuned else "selected", _objective(firsts))]


def _objective(firsts: Mapping[str, Mapping[str, Any]]) -> str:
    """What the kinds were fitted by: their q, or no word where records do not agree on one."""
    given = {record.get("q", 0) for record in firsts.values()}
    if given == {0}:
        return " at maximum likelihood (q = 0)"
    return f" at q = {given.pop():.3g}" if len(given) == 1 else ""


def _kinds_table(
    shown: Mapping[str, Mapping[str, Any]], selected: str | None, word: str, objective: str
) -> Table:
    """A row for each record; columns that no record has are left out."""
    known = {
        heading: column
        for heading, column in _COLUMNS.items()
        if any(record.keys() >= set(column[2]) for record in shown.values())
    }
    columns = ["rule", *known]
    rows = [
        [label, *(_cell(record, *column) for column in known.values())]
        for label, record in shown.items()
    ]
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


def _cell(record: Mapping[str, Any], factor: int, shape: str, keys: tuple[str, ...]) -> str:
    """Numbers of a record; a dot for what it lacks."""
    if not record.keys() >= set(keys):
        return NOTHING
    return " to ".join(decimal(factor * record[key], shape) for key in keys)


def _numbers(record: Mapping[str, Any]) -> str:
    """The coefficients of a record by name, if they are few; "" else."""
    numbers = list(record.get("coefficients", ()))
    if record.get("kind") == "constant" or not any(numbers[:-1]):
        numbers = numbers[-1:]
    if not 0 < len(numbers) <= MAX_NUMBERS:
        return ""
    names = ("kappa", "b") if len(numbers) == 2 else ("beta",)
    return ", ".join(f"{name} = {x:.3g}" for name, x in zip(names, numbers, strict=True))


def trade_tables(fit: Coefficients) -> list[Table]:
    """What a fit of a model gains and costs by interpolation weight; none if the file has none."""
    trade = fit.quality.get("trade", [])
    chosen = fit.source.get("options", {}).get("strength")
    known = [name for name in _TRADED if any(name in record for record in trade)]
    rows = []
    for record in trade:
        estimates = [
            Estimate(record.get(name, math.nan), record.get(f"{name}_error", math.nan))
            for name in known
        ]
        shown = [x.shown(_TRADED[name][1]) for name, x in zip(known, estimates, strict=True)]
        is_chosen = record.get("strength") == chosen
        rows.append(
            [f"{record.get('strength', math.nan):g}", *shown, "selected" if is_chosen else ""]
        )
    columns = ["interpolation weight s", *(_TRADED[name][0] for name in known), ""]
    title = "Gain and cost by interpolation weight, held out, nats"
    return [Table(columns, rows, title, TRADE_NOTE, left=[""])] if rows else []
