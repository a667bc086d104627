#!/usr/bin/env python
"""Table 1 of the paper for ten heads, with other rules; writes scripts/results/table1.json, .png.

scripts/studies/table1.py             # 35 minutes on one core; an interrupted run is resumed
scripts/studies/table1.py --markdown  # prints the tables of its page from the record
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from command_line import parse, study_parser
from matplotlib.axes import Axes
from table1_comparison import Calibration, record_of, study

from calibrate.report.plot_style import STYLES, draw, legend_below, save_figure, sizes_axis
from calibrate.rows.heads import load_head
from calibrate.storage.atomic_io import write_atomically

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "scripts" / "results" / "table1.json"
SIZES = [16 << i for i in range(11)]
FIT_SETS = 4_096
PUBLISHED = "the paper's published polynomial"
HEADROOM = ("headroom", "headroom_low", "headroom_high")
SHOWN = ("plain", "paper", "own", "log-n", "hard")  # more would be hard to tell apart
BANDS = ("plain", "own")  # bands of all rules would overlap
# Table 1 of the paper: accuracy in per cent, and p of a paired t-test between its two rows.
PAPER = {
    "baseline": [98.6, 97.1, 94.3, 89.7, 81.3, 70.1, 53.8, 35.7, 22.6, 15.7, 12.4],
    "adaptive": [98.6, 97.1, 94.5, 89.9, 82.1, 72.5, 57.7, 39.4, 24.9, 17.5, 14.0],
    "p": [0.4, 0.4, 0.002, 2e-5, 2e-4, 3e-5, 1e-4, 6e-4, 0.02, 1e-3, 4e-3],
}


def main() -> None:
    parse(study_parser(__doc__), markdown, RESULT)
    heads = [load_head(f"max-retrieval-{seed}") for seed in range(10)]
    calibration, folder = Calibration(SIZES, FIT_SETS), ROOT / "runs" / "table1"
    comparison = study(heads, SIZES, None, calibration, folder, tell)
    record = record_of(comparison)
    record |= {"fit_sizes": SIZES, "fit_sets": FIT_SETS, "seed": 0, "table_1_of_the_paper": PAPER}
    write_atomically(RESULT, (json.dumps(record) + "\n").encode())
    draw_gain(RESULT.with_suffix(".png"), record)
    print("\n".join(markdown(record)))


def markdown(record: dict) -> list[str]:
    """The three tables: accuracy in per cent, p-values, and recovered headroom."""
    sizes = [f"{size:,}" for size in record["sizes"]]
    head = [row("n", sizes, str), "| --- |" + " ---: |" * len(sizes)]
    rules = {rule["rule"]: rule for rule in record["rules"]}
    published = record["table_1_of_the_paper"]
    accuracy = [row(rule["label"], rule["accuracy"], percent) for rule in rules.values()]
    accuracy += [
        row("*in the paper: baseline*", published["baseline"], "{:.1f}".format),
        row("*in the paper: its polynomial*", published["adaptive"], "{:.1f}".format),
    ]
    tests = [
        row(f"{PUBLISHED} against the baseline", rules["paper"]["p_plain"], one_digit),
        row("*the same in the paper*", published["p"], one_digit),
        row("fitted rule against the baseline", rules["own"]["p_plain"], one_digit),
        row(f"fitted rule against {PUBLISHED}", rules["own"]["p_paper"], one_digit),
    ]
    tests += [
        row(f"{rules[name]['label']}, against the fitted rule", rules[name]["p_own"], one_digit)
        for name in (
            "procedure",
            "own-512",
            "polynomial",
            "kappa-log-n",
            "constant",
            "log-n",
            "hard",
        )
    ]
    headroom = [
        row(rule["label"], list(zip(*(rule[key] for key in HEADROOM), strict=True)), interval)
        for name, rule in rules.items()
        if name not in ("plain", "hindsight")
    ]
    return [*head, *accuracy, "", *head, *tests, "", *head, *headroom]


def draw_gain(path: Path, record: dict) -> None:
    save_figure(path, draw(plot_gain, record, size=(6.4, 4.6)))


def plot_gain(ax: Axes, record: dict) -> Axes:
    """The gain in accuracy of five rules against set size, with bands of two standard errors."""
    rules = {rule["rule"]: rule for rule in record["rules"]}
    for name in SHOWN:
        colour, marker, dash = STYLES[name]
        gain, error = (np.array(rules[name][key]) for key in ("gain", "gain_error"))
        ax.plot(
            record["sizes"], 100 * gain, dash, color=colour, marker=marker, ms=5, lw=1.4,
            label=rules[name]["label"], zorder=3 if name == "own" else 2,
        )  # fmt: skip
        if name in BANDS:
            low, high = 100 * (gain - 2 * error), 100 * (gain + 2 * error)
            ax.fill_between(record["sizes"], low, high, color=colour, alpha=0.2, lw=0)
    sizes_axis(ax, record["sizes"])
    ax.set_ylabel("points of accuracy above the baseline")
    ax.grid(alpha=0.25, lw=0.5)
    legend_below(ax)
    return ax


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def row(name: str, values: list, in_words: Callable[..., str]) -> str:
    return f"| {name} | " + " | ".join("·" if x is None else in_words(x) for x in values) + " |"


def one_digit(p: float) -> str:
    """0.4, 0.002, 2e-05: as the paper prints them."""
    return f"{p:.1g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def interval(shares: tuple[float, float, float]) -> str:
    middle, low, high = (f"{100 * share:.0f}" for share in shares)
    return f"{middle} ({low}..{high})"


if __name__ == "__main__":
    main()
