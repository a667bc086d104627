"""The evidence of a fit as text: NLL of held-out inputs by n, and of each kind of rule."""

from collections.abc import Mapping, Sequence
from typing import Any

_SIZES = {"n": ",", "inputs": ",", "nll_before": ".4f", "nll_after": ".4f", "gain": "+.4f"}
_KINDS = {"kind": "", "nll": ".4f", "gain": "+.4f"}


def evidence_table(evidence: Mapping[str, Any]) -> str:
    """A table by n and one by kind, of those records that the evidence has."""
    sizes = [
        {**record, "gain": record["nll_before"] - record["nll_after"]}
        for record in evidence.get("held_out", ())
        if {"nll_before", "nll_after"} <= record.keys()
    ]
    tables = [
        _align([list(formats), *(_cells(record, formats) for record in records)])
        for records, formats in ((sizes, _SIZES), (evidence.get("kinds", ()), _KINDS))
        if records
    ]
    return "\n\n".join(tables) or "no evidence on held-out inputs"


def kind_gains(evidence: Mapping[str, Any]) -> str:
    """The gain of each kind of rule, on one line; "" if there is none."""
    kinds = [kind for kind in evidence.get("kinds", ()) if kind.get("gain")]
    return ", ".join(" ".join(_cells(kind, {"kind": "", "gain": "+.4f"})) for kind in kinds)


def _cells(record: Mapping[str, Any], formats: Mapping[str, str]) -> list[str]:
    """The numbers of a record as text, the last one with its standard error, if it has them."""
    cells = [format(record.get(name, ""), formats[name] * (name in record)) for name in formats]
    if cells[-1] and "se" in record:
        cells[-1] += f" ± {record['se']:.4f}"
    return cells


def _align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns, a line each; the first column is aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    )
