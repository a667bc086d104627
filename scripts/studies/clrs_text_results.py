"""Tables and figure of the study of CLRS-Text, from its record."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from clrs_text_task import TASKS
from study import mean_and_error, table, with_errors

from calibrate.report.plot_style import (
    OTHERS,
    STYLES,
    new_figure,
    own_style,
    save_figure,
    sizes_axis,
)

LABELS = {
    "plain": "baseline",
    "paper": "the paper's published polynomial, at inference only",
    "constant": "grid constant",
    "log-n": "log n / log 98",
    "own": "fitted log-size rules",
    "trained-paper": "the paper's published polynomial, in training too",
    "tuned": "trained further without",
    "tuned-own": "trained further with the fitted rules",
    "rope": "positions without gaps in training",
}
TABLE_LENGTHS = (4, 16, 32, 64)
MEANS = ("plain", "constant", "own", "paper", "trained-paper")  # in the table of means of tasks
PUBLISHED = STYLES["paper"][0]
# Arms that are compared, on the same prompts: the first less the second. In the figure: colour,
# marker and dash.
PAIRS = {
    ("own", "plain"): STYLES["own"],
    ("paper", "plain"): STYLES["paper"],
    ("trained-paper", "plain"): (PUBLISHED, "o", ":"),
    ("tuned-own", "tuned"): OTHERS[0],
}
MEASURES = ("right", "log_p")
Scores = Mapping[str, Mapping[str, Sequence]]  # of a model: task, measure, (lengths, prompts)


def gathered(scored: Mapping[str, Sequence[Scores]]) -> dict:
    """Means over prompts by arm, task, measure, seed and length."""
    return {
        arm: {
            task: {measure: means([s[task][measure] for s in of_seeds]) for measure in MEASURES}
            for task in TASKS
        }
        for arm, of_seeds in scored.items()
    }


def means(of_seeds: Sequence) -> list[list[float]]:
    """(seeds, lengths) means of (seeds, lengths, prompts)."""
    return np.asarray(of_seeds, float).mean(axis=2).round(4).tolist()


def difference(arms: Mapping, pair: tuple[str, str], measure: str) -> np.ndarray:
    """(seeds, lengths) of all tasks: the first arm less the second."""
    one, other = (np.mean([arms[arm][task][measure] for task in TASKS], axis=0) for arm in pair)
    return one - other


def mean_of_tasks(arms: Mapping, arm: str) -> np.ndarray:
    """(seeds, lengths) exact match of an arm, %."""
    return 100 * np.mean([arms[arm][task]["right"] for task in TASKS], axis=0)


def pair_label(pair: tuple[str, str]) -> str:
    return ", less ".join(LABELS[arm] for arm in pair)


def markdown(record: dict) -> list[str]:
    """Exact match by arm, and of the baseline by task; differences of arms over all tasks."""
    arms = record["arms"]
    places = [record["lengths"].index(length) for length in TABLE_LENGTHS]

    def row(name: str, of_seeds: np.ndarray, digits: str) -> list[str]:
        return [name, *with_errors(*mean_and_error(of_seeds[:, places]), digits)]

    parts = {
        "exact match, %: mean of six tasks, length":
            (row(LABELS[arm], mean_of_tasks(arms, arm), ".1f") for arm in MEANS),
        "exact match, %: baseline, length":
            (row(task, 100 * np.array(arms["plain"][task]["right"]), ".0f") for task in TASKS),
        "exact match, points: all tasks, length":
            (row(pair_label(x), 100 * difference(arms, x, "right"), "+z.1f") for x in PAIRS),
    }  # fmt: skip
    lines = []
    for title, rows in parts.items():
        lines += ["", *table([title, *map(str, TABLE_LENGTHS)], rows)]
    return lines[1:]


@own_style()
def draw_record(path: Path, record: dict) -> None:
    """Differences of exact match by length, over all tasks, with standard errors over seeds."""
    figure = new_figure(7.4, 4.6)
    ax = figure.add_subplot()
    for i, (pair, (colour, marker, dash)) in enumerate(PAIRS.items()):
        mean, error = mean_and_error(100 * difference(record["arms"], pair, "right"))
        lengths = np.array(record["lengths"]) * 2 ** (0.03 * (i - 1.5))  # side by side
        ax.errorbar(lengths, mean, error, color=colour, marker=marker, ms=4, lw=1.4, ls=dash,
                    capsize=2, label=pair_label(pair))  # fmt: skip
    ax.axhline(0, color="black", lw=0.8)
    first, last = record["trained"]
    ax.axvspan(first / 1.05, last * 1.05, color="0.93", lw=0, zorder=0)
    ax.text(last, 2.2, "trained", ha="right", fontsize=9)
    sizes_axis(ax, record["lengths"])
    ax.set(xlabel="length", ylabel="exact match, points, mean of six tasks")
    ax.grid(alpha=0.25, lw=0.5)
    figure.legend(loc="outside lower center", frameon=False)
    save_figure(path, figure)
