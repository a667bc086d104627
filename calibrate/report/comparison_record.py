"""Rules on one head as a result to show: tables of accuracy and headroom, JSON and CSV."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.evidence.baselines import LABELS, label
from calibrate.evidence.evidence import Evidence as Comparison
from calibrate.report.blocks import Block, Table
from calibrate.report.wording import NOTHING, p_value, percent

HINDSIGHT = "hindsight"
ARRAYS = (
    "accuracy", "error", "gain", "gain_error", "p_plain", "p_paper", "p_own",
    "headroom", "headroom_low", "headroom_high",
)  # fmt: skip


@dataclass(frozen=True)
class ComparisonRecord:
    """The result of `calibrate evaluate` on a head; `own` names the fit that is highlighted."""

    comparison: Comparison
    own: str = LABELS["own"]

    def as_json(self) -> dict[str, Any]:
        """All measures of all rules; shares, not per cent; null where nothing is defined."""
        comparison = self.comparison
        return {
            "head": comparison.head,
            "sizes": comparison.sizes,
            "sets": comparison.sets,
            "hindsight_chosen_on": comparison.chosen_on,
            "hindsight_beta": _six_digits(comparison.hindsight_beta),
            "rules": [
                {
                    "rule": rule,
                    "label": label(rule),
                    **{name: _six_digits(getattr(comparison, name)[i]) for name in ARRAYS},
                }
                for i, rule in enumerate(comparison.rules)
            ],
        }

    def blocks(self) -> Iterable[Block]:
        """The accuracy of every rule, and the headroom that it recovers where there is any."""
        yield self.accuracy_table()
        if np.isfinite(self.comparison.headroom).any():
            yield self.headroom_table()

    def accuracy_table(self) -> Table:
        """A row per rule: accuracy, its standard error, and p-values, a line each."""
        comparison, rules = self.comparison, self.comparison.rules
        deployable = [rule not in (HINDSIGHT, "hard") for rule in rules]
        best = comparison.accuracy == comparison.accuracy[deployable].max(axis=0)
        own = [i for i, rule in enumerate(rules) if rule == "own"]
        sets = ["sets", *(f"{sets:,}" for sets in comparison.sets)]
        return Table(
            columns=self._columns(),
            rows=[*map(self._accuracy_row, range(len(rules))), sets],
            title=f"Accuracy of {comparison.head} in %, on sets that no fit has seen",
            note="Below each accuracy: its standard error, and p-values of two-sided paired "
            "t-tests over the sets, not corrected for their number; a dot where two rules do not "
            "differ. Bold: the best rule, but for hard attention, which is sure also where it is "
            "wrong, and for the best constant in hindsight, which cannot be deployed: it is "
            "the one of 40 from 1 to 1,000 under which the head is right most often on a part of "
            "the sets, and its gain is that on the others.",
            left=["rule"],
            dim=[len(rules), *np.flatnonzero(~np.array(deployable)).tolist()],
            marked=own,
            bold={(i, k + 1) for i, k in np.argwhere(best).tolist() if deployable[i]},
            sections=range(len(rules)),
        )

    def _accuracy_row(self, i: int) -> list[str]:
        comparison = self.comparison
        lines = {
            "±": map(percent, comparison.error[i]),
            "p-value against plain": map(p_value, comparison.p_plain[i]),
            "p-value against the paper's": map(p_value, comparison.p_paper[i]),
            f"p-value against {self.own}": map(p_value, comparison.p_own[i]),
        }
        shown = {name: list(cells) for name, cells in lines.items()}
        shown = {name: cells for name, cells in shown.items() if set(cells) != {NOTHING}}
        first = "\n".join([label(comparison.rules[i], self.own), *shown])
        accuracy = map(percent, comparison.accuracy[i])
        return [first, *map("\n".join, zip(accuracy, *shown.values(), strict=True))]

    def headroom_table(self) -> Table:
        """A row per rule: the share of hindsight's gain, and its interval."""
        comparison = self.comparison
        rows = []
        for i, rule in enumerate(comparison.rules):
            if rule in ("plain", HINDSIGHT):
                continue
            bounds = zip(comparison.headroom_low[i], comparison.headroom_high[i], strict=True)
            cells = [
                f"{percent(share, 0)}\n{_interval(low, high)}"
                for share, (low, high) in zip(comparison.headroom[i], bounds, strict=True)
            ]
            rows.append([f"{label(rule, self.own)}\n95 % interval", *cells])
        rows.append(["hindsight's beta", *(f"{beta:.1f}" for beta in comparison.hindsight_beta)])
        return Table(
            columns=self._columns(),
            rows=rows,
            title="Recovered headroom in %",
            note="The gain over plain softmax as a share of what the best of 40 constants gains, "
            "chosen in hindsight on other sets; bootstrap intervals over sets.",
            left=["rule"],
            dim=[len(rows) - 1],
            sections=range(len(rows) - 1),
        )

    def _columns(self) -> Sequence[str]:
        return ["rule", *(f"n = {size:,}" for size in self.comparison.sizes)]

    def as_csv(self) -> str:
        """One line per rule and size."""
        comparison = self.comparison
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["rule", "label", "head", "size", "sets", "accuracy", "standard_error"])
        for i, rule in enumerate(comparison.rules):
            for k, size in enumerate(comparison.sizes):
                skipped = comparison.chosen_on[k] if rule == HINDSIGHT else 0
                sets = comparison.sets[k] - skipped
                measured = (f"{x[i, k]:.6f}" for x in (comparison.accuracy, comparison.error))
                writer.writerow([rule, label(rule), comparison.head, size, sets, *measured])
        return text.getvalue()


def _six_digits(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _interval(low: float, high: float) -> str:
    return f"{100 * low:.0f}..{100 * high:.0f}" if math.isfinite(low) else NOTHING
