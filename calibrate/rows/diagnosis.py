"""Diagnosis of heads: which disperse, and which are worth calibrating, from a sample of rows."""

from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.errors import CalibrateError, QualityError
from calibrate.files.rows import Heads, KeptRows, RowCollection, refuse_bad_rows
from calibrate.maths.bounds import dispersal_size
from calibrate.maths.row_batches import slices
from calibrate.rows.head_verdict import (
    FEW,
    LEAST_SAMPLE,
    Headroom,
    Sink,
    Verdict,
    attended,
    find_sink,
    judge_head,
    measure_headroom,
    refuse_few_groups,
)
from calibrate.rows.solved_rows import (
    Rows,
    concatenate_rows,
    group_heads,
    head_label,
    known_index,
    solve_shard,
)


class AtSize(NamedTuple):
    """The rows of one set size."""

    size: int
    rows: int
    items: float  # geometric mean of the unmasked items
    entropy: float  # mean, nats
    entropy_spread: float  # standard deviation over rows
    on_top: float  # share of the rows whose target has the top logit


class HeadDiagnosis(NamedTuple):
    """Measurements and verdict of one head."""

    name: str
    layer: int | None  # None if unknown
    head: int | None
    rows: int
    sizes: list[AtSize]
    slope: float | None  # growth of commitment with log n; None if all rows have as many items
    largest: int  # the largest set size of 20 rows or more
    dispersal: float | None  # items: median over its rows; None if the target is never lost
    on_top: float  # share of all rows
    shares: dict[str, float]  # of the rows by class
    headroom: Headroom
    sink: Sink | None
    verdict: Verdict


class Diagnosis(NamedTuple):
    """Every head of a collection, the largest gain first; heads with too few rows are last."""

    collection: RowCollection
    eps: float
    heads: list[HeadDiagnosis]
    without_rows: list[tuple[int, int]]  # (layer, head) without a kept row of any weight


class Measured(NamedTuple):
    """Solved rows, and measurements of their logits."""

    rows: Rows
    dispersal: np.ndarray  # (rows,) items
    looks: np.ndarray  # (rows, 3) columns as of `attended`

    def take(self, chosen: np.ndarray) -> "Measured":
        """Some of the rows."""
        return Measured(self.rows.take(chosen), self.dispersal[chosen], self.looks[chosen])


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
    for group in group_heads(collection):
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
    measured = Measured(concatenate_rows(list(rows)), *map(np.concatenate, columns))
    unnamed = collection.manifest["configuration"].get("head", "head")
    with threadpool_limits(1):  # sums of several threads differ in their last bits
        return [
            _diagnose_head(measured.take(mine), head_label(*map(known_index, name)) or str(unnamed))
            for name in measured.rows.heads()
            if (mine := measured.rows.is_of(*name) & (measured.rows.weight > 0)).any()
        ]


def _measure(eps: float, size: int, shard: KeptRows) -> Measured:
    rows = solve_shard(shard, size)
    n_star, looks = np.empty(len(rows.size)), np.empty((len(rows.size), 3))
    for part in slices(*shard.logits.shape):
        logits, targets = shard.logits[part], shard.target[part]
        n_star[part] = dispersal_size(logits, targets, eps)
        looks[part] = np.stack(attended(logits, targets), axis=1)
    return Measured(rows, n_star, looks)


def _diagnose_head(measured: Measured, name: str) -> HeadDiagnosis:
    rows = measured.rows
    sizes = [_at_size(rows.take(rows.size == n)) for n in np.unique(rows.size)]
    last = max(sizes, key=lambda at: (at.rows >= LEAST_SAMPLE, at.size))
    dispersal = float(np.median(measured.dispersal[rows.size == last.size]))
    slope = commitment_slope(rows)
    room = measure_headroom(rows)
    top, share, target = measured.looks.T
    sink = find_sink(top, share, target, rows.items)
    on_top = 1 - float(rows.misranked.mean())
    return HeadDiagnosis(
        name, known_index(rows.layer[0]), known_index(rows.head[0]), len(rows.size), sizes, slope,
        largest=last.size,
        dispersal=dispersal if np.isfinite(dispersal) else None,
        on_top=on_top,
        shares={status: n / len(rows.size) for status, n in rows.count_by_status().items()},
        headroom=room,
        sink=sink,
        verdict=refuse_few_groups(rows) or judge_head(len(rows.size), slope, on_top, room, sink),
    )  # fmt: skip


def _at_size(rows: Rows) -> AtSize:
    return AtSize(
        int(rows.size[0]), len(rows.size),
        items=float(np.exp(np.log(rows.items).mean())),
        entropy=float(rows.entropy.mean()),
        entropy_spread=float(rows.entropy.std()),
        on_top=1 - float(rows.misranked.mean()),
    )  # fmt: skip


def commitment_slope(rows: Rows) -> float | None:
    """Least-squares slope of the commitment, log n - H, on log n; None if all n are equal.

    It is 1 if the entropy is constant, and 0 if that grows as log n.
    """
    if rows.items.min() == rows.items.max():
        return None
    log_n = np.log(rows.items)
    x = log_n - log_n.mean()
    return float(x @ (log_n - rows.entropy) / (x @ x))
