#!/usr/bin/env python
"""SoftmaxCalibrator beside scikit-learn's temperature scaling: log loss and calibration error.

scripts/studies/temperature_scaling.py             # 10 minutes of one core; can be resumed
scripts/studies/temperature_scaling.py --markdown  # prints the tables of its page from the record

Writes scripts/results/temperature-scaling.json. Classes have normal logits z, and targets are drawn
from softmax at a known beta. Both calibrators are fitted to the same rows, with their defaults. Log
loss and calibration error are expectations over targets on fresh logits, so no sampling error of
fresh targets hides a difference.
"""

import json
import warnings
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from command_line import parse, study_parser
from joblib import Parallel, delayed
from scipy.special import log_softmax

import calibrate
from calibrate.evidence.evidence import BASELINE
from calibrate.storage.atomic_io import write_atomically

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "scripts" / "results" / "temperature-scaling.json"
FOLDER = ROOT / "runs" / "temperature"
SEEDS = 20
FRESH = 1_000  # rows
BINS = 15  # of the calibration error
THEIRS, OURS = "scikit-learn", "SoftmaxCalibrator"
RULES = (BASELINE, THEIRS, OURS)


class Cell(NamedTuple):
    """How rows are drawn."""

    classes: int
    rows: int
    beta: float  # at which targets are drawn
    spread: tuple[float, float]  # the range of the standard deviation of beta z in a row


GRID = [
    Cell(*cell, (2.0, 6.0)) for cell in product((3, 20, 1_000), (800, 8_000), (0.3, 1.0, 3.0, 10.0))
]
SHARP = [Cell(20, rows, 10.0, (8.0, 8.0)) for rows in (800, 8_000)]
DIFFUSE = [Cell(20, 2_000, 0.5, (1.0, 1.0))]


def main() -> None:
    parse(study_parser(__doc__), markdown, RESULT)
    cells = [*GRID, *SHARP, *DIFFUSE]
    found = Parallel(n_jobs=2)(delayed(compare)(cell) for cell in cells)
    record = {
        "scikit-learn": version("scikit-learn"),
        "cells": [
            cell._asdict() | summary(samples) for cell, samples in zip(cells, found, strict=True)
        ],
    }
    write_atomically(RESULT, (json.dumps(record, indent=1) + "\n").encode())
    print("\n".join(markdown(record)))


def compare(cell: Cell) -> list[dict]:
    """The scores of each seed, from an earlier run if there are any."""
    path = FOLDER / f"{cell.classes}-{cell.rows}-{cell.beta:g}-{cell.spread[1]:g}.json"
    if not path.exists():
        fresh, _ = draw(np.random.default_rng(SEEDS), cell._replace(rows=FRESH))
        samples = [sample(cell, seed, fresh.astype(float)) for seed in range(SEEDS)]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(samples).encode())
    return json.loads(path.read_text())


def draw(rng: np.random.Generator, cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """Logits (rows, classes) float32, and targets."""
    sharp = rng.standard_normal((cell.rows, cell.classes), np.float32)
    sharp *= rng.uniform(*cell.spread, (cell.rows, 1)).astype(np.float32)
    target = (sharp + rng.gumbel(size=sharp.shape)).argmax(axis=1)
    return sharp / np.float32(cell.beta), target


def sample(cell: Cell, seed: int, fresh: np.ndarray) -> dict:
    """Beta, log loss and calibration error of each calibrator, fitted to one draw of rows."""
    # What method="temperature" calls; `CalibratedClassifierCV` itself needs rows of every class.
    from sklearn.calibration import _TemperatureScaling

    logits, target = draw(np.random.default_rng([seed, cell.classes, cell.rows]), cell)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "softmax is left as it is" is counted
        ours = calibrate.SoftmaxCalibrator().fit(logits, target)
    theirs = _TemperatureScaling().fit(logits, target)
    log_p = {
        BASELINE: log_softmax(fresh, axis=1),
        THEIRS: log_softmax(float(theirs.beta_) * fresh, axis=1),
        OURS: np.log(ours.predict_proba(fresh)),
    }
    true = np.exp(log_softmax(cell.beta * fresh, axis=1))
    return {name: [beta_of(fresh, x), *scores(true, x)] for name, x in log_p.items()} | {
        "left": ours.coefficients_ == calibrate.identity()
    }


def beta_of(logits: np.ndarray, log_p: np.ndarray) -> float:
    """The mean of beta over rows: what the logits' differences were multiplied by."""
    return float(np.mean(np.ptp(log_p, axis=1) / np.ptp(logits, axis=1)))


def scores(true: np.ndarray, log_p: np.ndarray) -> tuple[float, float]:
    """Log loss in nats, and the expected calibration error, of targets drawn from `true`."""
    best = log_p.argmax(axis=1)[:, None]
    sure, right = (np.take_along_axis(x, best, axis=1)[:, 0] for x in (np.exp(log_p), true))
    off = np.bincount(np.minimum((sure * BINS).astype(int), BINS - 1), sure - right, BINS)
    return float(-(true * log_p).sum(axis=1).mean()), float(np.abs(off).sum() / len(sure))


def summary(samples: list[dict]) -> dict:
    """Means over seeds, and the difference of log loss with its standard error and worst seed."""
    of_each = {name: np.mean([s[name] for s in samples], axis=0) for name in RULES}
    means = {
        name: {"beta": beta, "log_loss": loss, "ece": ece}
        for name, (beta, loss, ece) in of_each.items()
    }
    more = np.array([s[OURS][1] - s[THEIRS][1] for s in samples])
    return means | {
        "left": sum(s["left"] for s in samples),
        "more": float(more.mean()),
        "error": float(more.std(ddof=1) / np.sqrt(len(more))),
        "worst": float(more.max()),
    }


def markdown(record: dict) -> list[str]:
    """The three tables of the study's page."""
    of = {Cell(c["classes"], c["rows"], c["beta"], tuple(c["spread"])): c for c in record["cells"]}
    lines = [
        f"| classes | rows | true beta | baseline | {THEIRS} | {OURS} | difference, nats | "
        f"worst seed | ECE, %: baseline | {THEIRS} | {OURS} | left at the baseline |",
        "| ---: |" + " ---: |" * 11,
    ]
    for cell in GRID:
        c = of[cell]
        scores_of = [c[name] for name in RULES]
        lines.append(
            f"| {cell.classes:,} | {cell.rows:,} | {cell.beta:g} | "
            + "".join(f"{x['log_loss']:.3f} | " for x in scores_of)
            + f"{c['more']:+.4f} ± {c['error']:.4f} | {c['worst']:+.4f} | "
            + "".join(f"{100 * x['ece']:.1f} | " for x in scores_of)
            + f"{c['left']} of {SEEDS} |"
        )
    for cells in (SHARP, DIFFUSE):
        lines += ["", f"| rows | baseline | {OURS} | {THEIRS} |", "| ---: | --- | --- | --- |"]
        for cell in cells:
            found = (in_short(of[cell][name]) for name in (BASELINE, OURS, THEIRS))
            lines.append(f"| {cell.rows:,} | " + " | ".join(found) + " |")
    return lines


def in_short(scores: dict) -> str:
    """Beta, log loss and calibration error in per cent."""
    return f"{scores['beta']:.2f}: {scores['log_loss']:.3f} / {100 * scores['ece']:.1f}"


if __name__ == "__main__":
    main()
