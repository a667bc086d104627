"""What a fit's file says of its choice: the kinds of rule that were compared."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calibrate.evidence.baselines import chosen_kind, kind_label
from calibrate.evidence.estimate import NOTHING
from calibrate.files.coefficients import Coefficients
from calibrate.report.blocks import Block, Heading, Table, Text
from calibrate.report.rule_words import value_text

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
        yield Heading("Which kind of rule")
        verdict = value_text(fit.quality.get("verdict", ""))
        yield Text(f"{verdict[:1].upper()}{verdict[1:]}.")
        yield from tables


def selection_tables(fit: Coefficients) -> list[Table]:
    """The kinds that were compared, each at its smallest q; none if the file has none.

    A kind has a record for each q, the smallest first, in `quality.candidates`; files of schema 1.1
    name neither q, which was 0, nor p. Every field of a record is optional.
    """
    records = [record for record in fit.quality.get("candidates", []) if "kind" in record]
    kinds = list({record["kind"]: record for record in reversed(records)}.values())[::-1]
    return [_kinds_table(kinds, chosen_kind(fit))] if kinds else []


def _kinds_table(records: _Records, chosen: str) -> Table:
    values = {record.get("q", 0) for record in records}
    at = f" at q = {values.pop():g}" if len(values) == 1 and values != {0} else ""
    labels = [kind_label(record["kind"]) for record in records]
    states = [CHOSEN if record["kind"] == chosen else "" for record in records]
    return _table("rule", records, labels, states, f"Kinds of rule{at}, held out, nats", NOTE)


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
