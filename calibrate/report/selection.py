"""What a fit's file says of its choice: the kinds of rule that were compared, and how sharp."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calibrate.evidence.baselines import kind_label
from calibrate.evidence.estimate import NOTHING
from calibrate.evidence.verdict import chosen_kind, sharpness_tried
from calibrate.files.coefficients import Coefficients
from calibrate.report.blocks import Block, Heading, Table, Text
from calibrate.report.rule_words import value_text
from calibrate.rows.sharpness import KEPT

CHOSEN = "chosen"
NOTE = "The lower end of an interval allows for targets that these rows do not show."
_COLUMNS = {  # heading: how fields of a record are shown; a column without any field is left out
    "log p": ("{:.4f}", ("log_p",)),
    "gain over plain": ("{:+.4f}", ("gain",)),
    "95 % interval": ("{:+.4f} to {:+.4f}", ("low", "high")),
    "p": ("{:.1%}", ("p",)),
}

_Records = Sequence[Mapping[str, Any]]


def selection_section(fit: Coefficients) -> Iterable[Block]:
    """The tables under a heading, with the verdict of the fit; nothing if the file has none."""
    if tables := selection_tables(fit):
        yield Heading(
            "Which kind of rule, and how sharp" if len(tables) > 1 else "Which kind of rule"
        )
        verdict = value_text(fit.quality.get("verdict", ""))
        yield Text(f"{verdict[:1].upper()}{verdict[1:]}.")
        yield from tables


def selection_tables(fit: Coefficients) -> list[Table]:
    """The kinds that were compared, and, if several were tried, the values of q of the chosen one.

    A kind has a record for each q, the smallest first, in `quality.candidates`; files of schema 1.1
    name neither q, which was 0, nor p. Every field of a record is optional.
    """
    records = [record for record in fit.quality.get("candidates", []) if "kind" in record]
    kinds = list({record["kind"]: record for record in reversed(records)}.values())[::-1]
    tried, chosen = sharpness_tried(fit)
    tables = [_kinds_table(kinds, chosen_kind(fit))] if kinds else []
    return [*tables, _sharpness_table(tried, chosen)] if chosen else tables


def _kinds_table(records: _Records, chosen: str) -> Table:
    values = {record.get("q", 0) for record in records}
    at = f" at q = {values.pop():g}" if len(values) == 1 and values != {0} else ""
    labels = [kind_label(record["kind"]) for record in records]
    states = [CHOSEN if record["kind"] == chosen else "" for record in records]
    return _table("rule", records, labels, states, f"Kinds of rule{at}, held out, nats", NOTE)


def _sharpness_table(records: _Records, chosen: Mapping[str, Any]) -> Table:
    """Rules of one kind, the least q first."""
    best = records[0]
    why = f"the largest that keeps {100 * KEPT:.0f} % of the gain in log p"
    if chosen is best:
        why = f"as no larger one {why.removeprefix('the largest that ')}"
    else:
        why += f" ({chosen['gain']:.4f} of {best['gain']:.4f} nats)"
    note = (
        "q is the dial of sharpness: a fit maximises the mean of p^q, or of log p at q = 0; the "
        f"larger q, the sharper it is. Chosen: q = {chosen['q']:g}, {why}."
    )
    labels = [f"{record['q']:g}" if record["q"] else "0 (log p)" for record in records]
    states = [CHOSEN if record is chosen else "" for record in records]
    return _table("q", records, labels, states, "How sharp, by the q of this kind, nats", note)


def _table(
    heading: str, records: _Records, labels: list[str], states: list[str], title: str, note: str
) -> Table:
    """A line per record, with its label, its scores and its state."""
    shown = {
        name: [_cell(record, *column) for record in records] for name, column in _COLUMNS.items()
    }
    shown = {name: cells for name, cells in shown.items() if set(cells) != {NOTHING}}
    columns = {heading: labels, **shown, "": states}
    rows = list(zip(*columns.values(), strict=True))
    return Table(list(columns), rows, title, note, left=[heading, ""])


def _cell(record: Mapping[str, Any], shape: str, keys: Sequence[str]) -> str:
    """Numbers of a record; a dot if it lacks one."""
    known = all(key in record for key in keys)
    return shape.format(*(record[key] for key in keys)) if known else NOTHING
