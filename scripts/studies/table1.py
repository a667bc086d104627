#!/usr/bin/env python
"""Table 1 of the paper for ten heads, with other rules; writes scripts/results/table1.json, .png.

scripts/studies/table1.py             # 25 minutes on one core; an interrupted run is resumed
scripts/studies/table1.py --markdown  # prints the tables of its page from the record

Each head is fitted to FIT_SETS inputs of each n as `calibrate fit` and `calibrate fit --paper` do
it, and scored on SCORED_SETS new ones.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from command_line import parse, study_parser
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import calibrate
from calibrate.core.rule import CONSTANT, POLYNOMIAL
from calibrate.errors import QualityError
from calibrate.evidence.baselines import HARD, PAPER, hard_attention, paper
from calibrate.evidence.calibration_error import expected_calibration_error, reliability
from calibrate.evidence.evidence import BASELINE, Evidence
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, RANKED, RIGHT
from calibrate.fitting.fit import fit_solved
from calibrate.fitting.options import LEAST_SQUARES, FitOptions
from calibrate.report.plot_style import STYLES, new_figure, own_style, save_figure, sizes_axis
from calibrate.rows.heads import load_head
from calibrate.rows.score import score_head
from calibrate.storage.atomic_io import write_atomically
from calibrate.store.fit import Fit

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "scripts" / "results" / "table1.json"
FOLDER = ROOT / "runs" / "table1"
N_HEADS = 10
SIZES = [16 << i for i in range(11)]
FIT_SETS, SCORED_SETS = 1_024, 2_048
NAMES = {
    BASELINE: "baseline",
    PAPER: "published polynomial",
    POLYNOMIAL: "fitted polynomial (default)",
    LEAST_SQUARES: "polynomial, least squares (`--paper`)",
    CONSTANT: "constant (maximum likelihood)",
    HARD: "arg max",
}
SHOWN = {  # in the figure: style, width, label
    HARD: (HARD, 1.5, "arg max"),
    POLYNOMIAL: ("own", 1.8, "fitted polynomial (default)"),
    CONSTANT: (CONSTANT, 1.0, "constant"),
    PAPER: (PAPER, 1.5, "published polynomial"),
    BASELINE: (BASELINE, 1.5, "baseline"),
}
CHANCE = 10  # accuracy of guessing one of ten classes, per cent
METRICS = ("accuracy", "nll", "ece")
# Table 1 of the paper: accuracy in per cent.
PAPERS_TABLE = {
    "baseline": [98.6, 97.1, 94.3, 89.7, 81.3, 70.1, 53.8, 35.7, 22.6, 15.7, 12.4],
    "adaptive": [98.6, 97.1, 94.5, 89.9, 82.1, 72.5, 57.7, 39.4, 24.9, 17.5, 14.0],
}


def main() -> None:
    parse(study_parser(__doc__), markdown, RESULT)
    heads = [result_of(f"max-retrieval-{i}") for i in range(N_HEADS)]
    record = {"sizes": SIZES, "heads": heads, "table_1_of_the_paper": PAPERS_TABLE}
    text = json.dumps(record)
    record = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.6g}"))
    write_atomically(RESULT, (json.dumps(record) + "\n").encode())
    save_figure(RESULT.with_suffix(".png"), accuracy_figure(record))
    print("\n".join(markdown(record)))


def result_of(name: str) -> dict:
    """The result of a head, from an earlier run if there is one."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        write_result(name, path)
        print(f"{name} is done", file=sys.stderr, flush=True)
    return json.loads(path.read_text())


def write_result(name: str, path: Path) -> None:
    """Fits a head, scores every rule on new inputs, and writes its numbers by rule and n."""
    head = load_head(name)
    rules, facts = fit_rules(name)
    evidence = score_head(head, SIZES, SCORED_SETS, 1, {PAPER: paper(), **rules})
    by_size = list(evidence.by("size").values())
    result = {
        rule: {metric: [numbers_of(part, rule)[metric] for part in by_size] for metric in METRICS}
        | {"all": numbers_of(evidence, rule)}
        for rule in evidence.rules
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"head": name, **facts, "rules": result}).encode())


def fit_rules(name: str) -> tuple[dict[str, Fit], dict]:
    """The rules of a head, and facts about the default fit."""
    solved = calibrate.solve(calibrate.collect(name, SIZES, FIT_SETS))
    options = {
        POLYNOMIAL: FitOptions(),
        LEAST_SQUARES: FitOptions(loss=LEAST_SQUARES),
        CONSTANT: FitOptions(CONSTANT),
    }
    rules, facts = {HARD: hard_attention()}, {"refused": {}}
    for rule, given in options.items():
        try:
            fit = fit_solved(solved.collection, solved, "a", given).fit
        except QualityError as refusal:
            facts["refused"][rule] = str(refusal)
            fit = fit_solved(solved.collection, solved, "a", given, refuse=False).fit
        rules[rule] = fit
    facts["degrees_of_freedom"] = rules[POLYNOMIAL].effective_degrees
    facts["r_squared"] = {rule: rules[rule].r_squared for rule in (POLYNOMIAL, LEAST_SQUARES)}
    facts["coefficients"] = {rule: rules[rule].coefficients for rule in options}
    facts["verdict"] = rules[POLYNOMIAL].verdict
    return rules, facts


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
    """Tables of accuracy at every n, of NLL and ECE at every second, and of the fits."""
    columns, few = head_rows(record["sizes"]), head_rows(record["sizes"][::2])
    published = record["table_1_of_the_paper"]
    lines = [*columns, *mean_rows(record, "accuracy", percent)]
    for name, key in (("baseline", "baseline"), ("its polynomial", "adaptive")):
        cells = [*published[key], float(np.mean(published[key]))]
        lines.append(row(f"*in the paper: {name}*", cells, "{:.1f}".format))
    lines += ["", *few, *mean_rows(record, "nll", "{:.3f}".format, leave_out=HARD, step=2)]
    lines += ["", *few, *mean_rows(record, "ece", percent, step=2)]
    return [*lines, "", *fit_rows(record)]


def head_rows(sizes: list[int]) -> list[str]:
    """The head of a table with a column for each n, and one for all of them."""
    names = [*(f"{size:,}" for size in sizes), "all"]
    return [row("n", names, str), "| --- |" + " ---: |" * len(names)]


def mean_rows(
    record: dict, metric: str, in_words: Callable[[float], str], leave_out: str = "", step: int = 1
) -> list[str]:
    """A row for each rule: means over the heads, at every n or every second, and over all n."""
    lines = []
    for rule, name in NAMES.items():
        if rule != leave_out:
            of_all = np.mean([head["rules"][rule]["all"][metric] for head in record["heads"]])
            by_size = values(record, rule, metric).mean(axis=0)[::step]
            lines.append(row(name, [*by_size.tolist(), float(of_all)], in_words))
    return lines


def fit_rows(record: dict) -> list[str]:
    """A row for each head: degrees of freedom, NLL over all n, and what was refused."""
    rules = [rule for rule in NAMES if rule != HARD]
    names = ["degrees of freedom", *(NAMES[r] for r in rules)]
    lines = [row("head", names, str), "| --- |" + " ---: |" * len(names)]
    for head in record["heads"]:
        cells = [f"{head['degrees_of_freedom']:.1f}"]
        for rule in rules:
            refused = " (refused)" if rule in head["refused"] else ""
            cells.append(f"{head['rules'][rule]['all']['nll']:.3f}{refused}")
        lines.append(row(head["head"], cells, str))
    return lines


@own_style()
def accuracy_figure(record: dict) -> Figure:
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
    return figure


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
        gain = 100 * (values(record, rule, "accuracy") - baseline)
        error = gain.std(axis=0, ddof=1) / np.sqrt(len(gain))
        ax.errorbar(record["sizes"], gain.mean(axis=0), error, color=colour, lw=width, ls=dash,
                    elinewidth=0.8, capsize=2)  # fmt: skip
    ax.set(ylabel="points over the baseline")


def row(name: str, cells: list, in_words: Callable[..., str]) -> str:
    return f"| {name} | " + " | ".join(map(in_words, cells)) + " |"


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


if __name__ == "__main__":
    main()
