"""Data sets of paper_procedure.py: heads of several kinds, and arrays that are hard to fit.

A data set has calibration rows, held-out rows, and a head if there is one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import train_heads

import calibrate
from calibrate.rows import max_retrieval
from calibrate.rows.collect import collect_arrays
from calibrate.rows.collection import RowCollection
from calibrate.rows.heads import Head, load_head
from calibrate.rows.logits_files import Arrays

SIZES = (16, 64, 256, 1_024, 4_096)
FIT_SETS, HELD_OUT_SETS = 512, 1_024  # of each size, of heads
FIT_SEED, HELD_OUT_SEED = 0, 1
SCORED_SETS = 1_024  # of each size, for accuracy
WIDTHS = {f"width {n}": n for n in (16, 32, 64)}  # of the heads that are trained here
STEPS = 10_000  # of their training

Draw = Callable[[np.random.Generator, int, int], tuple[np.ndarray, np.ndarray]]


class DataSet(NamedTuple):
    """Rows to fit, and rows to score."""

    collection: RowCollection
    held_out: Arrays
    head: Head | None


def head_data(make: Callable[[Path], Head], folder: Path) -> DataSet:
    """Rows of a head; the folder has the weights of heads that were trained before."""
    head = make(folder)
    fitted, scored = (
        calibrate.collect(head, SIZES, sets, seed=seed)
        for sets, seed in ((FIT_SETS, FIT_SEED), (HELD_OUT_SETS, HELD_OUT_SEED))
    )
    parts = [{"logits": shard.logits, "target": shard.target} for _, shard in scored.shards()]
    return DataSet(fitted, Arrays.in_memory(f"{head.name}, held out", parts), head)


def array_data(draw: Draw, sizes: Sequence[int], rows: int, folder: Path) -> DataSet:
    """Rows of a distribution, so many of each size, and twice as many held out or more."""
    fitted, scored = (
        [draw(np.random.default_rng([seed, n]), count, n) for n in sizes]
        for seed, count in ((FIT_SEED, rows), (HELD_OUT_SEED, max(2 * rows, 1_000)))
    )
    arrays = [
        Arrays.in_memory(name, [{"logits": z.astype(np.float32), "target": t} for z, t in of])
        for name, of in (("fitted", fitted), ("held out", scored))
    ]
    return DataSet(collect_arrays(arrays[0]), arrays[1], None)


@contextmanager
def width_of(name: str) -> Iterator[None]:
    """Gives max-retrieval heads the width that the data set of this name has."""
    features = WIDTHS.get(name, max_retrieval.N_FEATURES)
    before = max_retrieval.LAYERS, max_retrieval.N_FEATURES
    max_retrieval.LAYERS = {
        layer: (features if a == before[1] else a, features if b == before[1] else b)
        for layer, (a, b) in before[0].items()
    }
    max_retrieval.N_FEATURES = features
    try:
        yield
    finally:
        max_retrieval.LAYERS, max_retrieval.N_FEATURES = before


def wide_head(features: int, folder: Path) -> Head:
    """A max-retrieval head of another width, trained as scripts/studies/train_heads.py does it."""
    return load_head(str(train_heads.train(0, STEPS, folder / f"width-{features}")))


class ScaledLogits:
    """A built-in head whose logits are multiplied by a factor."""

    trained_up_to = max_retrieval.MaxRetrievalHead.trained_up_to

    def __init__(self, name: str, factor: float) -> None:
        head: Any = load_head(name)
        self._head, self._factor = head, factor
        self.name, self.fingerprint = f"{name} x {factor:g}", f"{head.fingerprint}-x{factor:g}"
        self.sample, self.correct, self.correct_each = head.sample, head.correct, head.correct_each

    def attend(self, batch: Any) -> Any:
        attended = self._head.attend(batch)
        return attended._replace(logits=self._factor * attended.logits)


class Recall(NamedTuple):
    """Keys with a class each, and queries that are noisy copies of one key."""

    key: np.ndarray  # (count, size, FEATURES)
    query: np.ndarray  # (count, FEATURES)
    category: np.ndarray  # (count, size)
    target: np.ndarray  # (count,)
    logits: np.ndarray | tuple = ()  # (count, size), once they are known


class NoisyRecall:
    """Associative recall: the class of the key that a noisy query is a copy of."""

    FEATURES, CLASSES = 16, 10
    name = "noisy-recall"
    fingerprint = calibrate.fingerprint({"features": 16, "classes": 10})

    def sample(self, seed: int, size: int, count: int) -> Recall:
        rng = np.random.default_rng(seed)
        key = rng.standard_normal((count, size, self.FEATURES), np.float32)
        target = rng.integers(0, size, count)
        query = self.query_of(rng, key[np.arange(count), target])
        return Recall(key, query, rng.integers(0, self.CLASSES, (count, size)), target)

    def query_of(self, rng: np.random.Generator, key: np.ndarray) -> np.ndarray:
        """(count, FEATURES) keys with noise."""
        noise = rng.uniform(0.2, 2, (len(key), 1)) * rng.standard_normal(key.shape)
        return key + noise.astype(np.float32)

    def attend(self, batch: Recall) -> Recall:
        logits = np.einsum("bnf,bf->bn", batch.key, batch.query) / np.sqrt(self.FEATURES)
        return batch._replace(logits=logits.astype(np.float32))

    def correct(self, attended: Recall, weights: Any) -> np.ndarray:
        share = [np.where(attended.category == c, weights, 0).sum(1) for c in range(self.CLASSES)]
        label = np.take_along_axis(attended.category, attended.target[:, None], 1)[:, 0]
        return np.argmax(share, axis=0) == label


class RecallOfManyNorms(NoisyRecall):
    """Associative recall with equal noise; norms of queries are log-normal, and mean nothing.

    A long query is over-confident, a short one diffuse: the entropy tells which it is.
    """

    name = "recall-of-many-norms"
    NOISE, LOG_NORM = 0.5, 1.0  # standard deviations
    fingerprint = calibrate.fingerprint({"noise": NOISE, "log_norm": LOG_NORM})

    def query_of(self, rng: np.random.Generator, key: np.ndarray) -> np.ndarray:
        noisy = key + self.NOISE * rng.standard_normal(key.shape, np.float32)
        return noisy * rng.lognormal(0, self.LOG_NORM, (len(key), 1)).astype(np.float32)


def lookup(rng: np.random.Generator, rows: int, n: int) -> Any:
    """Normal logits with a deviation of 2; that of the target is 6 higher."""
    logits, target = 2 * rng.standard_normal((rows, n)), rng.integers(0, n, rows)
    logits[np.arange(rows), target] += 6
    return logits, target


def near_ties(rng: np.random.Generator, rows: int, n: int) -> Any:
    """Rows of `lookup`; in a tenth of the rows the target is up to 1e-5 below the highest logit."""
    logits, target = lookup(rng, rows, n)
    tied, row = rng.random(rows) < 0.1, np.arange(rows)
    others = np.where(np.arange(n) == target[:, None], -np.inf, logits)
    below = others.max(axis=1) - rng.uniform(1e-6, 1e-5, rows)
    logits[row, target] = np.where(tied, below, logits[row, target])
    return logits, target


def heavy_tails(rng: np.random.Generator, rows: int, n: int) -> Any:
    """Values and noise of Student's t with 2 and 3 degrees of freedom."""
    value = rng.standard_t(2, (rows, n))
    return value + rng.standard_t(3, value.shape), value.argmax(axis=1)


def clusters(rng: np.random.Generator, rows: int, n: int) -> Any:
    """As `lookup` with logits a tenth as large: entropies lie close to log n."""
    logits, target = lookup(rng, rows, n)
    return 0.1 * logits, target


def query_norms(rng: np.random.Generator, rows: int, n: int) -> Any:
    """As `lookup`, each row multiplied by a factor of its own between 1/16 and 1."""
    logits, target = lookup(rng, rows, n)
    return logits * np.exp(rng.uniform(-np.log(16), 0, (rows, 1))), target


BUILT_IN_HEADS = [f"max-retrieval-{i}" for i in range(10)]
DATA: dict[str, Callable[[Path], DataSet]] = {
    **{
        name: partial(head_data, lambda folder, name=name: load_head(name))
        for name in BUILT_IN_HEADS
    },
    **{name: partial(head_data, partial(wide_head, n)) for name, n in WIDTHS.items()},
    "noisy recall": partial(head_data, lambda folder: NoisyRecall()),
    "log-normal norms": partial(head_data, lambda folder: RecallOfManyNorms()),
    "logits / 8": partial(head_data, lambda folder: ScaledLogits("max-retrieval-0", 1 / 8)),
    "logits x 8": partial(head_data, lambda folder: ScaledLogits("max-retrieval-0", 8)),
    "near ties": partial(array_data, near_ties, (16, 64, 256, 1_024), 1_000),
    "heavy tails": partial(array_data, heavy_tails, (16, 64, 256, 1_024), 1_000),
    "few rows": partial(array_data, lookup, (16, 64, 256), 200),
    "clusters of entropies": partial(array_data, clusters, (8, 1_024), 1_000),
    "norms of queries vary": partial(array_data, query_norms, (16, 64, 256, 1_024), 1_000),
}
