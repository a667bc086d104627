"""What a fit's file says of its choice: the kinds of rule that were compared, and how sharp."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calibrate.evidence.baselines import kind_label
from calibrate.files.coefficients import Coefficients
from calibrate.maths.rule import ENTROPY_POLYNOMIAL
from calibrate.report.blocks import Block, Heading, Table, Text
from calibrate.report.wording import NOTHING
from calibrate.rows.sharpness import KEPT

CHOSEN = "chosen"
SCORES = ("log p", "gain over plain", "95 % interval")
NOTE = "The lower end of an interval allows for targets that these rows do not show."

_Records = Sequence[Mapping[str, Any]]


def selection_section(fit: Coefficients) -> Iterable[Block]:
    """The tables under a heading, with the verdict of the fit; nothing if the file has none."""
    tables = selection_tables(fit)
    if tables:
        yield Heading("Which kind of rule" + ", and how sharp" * (len(tables) > 1))
        verdict = fit.quality.get("verdict", "")
        yield Text(f"{verdict[:1].upper()}{verdict[1:]}.")
    yield from tables


def selection_tables(fit: Coefficients) -> list[Table]:
    """The kinds that were compared, and, if several were tried, the values of q of the chosen one.

    A kind has a record for each q, the smallest first, in `quality.candidates`; files of schema 1.1
    name neither q, which was 0, nor p. Every field of a record is optional.
    """
    records = [record for record in fit.quality.get("candidates", []) if "kind" in record]
    kind = chosen_kind(fit)
    first = {record["kind"]: record for record in reversed(records)}
    tables = [_kinds_table([r for r in records if r is first[r["kind"]]], kind)] if records else []
    tried, chosen = sharpness_tried(fit)
    if chosen:
        tables.append(_sharpness_table(tried, chosen))
    return tables


def sharpness_tried(fit: Coefficients) -> tuple[_Records, Mapping[str, Any] | None]:
    """The records of the chosen kind, the least q first; and the chosen one of several."""
    records, kind = fit.quality.get("candidates", []), chosen_kind(fit)
    needed = {"kind", "q", "gain", "low"}
    tried = [r for r in records if needed <= r.keys() and r["kind"] == kind]
    chosen = [r for r in tried if r["q"] == fit.quality.get("q")]
    return tried, chosen[0] if len(tried) > 1 and chosen else None


def gain_in_log_p(fit: Coefficients) -> float:
    """What the fit gains on rows held out, by its file; 0 if that is not beyond chance."""
    tried, q = sharpness_tried(fit)[0], fit.quality.get("q")
    return next((r["gain"] for r in tried if r["q"] == q and r["low"] > 0), 0.0)


def chosen_kind(fit: Coefficients) -> str:
    """The kind of rule in the words of a fit, where a constant is no polynomial."""
    if fit.rule.kind != ENTROPY_POLYNOMIAL:
        return fit.rule.kind
    return "polynomial" if any(fit.entries[0].coefficients[:-1]) else "constant"


def _kinds_table(records: _Records, chosen: str) -> Table:
    values = {record.get("q", 0) for record in records}
    at = f" at q = {values.pop():g}" if len(values) == 1 and values != {0} else ""
    labels = [kind_label(record["kind"]) for record in records]
    states = [CHOSEN * (record["kind"] == chosen) for record in records]
    title = f"Kinds of rule{at}: log p of the target in nats and its p, held out, sizes alike"
    return _table("rule", records, labels, states, title, NOTE)


def _sharpness_table(records: _Records, chosen: Mapping[str, Any]) -> Table:
    """Of rules of one kind, the least q first."""
    best = records[0]
    why = f"the largest that keeps {KEPT:.0%} of the gain in log p".replace("%", " %")
    if chosen is best:
        why = f"as no larger one {why.removeprefix('the largest that ')}"
    else:
        why += f" ({chosen['gain']:.4f} of {best['gain']:.4f} nats)"
    note = (
        "A fit maximises the mean of p^q, or of log p at q = 0: the larger q, the sharper it is. "
        f"Chosen: q = {chosen['q']:g}, {why}."
    )
    labels = [f"{record['q']:g}" + " (log p)" * (record["q"] == 0) for record in records]
    states = [CHOSEN * (record is chosen) for record in records]
    title = "How sharp: log p of the target in nats, and its probability p, by the q of this kind"
    return _table("q", records, labels, states, title, note)


def _table(
    heading: str, records: _Records, labels: list[str], states: list[str], title: str, note: str
) -> Table:
    """A line per record, with its label, its scores and its state."""
    columns, rows = [heading, *SCORES], [[label] for label in labels]
    for row, record in zip(rows, records, strict=True):
        row += [
            _cell(record, "{:.4f}", "log_p"),
            _cell(record, "{:+.4f}", "gain"),
            _cell(record, "{:+.4f} to {:+.4f}", "low", "high"),
        ]
    if all("p" in record for record in records):
        columns.append("p (%)")
        for row, record in zip(rows, records, strict=True):
            row.append(f"{100 * record['p']:.1f}")
    rows = [[*row, state] for row, state in zip(rows, states, strict=True)]
    return Table([*columns, ""], rows, title, note, left=[heading, ""])


def _cell(record: Mapping[str, Any], shape: str, *keys: str) -> str:
    """Numbers of a record; a dot if it lacks one."""
    known = all(key in record for key in keys)
    return shape.format(*(record[key] for key in keys)) if known else NOTHING
