"""What a fit's file says of its choice: the kinds of rule that were compared, and its weight."""

import math
from collections.abc import Mapping
from typing import Any

from calibrate.evidence.baselines import chosen_kind, kind_label
from calibrate.evidence.estimate import NOTHING, Estimate
from calibrate.files.coefficients import Coefficients
from calibrate.report.blocks import Table

KINDS_NOTE = "The lower end of an interval allows for targets that these rows do not show."
TRADE_NOTE = (
    "At weight s, beta(s) = 1 + s (beta - 1); `calibrate model fit --interpolation` publishes "
    "another one. KL divergence of retention text is from the baseline's predictions."
)
_TRADED = {
    "gain": ("gain in log p", "+.3f"),
    "seen": ("gain in templates fitted to", "+.3f"),
    "kl": ("KL of text", ".4f"),
}
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


def trade_tables(fit: Coefficients) -> list[Table]:
    """Gains and costs of a model's fit at other interpolation weights; none if not in the file."""
    trade = fit.quality.get("trade", [])
    chosen = fit.source.get("options", {}).get("strength")
    known = [name for name in _TRADED if any(name in record for record in trade)]
    rows = []
    for record in trade:
        found = [
            Estimate(record.get(name, math.nan), record.get(f"{name}_error", math.nan))
            for name in known
        ]
        shown = [x.shown(_TRADED[name][1]) for name, x in zip(known, found, strict=True)]
        is_chosen = record.get("strength") == chosen
        rows.append(
            [f"{record.get('strength', math.nan):g}", *shown, "chosen" if is_chosen else ""]
        )
    columns = ["weight", *(_TRADED[name][0] for name in known), ""]
    title = "Gain and cost by interpolation weight, held out, nats"
    return [Table(columns, rows, title, TRADE_NOTE, left=[""])] if rows else []


def _row(label: str, record: Mapping[str, Any], chosen: bool) -> list[str]:
    """Numbers of a record; a dot for what it lacks."""
    cells = [
        shape.format(*(record[key] for key in keys)) if record.keys() >= set(keys) else NOTHING
        for shape, keys in _COLUMNS.values()
    ]
    return [label, *cells, "chosen" if chosen else ""]
