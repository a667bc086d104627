"""Held-out scores by set size, of one head or of several together."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from calibrate.maths.row_batches import hashes
from calibrate.rows.solved_rows import Rows
from calibrate.rows.weighting import N_BLOCKS, estimate_mean, mean_over_sizes


class HeldOut(NamedTuple):
    """Mean log p_t of one set size, nats: under plain softmax, and held out under the rule."""

    size: int
    rows: int
    before: float
    after: float
    error: float  # standard error of the difference; of one group, the difference itself
    weight: float  # of the rows
    # (2, N_BLOCKS): weighted differences and weights, added up by hash of their groups
    sums: np.ndarray | None  # None where groups are unknown

    def record(self) -> dict[str, Any]:
        """What a coefficient file keeps of it."""
        return dict(zip(self._fields[:5], self[:5], strict=True))


def held_out_by_size(rows: Rows, plain: np.ndarray, log_p: np.ndarray) -> list[HeldOut]:
    """By set size, of (rows,) log p_t under plain softmax and under the rule."""
    return [
        _of_one_size(rows.take(of_size), plain[of_size], log_p[of_size])
        for of_size in (rows.size == n for n in np.unique(rows.size))
    ]


def _of_one_size(rows: Rows, plain: np.ndarray, log_p: np.ndarray) -> HeldOut:
    (before, _), (after, _), gain = (estimate_mean(rows, x) for x in (plain, log_p, log_p - plain))
    given = rows.weight.astype(float)
    sums = None
    if (rows.group >= 0).all():
        bucket = (hashes(rows.group) % np.uint64(N_BLOCKS)).astype(int)
        added = (given * (log_p - plain), given)
        sums = np.stack([np.bincount(bucket, x, N_BLOCKS) for x in added])
    return HeldOut(
        int(rows.size[0]), len(plain), float(before), float(after),
        _known(gain.error, gain.mean), float(given.sum()), sums,
    )  # fmt: skip


def _known(error: np.ndarray, difference: np.ndarray) -> float:
    """The error as a file holds it."""
    return float(error if np.isfinite(error) else np.abs(difference))


def combine_held_out(scores: Sequence[HeldOut]) -> list[HeldOut]:
    """Of several heads together, by set size; one group may have rows in all of them."""
    sizes = sorted({score.size for score in scores})
    return [_combine([score for score in scores if score.size == n]) for n in sizes]


def _combine(scores: list[HeldOut]) -> HeldOut:
    rows = sum(score.rows for score in scores)
    weight = np.array([score.weight for score in scores])
    share = weight / weight.sum()
    columns = np.array([(score.before, score.after, score.error) for score in scores])
    before, after, _ = (share @ columns).tolist()
    error = float(np.linalg.norm(share * columns[:, 2]))
    sums = None
    by_group = [score.sums for score in scores if score.sums is not None]
    if len(by_group) == len(scores):
        sums = np.sum(by_group, axis=0)
        gain = mean_over_sizes(sums[0][None], sums[1][None], np.array([rows]))
        error = _known(gain.error, gain.mean)
    return HeldOut(scores[0].size, rows, before, after, error, float(weight.sum()), sums)
