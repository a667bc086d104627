"""Diagnosis of heads: which disperse, and which are worth calibrating, from a sample of rows."""

from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.errors import CalibrateError, QualityError
from calibrate.files.rows import Heads, KeptRows, RowCollection, refuse_bad_rows
from calibrate.maths import solver
from calibrate.maths.bounds import dispersal_size
from calibrate.maths.row_batches import slices
from calibrate.rows import solved_rows
from calibrate.rows.head_verdict import (
    FEW,
    LEAST_SAMPLE,
    Headroom,
    Sink,
    Slope,
    Verdict,
    attended,
    find_sink,
    judge,
    measure_headroom,
    refuse_few_groups,
)
from calibrate.rows.solved_rows import Rows, head_label, known_index

PERCENTILES = (10, 50, 90)


class AtSize(NamedTuple):
    """The rows of one set size."""

    size: int
    rows: int
    items: float  # geometric mean of the unmasked items
    entropy: float  # mean, nats
    entropy_spread: float  # standard deviation over rows
    commitment: float  # mean, nats
    susceptibility: float  # mean, logits squared
    on_top: float  # share of the rows whose target has the top logit


class Contexts(NamedTuple):
    """Commitment and susceptibility of each row; arrays (rows,)."""

    size: np.ndarray
    commitment: np.ndarray  # nats
    susceptibility: np.ndarray  # logits squared


class HeadDiagnosis(NamedTuple):
    """Measurements and verdict of one head."""

    name: str
    layer: int | None  # None if unknown
    head: int | None
    rows: int
    sizes: list[AtSize]
    slope: Slope | None  # None if all rows have the same number of items
    largest: int  # the largest set size of 20 rows or more
    dispersal: float | None  # items: median over its rows; None if the target is never lost
    on_top: float  # share of all rows
    on_top_at_largest: float
    beta: tuple[float, float, float] | None  # percentiles of interior rows; None without them
    shares: dict[str, float]  # of the rows by class
    headroom: Headroom
    sink: Sink | None
    verdict: Verdict
    contexts: Contexts


class Diagnosis(NamedTuple):
    """Every head of a collection, the largest gain first; heads with too few rows are last."""

    collection: RowCollection
    eps: float
    heads: list[HeadDiagnosis]
    without_rows: list[tuple[int, int]]  # (layer, head) without a kept row of any weight


class Measured(NamedTuple):
    """Solved rows, and measurements of their logits; arrays (rows,)."""

    rows: Rows
    dispersal: np.ndarray
    top: np.ndarray  # as of `attended`
    share: np.ndarray
    target: np.ndarray

    def take(self, chosen: np.ndarray) -> "Measured":
        """Some of the rows."""
        rows, *columns = self
        return Measured(rows.take(chosen), *(column[chosen] for column in columns))


def require_all_rows(collection: RowCollection) -> None:
    """Raises CalibrateError if a collection keeps no sample of all rows."""
    refuse_bad_rows(collection.manifest)
    if collection.manifest["configuration"].get("keep", "misranked") != "all":
        raise CalibrateError(
            f"{collection.folder} keeps misranked rows only, and a diagnosis needs a sample of "
            "all rows; collect with --keep all into another folder"
        )


def diagnose(
    collection: RowCollection, eps: float = 0.5, report: Callable[[], None] = lambda: None
) -> Diagnosis:
    """Measures every head of a collection; a few heads' rows are in memory at a time.

    Rows of weight 0 are left out.

    Args:
      collection: complete, of a sample of all rows.
      eps: the coefficient below which a target counts as lost, between 0 and 1.
      report: called after each shard of each group of `group_heads`.
    Raises:
      CalibrateError: the collection keeps misranked rows only, or is damaged.
      QualityError: it has no rows of any weight, or too many bad ones.
    """
    require_all_rows(collection)
    heads: list[HeadDiagnosis] = []
    for group in solved_rows.group_heads(collection):
        heads += _diagnose_group(collection, group, eps, report)
    if not heads:
        raise QualityError(f"{collection.folder} has no rows of any weight; collect more sets")
    diagnosed = {(head.layer, head.head) for head in heads}
    names = {name: tuple(map(known_index, name)) for name in collection.heads}
    without_rows = [name for name, indices in names.items() if indices not in diagnosed]
    heads.sort(key=lambda head: (head.verdict.word == FEW, -head.headroom.gain))
    return Diagnosis(collection, eps, heads, sorted(without_rows))


def _diagnose_group(
    collection: RowCollection, heads: Heads | None, eps: float, report: Callable[[], None]
) -> list[HeadDiagnosis]:
    parts = []
    for part in starmap(partial(_measure, eps), collection.shards(heads)):  # one shard at a time
        parts.append(part)
        report()
    if not parts:
        return []
    rows, *columns = zip(*parts, strict=True)
    measured = Measured(solved_rows.concatenate_rows(list(rows)), *map(np.concatenate, columns))
    unnamed = collection.manifest["configuration"].get("head", "head")
    with threadpool_limits(1):  # sums of several threads differ in their last bits
        return [
            _diagnose_head(measured.take(mine), head_label(*map(known_index, name)) or str(unnamed))
            for name in measured.rows.heads()
            if (mine := measured.rows.is_of(*name) & (measured.rows.weight > 0)).any()
        ]


def _measure(eps: float, size: int, shard: KeptRows) -> Measured:
    rows = solved_rows.solve_shard(shard, size)
    n_star, share = np.empty((2, len(rows.size)))
    top, target = np.empty((2, len(rows.size)), np.int64)
    for part in slices(*shard.logits.shape):
        logits, targets = shard.logits[part], shard.target[part]
        n_star[part] = dispersal_size(logits, targets, eps)
        top[part], share[part], target[part] = attended(logits, targets)
    return Measured(rows, n_star, top, share, target)


def _diagnose_head(measured: Measured, name: str) -> HeadDiagnosis:
    rows = measured.rows
    contexts = Contexts(rows.size, np.log(rows.items) - rows.entropy, rows.variance)
    sizes = [_at_size(measured, contexts, n) for n in np.unique(rows.size)]
    last = max(sizes, key=lambda at: (at.rows >= LEAST_SAMPLE, at.size))
    dispersal = float(np.median(measured.dispersal[rows.size == last.size]))
    interior = rows.beta[rows.status == solver.INTERIOR]
    slope = commitment_slope(rows.items, contexts.commitment, rows.group_index())
    room = measure_headroom(rows)
    sink = find_sink(measured.top, measured.share, measured.target, rows.items)
    on_top = 1 - float(rows.misranked.mean())
    layer, head = known_index(rows.layer[0]), known_index(rows.head[0])
    return HeadDiagnosis(
        name, layer, head, len(rows.size), sizes, slope,
        largest=last.size,
        dispersal=dispersal if np.isfinite(dispersal) else None,
        on_top=on_top,
        on_top_at_largest=last.on_top,
        beta=_percentiles(interior),
        shares={status: n / len(rows.size) for status, n in rows.count_by_status().items()},
        headroom=room,
        sink=sink,
        verdict=refuse_few_groups(rows) or judge(len(rows.size), slope, on_top, room, sink),
        contexts=contexts,
    )  # fmt: skip


def _at_size(measured: Measured, contexts: Contexts, size: int) -> AtSize:
    rows, of_size = measured.rows, measured.rows.size == size
    H = rows.entropy[of_size]
    return AtSize(
        int(size), len(H),
        items=float(np.exp(np.log(rows.items[of_size]).mean())),
        entropy=float(H.mean()),
        entropy_spread=float(H.std()),
        commitment=float(contexts.commitment[of_size].mean()),
        susceptibility=float(contexts.susceptibility[of_size].mean()),
        on_top=1 - float(rows.misranked[of_size].mean()),
    )  # fmt: skip


def _percentiles(beta: np.ndarray) -> tuple[float, float, float] | None:
    if not len(beta):
        return None
    low, middle, high = map(float, np.percentile(beta, PERCENTILES))
    return low, middle, high


def commitment_slope(items: np.ndarray, commitment: np.ndarray, group: np.ndarray) -> Slope | None:
    """Least-squares slope of commitment on log n over rows; None if the rows determine no line.

    The standard error is robust to a variance that depends on the size (White 1980), and to
    dependence within groups, (rows,) int from 0 (Liang and Zeger 1986).
    """
    x = np.log(items) - np.log(items).mean()
    total, by_group = float(x @ x), np.bincount(group)
    if len(by_group) < 3 or items.min() == items.max():
        return None
    slope = float(x @ commitment) / total
    by_group = np.bincount(group, x * (commitment - commitment.mean() - slope * x))
    freedom = len(by_group) / (len(by_group) - 2)
    return Slope(slope, float(np.sqrt(freedom * (by_group @ by_group)) / total))
