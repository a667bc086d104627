#!/usr/bin/env python
"""SoftmaxCalibrator beside scikit-learn's temperature scaling: log loss and calibration error.

scripts/studies/temperature_scaling.py             # 10 minutes of one core; can be resumed
scripts/studies/temperature_scaling.py --markdown  # prints the tables of its page from the record

Writes scripts/results/temperature-scaling.json. Classes have normal logits z, and targets are drawn
from softmax at a known beta. Both calibrators are fitted to the same rows, with their defaults. Log
loss and calibration error are expectations over targets on fresh logits, so no sampling error of
fresh targets hides a difference.
"""

import warnings
from importlib.metadata import version
from itertools import product
from typing import NamedTuple

import numpy as np
from joblib import Parallel, delayed
from scipy.special import log_softmax
from study import (
    RESULTS,
    RUNS,
    kept,
    mean_and_error,
    parse,
    table,
    with_errors,
    write_record,
)

import calibrate
from calibrate.evidence.evidence import BASELINE

RESULT = RESULTS / "temperature-scaling.json"
SEEDS = 20
FRESH = 1_000  # rows
BINS = 15  # of the calibration error
SPREAD = 2.0, 6.0  # the range of the standard deviation of beta z in a row
THEIRS, OURS = "scikit-learn", "SoftmaxCalibrator"
RULES = (BASELINE, THEIRS, OURS)


class Cell(NamedTuple):
    """How rows are drawn."""

    classes: int
    rows: int
    beta: float  # at which targets are drawn


GRID = [Cell(*cell) for cell in product((3, 20, 1_000), (800, 8_000), (0.3, 1.0, 3.0, 10.0))]
TABLE_ROWS = 800


def main() -> None:
    parse(__doc__, markdown, RESULT)
    samples = Parallel(n_jobs=2)(delayed(compare)(cell) for cell in GRID)
    cells = [cell._asdict() | summary(found) for cell, found in zip(GRID, samples, strict=True)]
    record = write_record(RESULT, {"scikit-learn": version("scikit-learn"), "cells": cells})
    print("\n".join(markdown(record)))


def compare(cell: Cell) -> list[dict]:
    """The scores of each seed, from an earlier run if there are any."""
    path = RUNS / "temperature" / f"{cell.classes}-{cell.rows}-{cell.beta:g}.json"

    def samples() -> list[dict]:
        fresh, _ = draw(np.random.default_rng(SEEDS), cell._replace(rows=FRESH))
        return [sample(cell, seed, fresh.astype(float)) for seed in range(SEEDS)]

    return kept(path, samples)


def draw(rng: np.random.Generator, cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """Logits (rows, classes) float32, and targets."""
    sharp = rng.standard_normal((cell.rows, cell.classes), np.float32)
    sharp *= rng.uniform(*SPREAD, (cell.rows, 1)).astype(np.float32)
    target = (sharp + rng.gumbel(size=sharp.shape)).argmax(axis=1)
    return sharp / np.float32(cell.beta), target


def sample(cell: Cell, seed: int, fresh: np.ndarray) -> dict:
    """Log loss and calibration error of each calibrator, fitted to one draw of rows."""
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
    is_left = ours.coefficients_ == calibrate.identity()
    return {name: scores(true, x) for name, x in log_p.items()} | {"left": is_left}


def scores(true: np.ndarray, log_p: np.ndarray) -> tuple[float, float]:
    """Log loss in nats, and the expected calibration error, of targets drawn from `true`."""
    best = log_p.argmax(axis=1)[:, None]
    sure, right = (np.take_along_axis(x, best, axis=1)[:, 0] for x in (np.exp(log_p), true))
    off = np.bincount(np.minimum((sure * BINS).astype(int), BINS - 1), sure - right, BINS)
    return float(-(true * log_p).sum(axis=1).mean()), float(np.abs(off).sum() / len(sure))


def summary(samples: list[dict]) -> dict:
    """Means over seeds, and the difference of log loss with its standard error and worst seed."""
    means = {
        name: dict(zip(("log_loss", "ece"), np.mean([s[name] for s in samples], axis=0).tolist(),
                       strict=True))
        for name in RULES
    }  # fmt: skip
    more = np.array([s[OURS][0] - s[THEIRS][0] for s in samples])
    mean, error = mean_and_error(more)
    return means | {
        "left": sum(s["left"] for s in samples),
        "more": float(mean),
        "error": float(error),
        "worst": float(more.max()),
    }


def markdown(record: dict) -> list[str]:
    """The table of the study's page, of TABLE_ROWS rows."""
    titles = [*(f"log loss, nats: {rule}" for rule in RULES), "difference, nats", "worst seed"]
    titles += [*(f"ECE, %: {rule}" for rule in (THEIRS, OURS)), "left at the baseline"]
    rows = []
    for cell in record["cells"]:
        if cell["rows"] == TABLE_ROWS:
            cells = [f"{cell['beta']:g}", *(f"{cell[rule]['log_loss']:.3f}" for rule in RULES)]
            cells += [*with_errors([cell["more"]], [cell["error"]], "+z.4f"),
                      f"{cell['worst']:+z.4f}"]  # fmt: skip
            cells += [f"{100 * cell[rule]['ece']:.1f}" for rule in (THEIRS, OURS)]
            rows.append([f"{cell['classes']:,}", *cells, f"{cell['left']} of {SEEDS}"])
    return table(["classes", "true beta", *titles], rows)


if __name__ == "__main__":
    main()
