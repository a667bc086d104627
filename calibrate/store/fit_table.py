"""The evidence of a fit as a text table: NLL of held-out inputs by n, and of each kind of rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SIZES_HEADING = ("n", "inputs", "NLL before", "NLL after", "gain ± SE")
_KINDS_HEADING = ("kind", "NLL", "gain ± SE")


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
        held_out = [{**record, "gain": _gain(record)} for record in evidence.get("held_out", ())]
        return cls(tuple(held_out), tuple(map(dict, evidence.get("kinds", ()))))

    @property
    def gains(self) -> str:
        """The gain of each kind of rule, on one line; "" if there is none."""
        gains = [
            f"{kind.get('kind')} {_gain_text(kind)}" for kind in self.kinds if kind.get("gain")
        ]
        return ", ".join(gains)

    def __str__(self) -> str:
        sizes = [
            [_count(size, "n"), _count(size, "inputs"), _number(size, "nll_before"),
             _number(size, "nll_after"), _gain_text(size)]
            for size in self.held_out
        ]  # fmt: skip
        kinds = [
            [str(kind.get("kind", "")), _number(kind, "nll"), _gain_text(kind)]
            for kind in self.kinds
        ]
        tables = [_align([_SIZES_HEADING, *sizes])] if sizes else []
        tables += [_align([_KINDS_HEADING, *kinds], left=True)] if kinds else []
        return "\n\n".join(tables) or "no evidence on held-out inputs"


def _gain(record: Mapping[str, Any]) -> float | None:
    """The NLL that a fit takes off, at one n."""
    before, after = record.get("nll_before"), record.get("nll_after")
    return None if before is None or after is None else before - after


def _gain_text(record: Mapping[str, Any]) -> str:
    """A gain with its standard error, if these are known."""
    gain, se = record.get("gain"), record.get("se")
    if gain is None:
        return ""
    return f"{gain:+.4f}" + ("" if se is None else f" ± {se:.4f}")


def _number(record: Mapping[str, Any], name: str) -> str:
    number = record.get(name)
    return "" if number is None else f"{number:.4f}"


def _count(record: Mapping[str, Any], name: str) -> str:
    return f"{record[name]:,}" if name in record else ""


def _align(rows: Sequence[Sequence[str]], left: bool = False) -> str:
    """Rows of text in columns, a line each; `left` aligns the first column to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        aligned = first.ljust(widths[0]) if left else first.rjust(widths[0])
        cells = [aligned, *map(str.rjust, others, widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
