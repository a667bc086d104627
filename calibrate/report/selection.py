"""What a fit's file says of its choice: the kinds of rule that were compared, and how sharp."""

from collections.abc import Mapping, Sequence
from typing import Any

from calibrate.evidence.baselines import kind_label
from calibrate.evidence.estimate import NOTHING
from calibrate.evidence.verdict import chosen_kind, sharpness_tried
from calibrate.files.coefficients import Coefficients
from calibrate.report.blocks import Table
from calibrate.rows.sharpness import KEPT

KINDS_NOTE = "The lower end of an interval allows for targets that these rows do not show."
SHARPNESS_NOTE = (
    "A fit maximises the mean of p^q, or of log p at q = 0; the larger q, the sharper it is. "
    f"Chosen: the largest q that keeps {100 * KEPT:.0f} % of the gain in log p."
)
_COLUMNS = {  # heading: how fields of a record are shown
    "log p": ("{:.4f}", ("log_p",)),
    "gain over plain": ("{:+.4f}", ("gain",)),
    "95 % interval": ("{:+.4f} to {:+.4f}", ("low", "high")),
    "p": ("{:.1%}", ("p",)),
}


def selection_tables(fit: Coefficients) -> list[Table]:
    """The kinds that were compared, and, if several were tried, the values of q of the chosen one.

    A kind has a record for each q, the smallest first, in `quality.candidates`; files of schema 1.1
    name neither q, which was 0, nor p. Every field of a record is optional.
    """
    tables, firsts = [], dict[str, Mapping[str, Any]]()
    for record in fit.quality.get("candidates", []):
        if "kind" in record:
            firsts.setdefault(record["kind"], record)
    if firsts:
        chosen = chosen_kind(fit)
        rows = [_row(kind_label(kind), one, kind == chosen) for kind, one in firsts.items()]
        tables.append(_table("rule", rows, "Kinds of rule, held out, nats", KINDS_NOTE))
    tried, best = sharpness_tried(fit)
    if best:
        rows = [_row(f"q = {one['q']:g}", one, one is best) for one in tried]
        tables.append(_table("sharpness", rows, "How sharp, nats", SHARPNESS_NOTE))
    return tables


def _table(heading: str, rows: Sequence[Sequence[str]], title: str, note: str) -> Table:
    return Table([heading, *_COLUMNS, ""], rows, title, note, left=[heading, ""])


def _row(label: str, record: Mapping[str, Any], chosen: bool) -> list[str]:
    """Numbers of a record; a dot for what it lacks."""
    cells = [
        shape.format(*(record[key] for key in keys)) if record.keys() >= set(keys) else NOTHING
        for shape, keys in _COLUMNS.values()
    ]
    return [label, *cells, "chosen" if chosen else ""]
