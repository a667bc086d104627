"""Counts of rows, and of the bad ones among them: NaN, +inf or a masked target."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from calibrate.defaults import MAX_BETA
from calibrate.errors import QualityError

BAD = ("nan", "inf", "masked_target")
COUNTS = ("rows", "misranked", "ties", *BAD)
MAX_BAD_SHARE = 0.01
TARGETS_AT_0 = (
    "the logits of these are -inf (probability 0) or far below the highest: clip probabilities "
    "before the logarithm, or check the targets"
)


class UnusableRowsError(QualityError):
    """Too many rows have NaN, +inf or a masked target, or no row has a weight."""


def count_bad(counts: Mapping[str, int]) -> int:
    """The number of rows with NaN, +inf or a masked target, by the counts of COUNTS."""
    return sum(counts[reason] for reason in BAD)


def find_bad(highest: np.ndarray, at_target: np.ndarray) -> list[np.ndarray]:
    """(rows,) bool for each reason of BAD, by the highest logit of a row and the target's."""
    nan, inf = np.isnan(highest), highest == np.inf
    # Also a target so far below the highest logit that the largest beta overflows.
    with np.errstate(invalid="ignore", over="ignore"):
        unreachable = ~np.isfinite((highest - at_target) * np.float32(MAX_BETA))
    return [nan, inf, unreachable & ~nan & ~inf]


def share_misranked(counts: Mapping[str, int]) -> float:
    """The share of the rows that are not bad; 0 if all of them are."""
    return counts["misranked"] / max(1, counts["rows"] - count_bad(counts))


def check_bad_rows(manifest: Mapping[str, Any], has_mask: bool = False) -> None:
    """Raises UnusableRowsError if more than 1 % of a collection's rows are bad.

    The remedy depends on whether an array said which items are masked, `has_mask`.
    """
    totals = {name: sum(size[name] for size in manifest["sizes"]) for name in ("rows", *BAD)}
    bad = {name: totals[name] for name in BAD if totals[name]}
    if sum(bad.values()) > MAX_BAD_SHARE * totals["rows"]:
        reasons = ", ".join(f"{count} {name}" for name, count in bad.items())
        remedy = "look at the head's logits before calibrating it"
        if set(bad) == {"nan"}:
            remedy = "give a mask, or -inf, for items that are padding; else " + remedy
        if set(bad) == {"masked_target"}:
            remedy = "a target must be a real item; " + (
                "is the mask, True for real items, inverted?" if has_mask else TARGETS_AT_0
            )
        raise UnusableRowsError(
            f"{sum(bad.values()):,} of {totals['rows']:,} rows are bad ({reasons}), more than "
            f"{MAX_BAD_SHARE:.0%}; {remedy}"
        )
