#!/usr/bin/env python
"""Table 1 of the paper for ten heads, with other rules; writes scripts/results/table1.json, .png.

scripts/studies/table1.py             # 25 minutes on one core; an interrupted run is resumed
scripts/studies/table1.py --markdown  # prints the tables of its page from the record

Each head is fitted to FIT_SETS inputs of each n as `calibrate fit` and `calibrate fit --paper` do
it, and scored on SCORED_SETS new ones.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from study import (
    RESULTS,
    RUNS,
    fit_rules,
    kept,
    mean_and_error,
    parse,
    table,
    with_errors,
    write_record,
)

import calibrate
from calibrate.core.rule import CONSTANT, POLYNOMIAL
from calibrate.evidence.baselines import HARD, PAPER, hard_attention, paper
from calibrate.evidence.calibration_error import expected_calibration_error, reliability
from calibrate.evidence.evidence import BASELINE, Evidence
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, RANKED, RIGHT
from calibrate.fitting.options import LEAST_SQUARES
from calibrate.report.plot_style import STYLES, new_figure, own_style, save_figure, sizes_axis
from calibrate.rows.heads import load_head
from calibrate.rows.score import score_head

RESULT = RESULTS / "table1.json"
N_HEADS = 10
SIZES = [16 << i for i in range(11)]
FIT_SETS, SCORED_SETS = 1_024, 2_048
NAMES = {
    BASELINE: "baseline",
    PAPER: "published polynomial",
    POLYNOMIAL: "default polynomial",
    LEAST_SQUARES: "the paper's procedure (`--paper`)",
    CONSTANT: "constant (maximum likelihood)",
    HARD: "argmax",
}
SHOWN = {  # in the figure: style, width, label
    HARD: (HARD, 1.5, "argmax"),
    POLYNOMIAL: ("own", 1.8, "default polynomial"),
    CONSTANT: (CONSTANT, 1.0, "constant"),
    PAPER: (PAPER, 1.5, "published polynomial"),
    BASELINE: (BASELINE, 1.5, "baseline"),
}
CHANCE = 10  # accuracy of guessing one of ten classes, per cent
METRICS = ("accuracy", "nll", "ece")
LOSS_SIZES = (16, 1_024, 4_096)  # in the table of NLL and ECE
PAIRED_SIZES = (1_024, 4_096)  # in the table of differences
# Table 1 of the paper: accuracy in per cent.
PAPERS_TABLE = {
    "baseline": [98.6, 97.1, 94.3, 89.7, 81.3, 70.1, 53.8, 35.7, 22.6, 15.7, 12.4],
    "adaptive": [98.6, 97.1, 94.5, 89.9, 82.1, 72.5, 57.7, 39.4, 24.9, 17.5, 14.0],
}


def main() -> None:
    parse(__doc__, markdown, RESULT)
    names = [f"max-retrieval-{i}" for i in range(N_HEADS)]
    heads = [kept(RUNS / "table1" / f"{name}.json", partial(result_of, name)) for name in names]
    record = {"sizes": SIZES, "heads": heads, "table_1_of_the_paper": PAPERS_TABLE}
    record = write_record(RESULT, record, digits=6)
    draw_record(RESULT.with_suffix(".png"), record)
    print("\n".join(markdown(record)))


def result_of(name: str) -> dict:
    """Fits a head and scores every rule on new inputs: its numbers by rule and n."""
    rules, facts = fit_rules(calibrate.solve(calibrate.collect(name, SIZES, FIT_SETS)))
    facts["coefficients"] = {rule: fit.coefficients for rule, fit in rules.items()}
    scored = {PAPER: paper(), HARD: hard_attention(), **rules}
    evidence = score_head(load_head(name), SIZES, SCORED_SETS, 1, scored)
    by_size = list(evidence.by("size").values())
    numbers = {
        rule: {metric: [numbers_of(part, rule)[metric] for part in by_size] for metric in METRICS}
        | {"all": numbers_of(evidence, rule)}
        for rule in evidence.rules
    }
    return {"head": name, **facts, "rules": numbers}


def numbers_of(items: Evidence, rule: str) -> dict[str, float]:
    """Accuracy and ECE, shares of 1, and NLL in nats."""
    confidence, ranked = (items.scores(rule, metric) for metric in (CONFIDENCE, RANKED))
    ece = expected_calibration_error(reliability(confidence, ranked, items.weight))
    accuracy, log_p = (float(items.mean(rule, metric).mean) for metric in (RIGHT, LOG_P))
    return {"accuracy": accuracy, "nll": -log_p, "ece": ece}


def values(record: dict, rule: str, metric: str) -> np.ndarray:
    """(heads, sizes) of a rule."""
    return np.array([head["rules"][rule][metric] for head in record["heads"]], float)


def markdown(record: dict) -> list[str]:
    """Tables of means over the heads: accuracy at every n; NLL, ECE and differences at some."""
    published = record["table_1_of_the_paper"]
    accuracy = [[name, *mean_cells(record, rule, "accuracy", SIZES)]
                for rule, name in NAMES.items()]  # fmt: skip
    for name, key in (("baseline", "baseline"), ("its polynomial", "adaptive")):
        cells = [*published[key], np.mean(published[key])]
        accuracy.append([f"*in the paper: {name}*", *(f"{cell:.1f}" for cell in cells)])
    losses = [[name, *mean_cells(record, rule, "nll", LOSS_SIZES),
               *mean_cells(record, rule, "ece", LOSS_SIZES)]
              for rule, name in NAMES.items()]  # fmt: skip
    titles = [f"{metric}, {n}" for metric in ("NLL", "ECE") for n in columns(LOSS_SIZES)]
    return [*table(["n", *columns(SIZES)], accuracy), "", *table(["n", *titles], losses), "",
            *differences(record)]  # fmt: skip


def differences(record: dict) -> list[str]:
    """The default polynomial less every other rule: paired over the heads, with errors."""
    titles = [f"{title}, {n}" for title in ("accuracy", "NLL") for n in columns(PAIRED_SIZES)]
    others = [rule for rule in NAMES if rule != POLYNOMIAL]
    rows = ([NAMES[other], *paired_cells(record, other, "accuracy", 100, "+z.2f"),
             *paired_cells(record, other, "nll", 1, "+z.4f")]
            for other in others)  # fmt: skip
    return table(["default polynomial less", *titles], rows)


def paired_cells(record: dict, other: str, metric: str, scale: float, digits: str) -> Sequence[str]:
    """The default polynomial less another rule at PAIRED_SIZES and over all n."""
    if (metric, other) == ("nll", HARD):
        return [""] * (len(PAIRED_SIZES) + 1)
    of_default, of_other = (
        np.column_stack([
            values(record, rule, metric)[:, [record["sizes"].index(n) for n in PAIRED_SIZES]],
            [head["rules"][rule]["all"][metric] for head in record["heads"]],
        ])
        for rule in (POLYNOMIAL, other)
    )  # fmt: skip
    return with_errors(*mean_and_error(scale * (of_default - of_other)), digits)


def columns(sizes: Sequence[int]) -> list[str]:
    return [*(f"{size:,}" for size in sizes), "all"]


def mean_cells(record: dict, rule: str, metric: str, sizes: Sequence[int]) -> list[str]:
    """Means over the heads at some n, and over all n: shares in per cent, NLL in nats."""
    of_all = np.mean([head["rules"][rule]["all"][metric] for head in record["heads"]])
    by_size = values(record, rule, metric).mean(axis=0)
    means = [*(by_size[record["sizes"].index(n)] for n in sizes), of_all]
    if metric == "nll":
        return ["" if rule == HARD else f"{mean:.3f}" for mean in means]
    return [f"{100 * mean:.1f}" for mean in means]


@own_style()
def draw_record(path: Path, record: dict) -> None:
    """Accuracy by n, and its differences from the baseline, means of the heads."""
    figure = new_figure(8.4, 4.2)
    left, right = figure.subplots(1, 2)
    plot_accuracy(left, record)
    plot_gains(right, record)
    for ax in (left, right):
        sizes_axis(ax, record["sizes"])
        ax.grid(alpha=0.25, lw=0.5)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  frameon=False)  # fmt: skip
    save_figure(path, figure)


def plot_accuracy(ax: Axes, record: dict) -> None:
    """Draws the accuracy by n of every rule shown, and the level of chance."""
    for rule, (style, width, label) in SHOWN.items():
        colour, _, dash = STYLES[style]
        accuracy = 100 * values(record, rule, "accuracy").mean(axis=0)
        ax.plot(record["sizes"], accuracy, color=colour, lw=width, ls=dash, label=label)
    ax.axhline(CHANCE, color="0.5", lw=0.8, ls=":")
    ax.text(record["sizes"][0], CHANCE + 1.5, "chance", color="0.4", fontsize=9)
    ax.set(ylim=(0, 100), ylabel="accuracy (%), mean of ten heads")


def plot_gains(ax: Axes, record: dict) -> None:
    """Draws paired differences from the baseline by n, with standard errors over heads."""
    baseline = values(record, BASELINE, "accuracy")
    for rule, (style, width, _) in SHOWN.items():
        colour, _, dash = STYLES[style]
        gain, error = mean_and_error(100 * (values(record, rule, "accuracy") - baseline))
        ax.errorbar(record["sizes"], gain, error, color=colour, lw=width, ls=dash,
                    elinewidth=0.8, capsize=2)  # fmt: skip
    ax.set(ylabel="points over the baseline")


if __name__ == "__main__":
    main()
