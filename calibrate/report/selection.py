"""What a fit's file says of its choice: the kinds of rule that were compared."""

from collections.abc import Mapping
from typing import Any

from calibrate.evidence.baselines import chosen_kind, kind_label
from calibrate.evidence.estimate import NOTHING
from calibrate.files.coefficients import Coefficients
from calibrate.report.blocks import Table

KINDS_NOTE = "The lower end of an interval allows for targets that these rows do not show."
_COLUMNS = {  # heading: how fields of a record are shown
    "log p": ("{:.4f}", ("log_p",)),
    "gain over plain": ("{:+.4f}", ("gain",)),
    "95 % interval": ("{:+.4f} to {:+.4f}", ("low", "high")),
    "p": ("{:.1%}", ("p",)),
}


def selection_tables(fit: Coefficients) -> list[Table]:
    """The kinds that were compared, each at its smallest q; none if the file has none.

    A kind has a record for each q, the smallest first, in `quality.candidates`; files of schema 1.1
    name neither q, which was 0, nor p. Every field of a record is optional.
    """
    firsts = dict[str, Mapping[str, Any]]()
    for record in fit.quality.get("candidates", []):
        if "kind" in record:
            firsts.setdefault(record["kind"], record)
    if not firsts:
        return []
    chosen = chosen_kind(fit)
    rows = [_row(kind_label(kind), one, kind == chosen) for kind, one in firsts.items()]
    columns = ["rule", *_COLUMNS, ""]
    return [Table(columns, rows, "Kinds of rule, held out, nats", KINDS_NOTE, left=["rule", ""])]


def _row(label: str, record: Mapping[str, Any], chosen: bool) -> list[str]:
    """Numbers of a record; a dot for what it lacks."""
    cells = [
        shape.format(*(record[key] for key in keys)) if record.keys() >= set(keys) else NOTHING
        for shape, keys in _COLUMNS.values()
    ]
    return [label, *cells, "chosen" if chosen else ""]
