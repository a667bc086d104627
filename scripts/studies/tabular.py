#!/usr/bin/env python
"""A classifier that learns in its context, on tables with more rows than it was trained on.

scripts/studies/tabular.py             # all steps below, in this order
scripts/studies/tabular.py train       # models into scripts/weights, checkpoints into runs/tabular
scripts/studies/tabular.py calibrate   # fits through the models, beside their weights
scripts/studies/tabular.py measure     # scripts/results/tabular.json and its figure
scripts/studies/tabular.py --markdown  # prints the tables of its page from the record

Existing results are kept. A seed takes 9 minutes of a core to train, and 9 to 14 for the rest.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from small_models import load_model, on_all_cores
from study import (
    RESULTS,
    RUNS,
    WEIGHTS,
    kept,
    mean_and_error,
    parse,
    table,
    with_errors,
    write_record,
)
from tabular_model import TRAINED_ROWS, TableModel, log_p_of, train_into
from tabular_tasks import (
    CLASSES,
    DATA_SETS,
    FEATURES,
    Tables,
    draw,
    neighbours,
    regression,
    rows_of,
    split_of,
)

import calibrate
from calibrate.core.rule import ENTROPY_AND_SIZE, LOG_SIZE
from calibrate.evidence.baselines import log_size_rule, one_constant
from calibrate.evidence.evidence import BASELINE
from calibrate.report.plot_style import STYLES, new_figure, own_style, save_figure, sizes_axis
from calibrate.store.fit import Fit
from calibrate.transformers import apply

RESULT = RESULTS / "tabular.json"
RUN = RUNS / "tabular"
SEEDS = (0, 1, 2)
STEPS, RATE = 8_000, 2e-3
SIZES = [16 << 2 * i for i in range(5)]  # labelled rows, up to 64 times the trained ones
MEASURED = (128, 128, 128, 64, 32)  # tables of each size
QUERIES = 128
DATA_SIZES, DRAWS, MIN_QUERIES = (16, 64, 128, 512, 1024), 16, 20
CALIBRATION = {64: 8, 256: 4, 1024: 1}  # labelled rows: tables of a batch
CALIBRATION_BATCHES = 64  # of each size
TYPICAL_SIZE = 512
FIT_STEPS = 60  # of each kind of rule
KINDS = ("constant", LOG_SIZE, ENTROPY_AND_SIZE)
OWN = ENTROPY_AND_SIZE  # of all seeds, the lowest NLL on the held-out batches for calibration
# A table that runs a model.
SMALL = {
    "features": torch.arange(12.0 * FEATURES).view(1, 12, FEATURES),
    "labels": torch.arange(8)[None] % CLASSES,
}
CONSTANTS = (1, 1.25, 1.5, 2, 2.5, 3, 4)
LABELS = {  # of the arms in the tables
    BASELINE: "baseline",
    "paper": "the paper's published polynomial",
    "best-constant": "grid constant, all heads",
    "log-n": f"log n / log {TRAINED_ROWS[1]}, all heads",
    "constant": "constant by head, fitted",
    OWN: "fitted rule (entropy-and-size by head)",
    "neighbours": "k nearest neighbours",
}
# Measure: title, scale and decimals.
TITLES = {"accuracy": ("accuracy (%)", 100, 1), "log_loss": ("log loss (nats)", 1, 3)}
ON_DATA = {arm: LABELS[arm] for arm in (BASELINE, "paper", OWN, "neighbours")}
ON_DATA |= {"regression": "logistic regression"}
COMPARED = (BASELINE, "best-constant", "log-n", "constant", "paper", "neighbours")
TABLE_SIZES = (16, 1_024, 4_096)
SHOWN = {
    BASELINE: "baseline", "paper": "paper", "best-constant": "constant", "log-n": "log-n",
    OWN: "own", "neighbours": "hard",
}  # fmt: skip


def main() -> None:
    steps = {"train": train_model, "calibrate": calibrate_model, "measure": measure_model}
    for name in parse(__doc__, markdown, RESULT, steps):
        found = on_all_cores(steps[name], SEEDS)
        if name == "measure":
            record = {"seeds": SEEDS, "sizes": SIZES, "tables": MEASURED, "queries": QUERIES}
            record |= {"draws": DRAWS, "found": found}
            draw_record(RESULT.with_suffix(".png"), write_record(RESULT, record))


def weights_of(seed: int) -> Path:
    return WEIGHTS / f"tabular-{seed}"


def train_model(seed: int) -> None:
    if not weights_of(seed).exists():
        train_into(weights_of(seed), seed, STEPS, RATE, RUN / f"{seed}.checkpoint")


def calibrate_model(seed: int) -> None:
    """Fits each kind of rule through the model."""
    for kind in KINDS:
        fit_kind(seed, kind)


def fit_of(seed: int, kind: str) -> Path:
    return weights_of(seed) / f"{kind}.json"


def fit_kind(seed: int, kind: str) -> None:
    path = fit_of(seed, kind)
    if path.exists():
        return
    batches = calibration_batches(seed)
    fit = calibrate.fit_model(
        load_model(weights_of(seed), TableModel), batches, log_p,
        template=[str(x.n_labelled) for x in batches], size=TYPICAL_SIZE, kind=kind,
        steps=FIT_STEPS, name=f"tabular-{seed}",
    )  # fmt: skip
    fit.save(path)
    print(f"{path.parent.name}, {path.stem}: {fit.verdict}", file=sys.stderr, flush=True)


def calibration_batches(seed: int) -> list[Tables]:
    return [
        draw(np.random.default_rng([1, seed, size, number]), count, size, QUERIES)
        for size, count in CALIBRATION.items() for number in range(CALIBRATION_BATCHES)
    ]  # fmt: skip


def log_p(model: TableModel, tables: Tables) -> torch.Tensor:
    """Mean log p of the right classes, of each table."""
    right = torch.from_numpy(tables.labels[:, tables.n_labelled :])
    return log_p_of(model, tables).gather(-1, right[..., None]).mean((1, 2))


def measure_model(seed: int) -> dict:
    """Scores of every arm, leads of the fitted rule, and the fits."""
    model = load_model(weights_of(seed), TableModel)
    best = kept(kept_in(seed, "best"), lambda: best_constant(model, seed))
    fits = {kind: calibrate.load(fit_of(seed, kind)) for kind in KINDS}
    rules = {
        BASELINE: calibrate.identity(), "paper": calibrate.load("paper@1"),
        "best-constant": one_constant(best), "log-n": log_size_rule(TRAINED_ROWS[1]), **fits,
    }  # fmt: skip
    scores = {
        name: kept(kept_in(seed, name), lambda rule=rule: scores_of(model_with(model, rule), seed))
        for name, rule in rules.items()
    }
    for name, peer in (("neighbours", neighbours), ("regression", regression)):
        scores[name] = kept(kept_in(seed, name), lambda peer=peer: scores_of(peer, seed))
    return {
        "best_constant": best,
        "fits": {kind: described(fit) for kind, fit in fits.items()},
        "scores": {name: summary(values) for name, values in scores.items()},
        "leads": {name: summary(scores[OWN], scores[name]) for name in COMPARED},
    }


def kept_in(seed: int, what: str) -> Path:
    return RUN / f"{seed}-{what}.json"


def best_constant(model: TableModel, seed: int) -> float:
    """The constant with the best log p on the tables for calibration, sizes weighted equally."""

    def value(beta: float) -> float:
        apply(model, one_constant(beta), **SMALL)
        with torch.no_grad():
            return float(np.mean([log_p(model, x).mean() for x in calibration_batches(seed)]))

    return max(CONSTANTS, key=value)


def model_with(model: TableModel, rule: Fit) -> Callable[[Tables], np.ndarray]:
    """A function of tables: the predictions of a model under a rule."""
    return partial(predictions, apply(model, rule, **SMALL))


@torch.no_grad()
def predictions(model: TableModel, tables: Tables) -> np.ndarray:
    """Log p of the classes of a table's queries, (queries, CLASSES)."""
    return log_p_of(model, tables)[0].numpy()


def scores_of(predict: Callable[[Tables], np.ndarray], seed: int) -> dict:
    """Each measure of each table: of random ones by size, and of the data sets by size."""
    scores = {"random": {}}
    for size, count in zip(SIZES, MEASURED, strict=True):
        scores["random"][size] = [score(predict, x) for x in measured_tables(seed, size, count)]
    for i, name in enumerate(DATA_SETS):
        scores[name] = {}
        for size in data_sizes(name):
            seeds = ([3, i, seed, size, number] for number in range(DRAWS))
            tables = (split_of(np.random.default_rng(x), name, size, 2 * QUERIES) for x in seeds)
            scores[name][size] = [score(predict, x) for x in tables]
    return scores


def measured_tables(seed: int, size: int, count: int) -> Iterator[Tables]:
    """Random tables, one at a time, that no fit and no training has seen."""
    for number in range(count):
        yield draw(np.random.default_rng([2, seed, size, number]), 1, size, QUERIES)


def score(predict: Callable[[Tables], np.ndarray], tables: Tables) -> tuple[float, float]:
    """Share of right answers, and log loss in nats, of a table's queries."""
    log_p, right = predict(tables), tables.labels[0, tables.n_labelled :]
    of_right = log_p[np.arange(len(right)), right]
    return float((log_p.argmax(-1) == right).mean()), float(-of_right.mean())


def summary(scores: dict, less: dict | None = None) -> dict:
    """Mean and standard error over tables of each measure, of scores or of a lead, by size."""
    found = {}
    for name, by_size in scores.items():
        found[name] = {measure: [] for measure in TITLES}
        for size, values in by_size.items():
            values = np.array(values) - (0 if less is None else less[name][size])
            for measure, *cell in zip(TITLES, *mean_and_error(values), strict=True):
                found[name][measure].append([round(float(x), 5) for x in cell])
    return found


def described(fit: Fit) -> dict:
    """The kind of a fit, and its verdict."""
    kind = fit.rule.kind if fit.has_heads else f"{fit.rule.kind}, all heads alike"
    return {"kind": kind, "verdict": fit.verdict}


def pooled(record: dict, part: str, arm: str, of: str, measure: str) -> np.ndarray:
    """(sizes, 2): the mean of the seeds, and its standard error over the tables of all."""
    cells = np.array([found[part][arm][of][measure] for found in record["found"]])
    errors = np.sqrt((cells[..., 1] ** 2).sum(axis=0)) / len(cells)
    return np.stack([cells[..., 0].mean(axis=0), errors], axis=-1)


def data_sizes(name: str) -> list[int]:
    return [size for size in DATA_SIZES if size + MIN_QUERIES <= rows_of(name)]


def markdown(record: dict) -> list[str]:
    """Tables by labelled rows: scores, leads of the fitted rule, and scores on the data sets."""
    places = [record["sizes"].index(size) for size in TABLE_SIZES]
    titles = [f"{title}, {n:,}" for title, *_ in TITLES.values() for n in TABLE_SIZES]
    scores = ([label, *(cells_of(record, arm, "random", measure)[i]
                        for measure in TITLES for i in places)]
              for arm, label in LABELS.items())  # fmt: skip
    leads = ([LABELS[arm], *(leads_of(record, arm, measure)[i]
                             for measure in TITLES for i in places)]
             for arm in COMPARED)  # fmt: skip
    lines = [*table(["labelled rows", *titles], scores), ""]
    lines += table(["fitted rule less others (in SE)", *titles], leads)
    for measure, (title, *_) in TITLES.items():
        rows = (row for name in DATA_SETS for row in data_rows(record, name, measure))
        lines += ["", *table([title, *ON_DATA.values()], rows)]
    return lines


def cells_of(record: dict, arm: str, of: str, measure: str) -> list[str]:
    """The scores of an arm by size."""
    _, scale, digits = TITLES[measure]
    return with_errors(*(scale * pooled(record, "scores", arm, of, measure).T), f".{digits}f")


def leads_of(record: dict, arm: str, measure: str) -> list[str]:
    """What the fitted rule has more than an arm, by size, and that in standard errors."""
    _, scale, digits = TITLES[measure]
    means_and_errors = pooled(record, "leads", arm, "random", measure)
    return [f"{scale * m:+.{digits}f} ({m / max(e, 1e-9):+.1f})" for m, e in means_and_errors]


def data_rows(record: dict, name: str, measure: str) -> Iterator[list[str]]:
    """The scores on a data set at its smallest and its largest number of labelled rows."""
    sizes = data_sizes(name)
    by_arm = [cells_of(record, arm, name, measure) for arm in ON_DATA]
    for place in (0, -1):
        yield [f"{name}, {sizes[place]:,} rows", *(cells[place] for cells in by_arm)]


@own_style()
def draw_record(path: Path, record: dict) -> None:
    figure = new_figure(9.6, 4.6)
    for ax, measure in zip(figure.subplots(1, 2), TITLES, strict=True):
        title, scale, _ = TITLES[measure]
        for arm, style in SHOWN.items():
            colour, marker, dash = STYLES[style]
            mean, error = scale * pooled(record, "scores", arm, "random", measure).T
            ax.errorbar(record["sizes"], mean, error, fmt=dash, color=colour, marker=marker, ms=5,
                        lw=1.4, capsize=2, label=LABELS[arm])  # fmt: skip
        sizes_axis(ax, record["sizes"])
        ax.set_xlabel("labelled rows (trained on 8 to 64)")
        ax.set_ylabel(title)
        ax.grid(alpha=0.25, lw=0.5)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center",
                  ncols=3, frameon=False)  # fmt: skip
    save_figure(path, figure)


if __name__ == "__main__":
    main()
