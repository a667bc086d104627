"""Solving: the optimal temperature and the likelihood profile of every row of a collection."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from calibrate.defaults import MAX_BETA, MIN_BETA
from calibrate.evidence.estimate import index_groups
from calibrate.parallel import ONE_PROCESS, Jobs, run
from calibrate.rows.collection import RowCollection, ShardReader
from calibrate.rows.likelihood_profile import Profile, join_profiles, make_profile
from calibrate.rows.optimal_beta import INTERIOR, STATUS_NAMES, row_status, solve_batches
from calibrate.rows.rows import OPTIONAL_COLUMNS, HeadIndices, Rows, target_logit

QUARTILES = 0.25, 0.5, 0.75


class SolvedInputs(NamedTuple):
    """The optimal temperature of inputs; arrays are (inputs,).

    >>> import calibrate
    >>> solved = calibrate.solve(calibrate.collect("max-retrieval", sizes=[16, 64], sets=100))
    >>> solved.theta.shape, bool((solved.theta[solved.misranked] > 0).all())
    ((200,), True)

    Attributes:
      n: unmasked items.
      entropy: Shannon entropy of softmax(z), nats.
      beta: the inverse temperature beta > 0 that maximises log p of the target; inf if log p is
        highest in the limit (the target is ranked first), 0 if no beta > 0 is better than 0, NaN
        if the solver failed.
      theta: the temperature 1 / beta; 0 where beta is inf, inf where it is 0.
      status: classes of the optima, texts: "interior", "sharp" (beta = inf), "flat" or "unsolved".
      misranked: bool, True if some item has a higher logit than the target.
    """

    entropy: np.ndarray
    beta: np.ndarray
    status_code: np.ndarray  # int8, of optimal_beta
    size: np.ndarray  # set size of the collection, which may stand for a range of n
    n: np.ndarray
    misranked: np.ndarray
    uniform: np.ndarray  # log p of the target under the uniform distribution, nats
    margin: np.ndarray  # logit of the target minus the highest other; inf if there is no other
    layer: np.ndarray  # -1 if unknown
    head: np.ndarray  # -1 if unknown
    weight: np.ndarray  # in every mean
    group: np.ndarray  # such as a prompt, whose inputs are dependent; -1 if unknown
    profile: Profile  # of log p of the target, over the bounds of a rule
    collection: Any = None  # the RowCollection of these inputs; None for a part of one

    @property
    def theta(self) -> np.ndarray:
        """The temperature 1 / beta; 0 where beta is inf, inf where it is 0."""
        with np.errstate(divide="ignore"):
            return 1 / self.beta

    @property
    def status(self) -> np.ndarray:
        """Classes of the optima, texts: "interior", "sharp" (beta = inf), "flat" or "unsolved"."""
        names = np.array([STATUS_NAMES[code] for code in range(len(STATUS_NAMES))])
        return np.asarray(names[self.status_code])

    def __repr__(self) -> str:
        """Numbers of inputs by class of their optimum, and quartiles of theta."""
        counts = ", ".join(f"{n:,} {name}" for name, n in self.count_by_status().items() if n)
        source = "" if self.collection is None else f" of {self.collection.folder}"
        lines = [
            f"Solved inputs{source}",
            f"{len(self.beta):,} inputs, {np.count_nonzero(self.misranked):,} misranked",
            f"optimum: {counts}",
        ]
        if self.misranked.any():
            quartiles = ", ".join(f"{theta:.3g}" for theta in theta_quartiles(self))
            lines.append(f"theta of misranked inputs, quartiles: {quartiles}")
        return "\n".join(lines)

    def take(self, chosen: np.ndarray) -> "SolvedInputs":
        """Some of the inputs, by (inputs,) bool or positions; all of them are not copied."""
        if chosen.dtype == bool and chosen.all():
            return self
        columns = {name: getattr(self, name)[chosen] for name in _ARRAY_FIELDS}
        return self._replace(**columns, profile=self.profile.take(chosen))

    def heads(self) -> HeadIndices:
        """The distinct (layer, head), in order."""
        return sorted(set(zip(self.layer.tolist(), self.head.tolist(), strict=True)))

    def group_index(self) -> np.ndarray:
        """(inputs,) number of each input's group, from 0; an unknown group has one input."""
        return index_groups(self.group)

    def n_groups(self) -> int:
        """The number of groups; an input without a group is its own."""
        return int(self.group_index().max(initial=-1)) + 1

    def log_p(self, beta: np.ndarray | float) -> np.ndarray:
        """(inputs,) log p of the target at a beta for each, clipped to the profile's bounds."""
        return self.profile.log_p(np.broadcast_to(beta, self.entropy.shape))

    def is_of(self, layer: int, head: int) -> np.ndarray:
        """(inputs,) bool, True for inputs of a head."""
        return np.asarray((self.layer == layer) & (self.head == head))

    def has_finite_optimum(self) -> np.ndarray:
        """(inputs,) bool, True for misranked inputs with a finite beta > 0 that is optimal."""
        return np.asarray(self.misranked & (self.status_code == INTERIOR))

    def fitted_by_least_squares(self) -> np.ndarray:
        """(inputs,) bool, True for inputs of any weight that have a finite optimum."""
        return np.asarray((self.weight > 0) & self.has_finite_optimum())

    def count_by_status(self) -> dict[str, int]:
        """Numbers of inputs by the class of their optimum."""
        return {name: int((self.status_code == s).sum()) for s, name in STATUS_NAMES.items()}


_ARRAY_FIELDS = [name for name in SolvedInputs._fields if name not in ("profile", "collection")]


def theta_quartiles(solved: SolvedInputs) -> np.ndarray:
    """(3,) weighted quartiles of theta = 1 / beta of misranked inputs; NaN if there are none."""
    used = solved.take(solved.misranked & (solved.weight > 0) & ~np.isnan(solved.beta))
    if not len(used.beta):
        return np.full(len(QUARTILES), np.nan)
    # Theta is inf where beta is 0: the quantile must not be a mean of two values.
    return np.asarray(
        np.quantile(used.theta, QUARTILES, method="inverted_cdf", weights=used.weight)
    )


def solve_collection(
    collection: RowCollection,
    jobs: Jobs = ONE_PROCESS,
    heads: HeadIndices | None = None,
) -> SolvedInputs:
    """Solves every row, or the rows of some heads, one shard at a time.

    The result does not depend on the jobs.
    """
    tasks = [partial(_read_and_solve, read) for read in collection.readers(heads)]
    return concatenate_solved(run(tasks, jobs))._replace(collection=collection)


def _read_and_solve(read: ShardReader) -> SolvedInputs:
    size, rows = read()  # in the process that solves it, so that logits are not sent
    return solve_shard(rows, size)


def solve_shard(rows: Rows, size: int) -> SolvedInputs:
    """Solves the rows of a shard, with the optional columns that it has."""
    solved = solve_rows(rows.logits, rows.target, rows.entropy, size)
    columns = {name: getattr(rows, name) for name in OPTIONAL_COLUMNS}
    given = {name: column for name, column in columns.items() if column is not None}
    if "weight" in given:
        given["weight"] = given["weight"].astype(float)  # sums of float32 round
    return solved._replace(**given)


def solve_rows(
    logits: np.ndarray, target: np.ndarray, entropy: np.ndarray, size: int
) -> SolvedInputs:
    """Solves rows of one set size: logits (rows, n), target (rows,) int or (rows, n) bool."""
    beta = solve_batches(logits, target)
    unknown = np.full(len(logits), -1, np.int16)
    n_items = (logits > -np.inf).sum(axis=1, dtype=np.int32)
    is_target = target if target.ndim > 1 else np.arange(logits.shape[1]) == target[:, None]
    is_target = is_target & (logits > -np.inf)
    of_target = target_logit(logits, target)
    of_others = np.where(is_target, -np.inf, logits).max(axis=1)
    return SolvedInputs(
        entropy=np.asarray(entropy, float),
        beta=beta.astype(float),
        status_code=row_status(beta),
        size=np.full(len(logits), size, np.int32),
        n=n_items,
        misranked=logits.max(axis=1) > of_target,
        uniform=np.log(is_target.sum(axis=1) / n_items),
        margin=(of_target - of_others).astype(float),
        layer=unknown,
        head=unknown,
        weight=np.ones(len(logits)),
        group=np.full(len(logits), -1),
        profile=make_profile(logits, target, MIN_BETA, MAX_BETA),
    )


def concatenate_solved(parts: Sequence[SolvedInputs]) -> SolvedInputs:
    """Concatenates solved inputs."""
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAY_FIELDS
    }
    return SolvedInputs(**columns, profile=join_profiles([part.profile for part in parts]))
