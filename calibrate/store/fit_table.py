"""The evidence of a fit as a text table: NLL of held-out inputs by n, and of each kind of rule."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]
Column = tuple[str, Callable[[Record], str]]


@dataclass(frozen=True)
class FitTable:
    """Evidence on held-out inputs, which prints as a small table.

    Attributes:
      held_out: one record for each n: n, inputs, nll_before, nll_after, gain, se.
      kinds: one record for each kind of rule, on the same folds: kind, nll, gain, se. The gain is
        over the baseline; that of a fit through a model is over one constant for all heads.
    """

    held_out: tuple[dict[str, Any], ...]
    kinds: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, evidence: Mapping[str, Any]) -> "FitTable":
        """The table of the evidence of a fit."""
        held_out = [{**x, "gain": _gain(x)} for x in evidence.get("held_out", ())]
        return cls(tuple(held_out), tuple(map(dict, evidence.get("kinds", ()))))

    @property
    def gains(self) -> str:
        """The gain of each kind of rule, on one line; "" if there is none."""
        return ", ".join(f"{x.get('kind')} {_gain_text(x)}" for x in self.kinds if x.get("gain"))

    def __str__(self) -> str:
        sizes = _table(self.held_out, _SIZES, str.rjust)
        kinds = _table(self.kinds, _KINDS, str.ljust)
        return "\n\n".join(filter(None, (sizes, kinds))) or "no evidence on held-out inputs"


def _number(name: str) -> Callable[[Record], str]:
    return lambda x: "" if x.get(name) is None else f"{x[name]:.4f}"


def _count(name: str) -> Callable[[Record], str]:
    return lambda x: f"{x[name]:,}" if name in x else ""


def _gain(x: Record) -> float | None:
    """The NLL that a fit takes off, at one n."""
    before, after = x.get("nll_before"), x.get("nll_after")
    return None if before is None or after is None else before - after


def _gain_text(x: Record) -> str:
    """A gain with its standard error, if these are known."""
    gain, se = x.get("gain"), x.get("se")
    if gain is None:
        return ""
    return f"{gain:+.4f}" + ("" if se is None else f" ± {se:.4f}")


_SIZES: tuple[Column, ...] = (
    ("n", _count("n")),
    ("inputs", _count("inputs")),
    ("NLL before", _number("nll_before")),
    ("NLL after", _number("nll_after")),
    ("gain ± SE", _gain_text),
)
_KINDS: tuple[Column, ...] = (
    ("kind", lambda x: str(x.get("kind", ""))),
    ("NLL", _number("nll")),
    ("gain ± SE", _gain_text),
)


def _table(
    records: Iterable[Record], columns: tuple[Column, ...], first: Callable[[str, int], str]
) -> str:
    """Aligned text, one line for each record; `first` aligns the first column."""
    rows = [[text(x) for _, text in columns] for x in records]
    if not rows:
        return ""
    rows.insert(0, [title for title, _ in columns])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([first(row[0], widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
