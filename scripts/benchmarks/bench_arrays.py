"""Benchmark of `calibrate.fit`, logits in memory, against scikit-learn's temperature scaling.

    python scripts/benchmarks/bench_arrays.py [ROWS ...]   (default: 10,000, 100,000 and 1,000,000)

Rows have 64 items. The peer fits one temperature to all rows, by what method="temperature" of
`CalibratedClassifierCV` calls. Ours fits a polynomial to at most 262,144 rows, and all kinds of
rule to five folds for its verdict. Processor seconds, the least of three, after a call of each
with other rows.
"""

import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
from sklearn.calibration import _TemperatureScaling
from timing import answer_help

import calibrate

N_ITEMS = 64
REPEATS = 3


def main() -> None:
    counts = [int(word) for word in sys.argv[1:]] or [10_000, 100_000, 1_000_000]
    warnings.simplefilter("ignore")  # of rows beyond the most that are kept
    print(f"{'rows':>10} {'scikit-learn, s':>16} {'ours, s':>10} {'times':>7}")
    warm_up = rows_of_logits(2_000, seed=1)
    for count in counts:
        logits, target = rows_of_logits(count, seed=0)
        seconds = []
        for fit in (_TemperatureScaling().fit, calibrate.fit):
            fit(*warm_up)
            seconds.append(min(processor_seconds(fit, logits, target) for _ in range(REPEATS)))
        theirs, ours = seconds
        print(f"{count:10,} {theirs:16.2f} {ours:10.2f} {ours / theirs:7.2f}", flush=True)


def rows_of_logits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of 64 items with noise, and the item of the largest score."""
    rng = np.random.default_rng(seed)
    score = rng.uniform(0, 6, (count, N_ITEMS)).astype(np.float32)
    noise = 0.5 * rng.standard_normal(score.shape, np.float32)
    return score + noise, score.argmax(axis=1)


def processor_seconds(fit: Callable, logits: np.ndarray, target: np.ndarray) -> float:
    """Processor seconds of all threads of this process."""
    began = time.process_time()
    fit(logits, target)
    return time.process_time() - began


if __name__ == "__main__":
    answer_help(__doc__)
    main()
