"""Rules side by side: a table for people, and the same as JSON and CSV."""

import csv
import io
import math
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from calibrate.evaluation.baselines import label
from calibrate.evaluation.comparison import Comparison
from calibrate.report.console import print_whole, stdout

NOTHING = "·"
_ARRAYS = (
    "accuracy", "error", "gain", "gain_error", "p_plain", "p_paper", "p_own",
    "headroom", "headroom_low", "headroom_high",
)  # fmt: skip


def print_comparison(comparison: Comparison) -> None:
    """Per rule: accuracy in per cent, its standard error, and p against the two references."""
    stdout.print(
        f"\nAccuracy of {comparison.head} in %, ± standard error over its sets, which no fit has "
        f"seen;\np-values of a two-sided paired t-test over its sets, uncorrected; {NOTHING} where "
        "two rules do not differ\n",
        style="bold",
    )
    table = _table(["n", *(f"{size:,}" for size in comparison.sizes)])
    for i, rule in enumerate(comparison.rules):
        lines = {label(rule): [_percent(x) for x in comparison.accuracy[i]]}
        lines["  ±"] = [_percent(x) for x in comparison.error[i]]
        lines["  p against plain"] = [p_value(x) for x in comparison.p_plain[i]]
        lines["  p against the paper's"] = [p_value(x) for x in comparison.p_paper[i]]
        lines["  p against own fit"] = [p_value(x) for x in comparison.p_own[i]]
        for name, cells in lines.items():
            if set(cells) != {NOTHING}:
                table.add_row(name, *cells, style=None if name == label(rule) else "dim")
        table.add_section()
    table.add_row("sets", *(f"{sets:,}" for sets in comparison.sets), style="dim")
    print_whole(table)
    if np.isfinite(comparison.headroom).any():
        _print_headroom(comparison)


def _print_headroom(comparison: Comparison) -> None:
    stdout.print(
        "\nRecovered headroom in %: gain over plain softmax, as a share of what the best of 40\n"
        "constants gains, chosen in hindsight on other sets; 95 % bootstrap interval over sets\n",
        style="bold",
    )
    table = _table(["n", *(f"{size:,}" for size in comparison.sizes)])
    for i, rule in enumerate(comparison.rules):
        if rule in ("plain", "hindsight"):
            continue
        table.add_row(label(rule), *(_percent(x, 0) for x in comparison.headroom[i]))
        ranges = zip(comparison.headroom_low[i], comparison.headroom_high[i], strict=True)
        table.add_row("", *(_range(low, high) for low, high in ranges), style="dim")
    table.add_section()
    table.add_row("hindsight's beta", *(f"{beta:.1f}" for beta in comparison.hindsight_beta))
    print_whole(table)


def _table(headings: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "n" else "right", no_wrap=True)
    return table


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}" if math.isfinite(share) else NOTHING


def _range(low: float, high: float) -> str:
    return f"{100 * low:.0f}..{100 * high:.0f}" if math.isfinite(low) else NOTHING


def p_value(p: float) -> str:
    """0.4, 0.002, 2e-05: one digit, as the paper prints them."""
    return f"{p:.1g}" if math.isfinite(p) else NOTHING


def with_error(mean: float, error: float, shape: str) -> str:
    """A mean in that shape, and its standard error in as many digits, as far as there are such."""
    if not math.isfinite(mean):
        return NOTHING
    return f"{mean:{shape}}" + f" ± {error:{shape.removeprefix('+')}}" * math.isfinite(error)


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """All of it for a machine; shares, not per cent; null where nothing is defined."""

    def rounded(values: np.ndarray) -> Any:
        return [
            rounded(row) if row.ndim else float(f"{row:.6g}") if math.isfinite(row) else None
            for row in np.asarray(values)
        ]

    return {
        "head": comparison.head,
        "sizes": comparison.sizes,
        "sets": comparison.sets,
        "hindsight_chosen_on": comparison.chosen_on,
        "hindsight_beta": rounded(comparison.hindsight_beta),
        "rules": [
            {
                "rule": rule,
                "label": label(rule),
                **{name: rounded(getattr(comparison, name)[i]) for name in _ARRAYS},
            }
            for i, rule in enumerate(comparison.rules)
        ],
    }


def comparison_csv(comparison: Comparison) -> str:
    """One line per rule and size."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rule", "label", "head", "size", "sets", "accuracy", "standard_error"])
    for i, rule in enumerate(comparison.rules):
        for k, size in enumerate(comparison.sizes):
            skipped = comparison.chosen_on[k] if rule == "hindsight" else 0
            sets = comparison.sets[k] - skipped
            p = comparison.accuracy[i, k]
            error = math.sqrt(max(p * (1 - p), 0) / sets)
            row = [rule, label(rule), comparison.head, size, sets, f"{p:.6f}", f"{error:.6f}"]
            writer.writerow(row)
    return text.getvalue()
