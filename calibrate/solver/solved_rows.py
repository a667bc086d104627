"""Solved rows: optimal beta and likelihood profile of every collected row."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from calibrate.datasets.logit_rows import OPTIONAL_COLUMNS, LogitRows, at_target
from calibrate.datasets.row_collection import Heads, RowCollection
from calibrate.defaults import MAX_BETA, MIN_BETA
from calibrate.evidence.estimate import index_groups
from calibrate.parallel import ONE_PROCESS, Jobs, run
from calibrate.solver.likelihood_profile import Profile, join_profiles, make_profile
from calibrate.solver.optimal_beta import INTERIOR, STATUS_NAMES, row_status, solve

# How many rows a group of heads has that are solved together; a row takes some 1,700 bytes.
ROWS_PER_GROUP = 1 << 15


class Rows(NamedTuple):
    """Solved inputs; every array but the profile is (rows,)."""

    entropy: np.ndarray  # nats
    beta: np.ndarray  # optimal beta
    status: np.ndarray  # of solver
    size: np.ndarray  # set size that was asked for
    items: np.ndarray  # unmasked items, the n of a rule by size
    misranked: np.ndarray  # bool: another item has a higher logit than the target
    uniform: np.ndarray  # log p of the target under the uniform distribution, nats
    margin: np.ndarray  # logit of the target minus the highest other; inf if there is no other
    layer: np.ndarray  # -1 where unknown
    head: np.ndarray  # -1 where unknown
    weight: np.ndarray  # of a row in every mean
    group: np.ndarray  # such as a prompt, whose rows are dependent; -1 where unknown
    profile: Profile  # of log p_t, over the bounds of a rule

    def take(self, chosen: np.ndarray) -> "Rows":
        """Some of the rows; all of them are not copied."""
        if chosen.dtype == bool and chosen.all():
            return self
        return Rows._make(
            column.take(chosen) if isinstance(column, Profile) else column[chosen]
            for column in self
        )

    def heads(self) -> Heads:
        """The distinct (layer, head), in order."""
        return sorted(set(zip(self.layer.tolist(), self.head.tolist(), strict=True)))

    def group_index(self) -> np.ndarray:
        """(rows,) number of each row's group, from 0; an unknown one has no other rows."""
        return index_groups(self.group)

    def n_groups(self) -> int:
        """The number of groups, a row without one being its own."""
        return int(self.group_index().max(initial=-1)) + 1

    def log_p(self, beta: np.ndarray | float) -> np.ndarray:
        """(rows,) log p of the target at each row's beta, clipped to the profile's bounds, nats."""
        return self.profile.log_p(np.broadcast_to(beta, self.entropy.shape))

    def is_of(self, layer: int, head: int) -> np.ndarray:
        """(rows,) bool: whether a row is of that head."""
        return np.asarray((self.layer == layer) & (self.head == head))

    def fitted_by_least_squares(self) -> np.ndarray:
        """(rows,) bool: misranked rows of any weight with a finite, positive optimal beta."""
        return np.asarray((self.weight > 0) & self.misranked & (self.status == INTERIOR))

    def count_by_status(self) -> dict[str, int]:
        return {name: int((self.status == s).sum()) for s, name in STATUS_NAMES.items()}


def known_index(index: int) -> int | None:
    """A layer's or a head's number; None where it is unknown (-1)."""
    return None if index < 0 else int(index)


def head_label(layer: int | None, head: int | None) -> str:
    """ "layer 2, head 5", as far as they are known; "" if neither is."""
    numbers = (("layer", layer), ("head", head))
    return ", ".join(f"{word} {number}" for word, number in numbers if number is not None)


def group_heads(
    collection: RowCollection, rows_per_group: int = ROWS_PER_GROUP
) -> list[Heads | None]:
    """The heads of a collection in groups of about so many rows; None is all rows.

    All rows may not fit in memory, and those of one head lie in many shards: work by head reads
    the shards once for each group.
    """
    heads = collection.heads
    if not heads:
        return [None]
    kept = sum(entry["kept"] for entry in collection.manifest["shards"])
    n_groups = max(1, min(-(-kept // rows_per_group), len(heads)))
    ends = [len(heads) * i // n_groups for i in range(n_groups + 1)]
    return [heads[first:end] for first, end in pairwise(ends)]


def solve_collection(
    collection: RowCollection,
    jobs: Jobs = ONE_PROCESS,
    heads: Heads | None = None,
) -> Rows:
    """The optimal beta and the likelihood profile of every row, or of those of some heads.

    It runs a shard at a time; the result does not depend on the
    jobs.
    """
    tasks = [partial(_read_and_solve, read) for read in collection.readers(heads)]
    return concatenate_rows(run(tasks, jobs))


def _read_and_solve(read: Callable[[], tuple[int, LogitRows]]) -> Rows:
    size, shard = read()  # by the process that solves it: logits do not travel
    return solve_shard(shard, size)


def solve_shard(shard: LogitRows, size: int) -> Rows:
    """The rows of a shard, with those of its optional columns that it has."""
    rows = solve_rows(shard.logits, shard.target, shard.entropy, size)
    columns = {name: getattr(shard, name) for name in OPTIONAL_COLUMNS}
    given = {name: column for name, column in columns.items() if column is not None}
    if "weight" in given:
        given["weight"] = given["weight"].astype(float)  # sums of float32 round
    return rows._replace(**given)


def solve_rows(
    logits: np.ndarray,
    target: np.ndarray,
    entropy: np.ndarray,
    size: int,
) -> Rows:
    """Rows of one set size: logits (rows, n), target (rows,) int or (rows, n) bool."""
    beta = solve(logits, target)
    unknown = np.full(len(logits), -1, np.int16)
    items = (logits > -np.inf).sum(axis=1, dtype=np.int32)
    is_target = target if target.ndim > 1 else np.arange(logits.shape[1]) == target[:, None]
    is_target = is_target & (logits > -np.inf)
    best = at_target(logits, target)
    other = np.where(is_target, -np.inf, logits).max(axis=1)
    return Rows(
        entropy=np.asarray(entropy, float),
        beta=beta.astype(float),
        status=row_status(beta),
        size=np.full(len(logits), size, np.int32),
        items=items,
        misranked=logits.max(axis=1) > best,
        uniform=np.log(is_target.sum(axis=1) / items),
        margin=(best - other).astype(float),
        layer=unknown,
        head=unknown,
        weight=np.ones(len(logits)),
        group=np.full(len(logits), -1),
        profile=make_profile(logits, target, MIN_BETA, MAX_BETA),
    )


def concatenate_rows(parts: list[Rows]) -> Rows:
    """The rows of all parts, in order."""
    return Rows._make(
        join_profiles(column) if isinstance(column[0], Profile) else np.concatenate(column)
        for column in zip(*parts, strict=True)
    )
