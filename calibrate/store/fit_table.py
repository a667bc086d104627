"""The evidence of a fit as a text table: NLL of held-out inputs by n, and of each kind of rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SIZES = {"n": ",", "inputs": ",", "nll_before": ".4f", "nll_after": ".4f", "gain": "+.4f"}
_KINDS = {"kind": "", "nll": ".4f", "gain": "+.4f"}


@dataclass(frozen=True)
class FitTable:
    """Evidence on held-out inputs, which prints as a small table.

    Attributes:
      held_out: one record for each n: n, inputs, nll_before, nll_after, gain, se.
      kinds: one record for each kind of rule, on the same folds: kind, nll, gain, se,
        gain_over_fit, se_over_fit. The gain is over the baseline; that of a fit through a model is
        over one constant for all heads.
    """

    held_out: tuple[dict[str, Any], ...]
    kinds: tuple[dict[str, Any], ...]

    @classmethod
    def from_evidence(cls, evidence: Mapping[str, Any]) -> "FitTable":
        """The table of the evidence of a fit."""
        held_out = [
            {**record, "gain": record["nll_before"] - record["nll_after"]}
            for record in evidence.get("held_out", ())
            if {"nll_before", "nll_after"} <= record.keys()
        ]
        return cls(tuple(held_out), tuple(map(dict, evidence.get("kinds", ()))))

    @property
    def gains(self) -> str:
        """The gain of each kind of rule, on one line; "" if there is none."""
        gains = [
            " ".join(_cells(kind, {"kind": "", "gain": "+.4f"}))
            for kind in self.kinds
            if kind.get("gain")
        ]
        return ", ".join(gains)

    def __str__(self) -> str:
        tables = [
            _align([list(formats), *(_cells(record, formats) for record in records)])
            for records, formats in ((self.held_out, _SIZES), (self.kinds, _KINDS))
            if records
        ]
        return "\n\n".join(tables) or "no evidence on held-out inputs"


def _cells(record: Mapping[str, Any], formats: Mapping[str, str]) -> list[str]:
    """The numbers of a record as text, the last one with its standard error, if it has them."""
    cells = [
        format(record[name], shape) if name in record else "" for name, shape in formats.items()
    ]
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
