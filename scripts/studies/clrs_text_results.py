"""Tables and figure of the study of CLRS-Text, from its record."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from clrs_text_task import TASKS

from calibrate.report.plot_style import STYLES, new_figure, own_style, save_figure, sizes_axis

LABELS = {
    "plain": "baseline",
    "paper": "the paper's published polynomial, at inference only",
    "constant": "best constant",
    "log-n": "log n / log 98",
    "own": "fitted rule, through the model",
    "trained-paper": "the paper's published polynomial, in training too",
    "tuned": "trained further, baseline",
    "tuned-own": "trained further with the fitted rule",
    "rope": "positions without gaps in training",
}
SHOWN = {  # in the figure: style
    "plain": "baseline", "paper": "least-squares", "trained-paper": "paper", "own": "own",
    "tuned-own": "constant",
}  # fmt: skip
# Who is compared, prompt by prompt.
PAIRS = (
    ("own", "plain"), ("own", "constant"), ("own", "log-n"), ("own", "paper"),
    ("trained-paper", "plain"), ("tuned-own", "tuned"), ("tuned-own", "trained-paper"),
)  # fmt: skip
MEASURES = ("right", "log_p")
Scores = Mapping[str, Mapping[str, Sequence]]  # of a model: task, measure, (lengths, prompts)


def gathered(scored: Mapping[str, Sequence[Scores]]) -> dict:
    """Means and errors by arm, task and length, and of pairs of arms."""
    found = {
        arm: {
            task: {measure: summary([s[task][measure] for s in of_seeds]) for measure in MEASURES}
            for task in TASKS
        }
        for arm, of_seeds in scored.items()
    }
    pairs = [
        {"arms": (one, other)} | {
            measure: summary([
                np.concatenate(
                    [np.subtract(a[task][measure], b[task][measure]) for task in TASKS], axis=1
                )
                for a, b in zip(scored[one], scored[other], strict=False)  # the seeds of both
            ])
            for measure in MEASURES
        }
        for one, other in PAIRS if {one, other} <= scored.keys()
    ]  # fmt: skip
    return {"arms": found, "pairs": pairs}


def summary(of_seeds: Sequence) -> dict[str, list]:
    """Mean of each seed, and the standard error of their mean: (lengths,).

    The error is the larger of two: from how seeds differ, and from how prompts do.
    """
    x = np.asarray(of_seeds, float)  # (seeds, lengths, prompts)
    seeds, _, prompts = x.shape
    error = np.sqrt(x.var(axis=2, ddof=1).mean(axis=0) / (seeds * prompts))
    if seeds > 1:
        error = np.maximum(error, x.mean(axis=2).std(axis=0, ddof=1) / np.sqrt(seeds))
    return {"of_seeds": x.mean(axis=2).round(4).tolist(), "error": error.round(4).tolist()}


def mean_of(found: Mapping) -> np.ndarray:
    return np.mean(found["of_seeds"], axis=0)


def markdown(record: dict) -> list[str]:
    """Exact match of the baseline by task and length, and differences of arms over all tasks."""
    lengths = " | ".join(map(str, record["lengths"]))
    head = [f"| {lengths} |", "| --- |" + " ---: |" * len(record["lengths"])]
    lines = [f"| exact match, %: baseline, length {head[0]}", head[1]]
    for task in TASKS:
        found = record["found"]["arms"]["plain"][task]["right"]
        cells = [
            f"{100 * m:.0f} ± {100 * e:.0f}"
            for m, e in zip(mean_of(found), found["error"], strict=True)
        ]
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    lines.append("")
    for measure, unit, scale in (
        ("right", "exact match, points", 100),
        ("log_p", "log-likelihood, nats per token", 1),
    ):
        lines += [f"| {unit}: all tasks, length {head[0]}", head[1]]
        for pair in record["found"]["pairs"]:
            mean, error = mean_of(pair[measure]) * scale, np.multiply(pair[measure]["error"], scale)
            digits = 1 if measure == "right" else 3
            cells = [f"{m:+z.{digits}f} ± {e:.{digits}f}" for m, e in zip(mean, error, strict=True)]
            one, other = (LABELS[arm] for arm in pair["arms"])
            lines.append(f"| {one}, less {other} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines[:-1]


@own_style()
def draw_accuracy(path: Path, record: dict) -> None:
    figure = new_figure(10.8, 6.8)
    axes = figure.subplots(2, 3, sharex=True, sharey=True)
    for ax, task in zip(axes.flat, TASKS, strict=True):
        for arm, style in SHOWN.items():
            if arm not in record["found"]["arms"]:
                continue
            colour, marker, dash = STYLES[style]
            right = record["found"]["arms"][arm][task]["right"]
            ax.errorbar(
                record["lengths"], 100 * mean_of(right), 100 * np.array(right["error"]), fmt=dash,
                color=colour, marker=marker, ms=4, lw=1.4, capsize=2, label=LABELS[arm],
            )  # fmt: skip
        ax.axvspan(*record["trained"], color="#dddddd", alpha=0.5, lw=0)
        sizes_axis(ax, record["lengths"])
        ax.set_xlabel("")
        ax.grid(alpha=0.25, lw=0.5)
        ax.set_title(task, fontsize=10)
    for ax in axes[:, 0]:
        ax.set_ylabel("exact match (%)")
    for ax in axes[-1]:
        ax.set_xlabel("length (trained on those in grey)")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2,
                  frameon=False)  # fmt: skip
    save_figure(path, figure)
