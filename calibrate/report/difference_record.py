"""The difference of two fits as a result to show: changes of beta, and fields that differ."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.files.coefficients import Coefficients
from calibrate.files.fit_difference import Box, Difference, HeadDifference, Point, compare
from calibrate.files.store import load
from calibrate.maths.rule import ENTROPY_AND_SIZE, ENTROPY_POLYNOMIAL, LOG_SIZE
from calibrate.report.blocks import Block, Heading, Text
from calibrate.report.wording import items, span, value_text
from calibrate.rows.solved_rows import head_label

SHOWN_HEADS = 8
_SHOWN_FIELDS = ("rule", "entries", "source", "x-")  # fields of beta and of its source


@dataclass(frozen=True)
class DifferenceRecord:
    """The result of `calibrate fits diff`."""

    a: Coefficients
    b: Coefficients
    difference: Difference

    def as_json(self) -> dict[str, Any]:
        """The largest changes of beta, and every field that differs."""
        return {
            "a": {"reference": self.a.reference, "path": str(self.a.path)},
            "b": {"reference": self.b.reference, "path": str(self.b.path)},
            "heads": self.difference.heads,
            "fields": [{"path": path, "a": x, "b": y} for path, x, y in self.difference.fields],
        }

    def blocks(self) -> Iterable[Block]:
        """The largest changes of beta, and the fields of rule and source that differ."""
        a, b, fields = self.a, self.b, self.difference.fields
        yield Heading(f"- {a.reference}  {a.path}\n+ {b.reference}  {b.path}")
        heads = sorted(self.difference.heads, key=lambda head: -head.anywhere.largest)
        yield from (Text(line) for head in heads[:SHOWN_HEADS] for line in _change_lines(head))
        if not heads:
            yield Text("the fits have no head in common")
        if len(heads) > SHOWN_HEADS:
            yield Text(f"and {len(heads) - SHOWN_HEADS} heads with smaller changes")
        shown = [field for field in fields if field[0].startswith(_SHOWN_FIELDS)]
        for path, x, y in shown:
            yield Text(f"{value_text(path)}\n  - {value_text(x)}\n  + {value_text(y)}")
        if hidden := len(fields) - len(shown):
            yield Text(f"{hidden} fields of quality and provenance differ (--json lists them)")
        if not fields:
            yield Text("no field differs")


def compare_fits(a: str, b: str, store: Path | None) -> DifferenceRecord:
    """Loads and compares two fits.

    Raises:
      CoefficientsError: there is no such fit.
    """
    before, after = load(a, store), load(b, store)
    return DifferenceRecord(before, after, compare(before, after))


def _change_lines(head: HeadDifference) -> Iterable[str]:
    if (head.layer, head.head) != (None, None):
        yield f"{head_label(head.layer, head.head)}:"
    sizes = Box(None, head.anywhere.range.log_n)
    anywhere = f"in sets of {_ranges(sizes)}" if sizes.log_n else "anywhere"
    for change, where in ((head.common, "in the domain of both"), (head.anywhere, anywhere)):
        if change is None:
            yield "the domains do not overlap"
        elif change.largest == 0:
            yield f"beta is the same {where}"
        else:
            before, after = change.betas
            domain = f", {_ranges(change.range)}" if change is head.common else ""
            yield (
                f"beta changes by at most {change.largest:.4g} {where}{domain}: "
                f"from {before:.4g} to {after:.4g} at {_place(change.at)}"
            )


def _ranges(box: Box) -> str:
    """The ranges of a box, in words."""
    numbers = [*(box.entropy or ()), *(box.log_n or ())]
    of_one = LOG_SIZE if box.log_n else ENTROPY_POLYNOMIAL
    return span(numbers, ENTROPY_AND_SIZE if box.entropy and box.log_n else of_one)


def _place(at: Point) -> str:
    H = None if at.entropy is None else f"H = {at.entropy:.4g}"
    n = None if at.log_n is None else f"n = {items(at.log_n)}"
    return ", ".join(filter(None, (H, n)))
