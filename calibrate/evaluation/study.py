"""Study: every rule on every head, each head with fits of its own."""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from calibrate.collecting.collect import Progress, collect
from calibrate.errors import QualityError
from calibrate.evaluation.baselines import PLAIN, ScoredRule, fitted_rules, fixed_rules, in_order
from calibrate.evaluation.comparison import Comparison, compare
from calibrate.evaluation.score_head import Score, evaluate, head_folder
from calibrate.fitting.solved_rows import solve_collection
from calibrate.heads import Head
from calibrate.parallel.jobs import HERE, Jobs, started


class Calibration(NamedTuple):
    """What the fits of a study are made of; the same for every head."""

    sizes: Sequence[int]
    sets: int

    def key(self, seed: int) -> str:
        """A name for it in folders: others lie beside it."""
        text = f"{sorted(set(self.sizes))}|{self.sets}|{seed}|all"
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def study(
    heads: Sequence[Head],
    sizes: Sequence[int],
    sets: int | None,
    seed: int,
    calibration: Calibration,
    folder: Path,
    more: Mapping[str, ScoredRule] | None = None,
    jobs: Jobs = HERE,
    collected: Callable[[str, Progress], None] = lambda head, progress: None,
    scored: Callable[[str, Score], None] = lambda head, score: None,
) -> Comparison:
    """Collects from each head, fits every form of rule, and scores all of them on other sets.

    What is in the folder already is not done again.

    Args:
      heads: any number; paired tests are over them.
      sizes: set sizes to score.
      sets: of each size; None is `evaluate.held_out_sets`.
      seed: of the sets that are collected and, from another stream, of those that are scored.
      calibration: the sets that the fits are made of.
      folder: collections/HEAD-FINGERPRINT-OPTIONS and scores/HEAD-FINGERPRINT appear there.
      more: further rules, scored on every head.
      jobs: where it is done: a unit of a collection, a shard, a set size at a time.
      collected: called with a head's name after each unit of its collection.
      scored: called with a head's name after each size.
    Warns:
      UserWarning: a head for which no rule is worth publishing; its own fit is plain softmax.
    """
    with started(jobs) as there:
        scores = [
            _study_head(
                head, sizes, sets, seed, calibration, folder, more or {}, there,
                partial(collected, head.name), partial(scored, head.name),
            )
            for head in heads
        ]  # fmt: skip
    return compare([head.name for head in heads], scores)


def _study_head(
    head: Head,
    sizes: Sequence[int],
    sets: int | None,
    seed: int,
    calibration: Calibration,
    folder: Path,
    more: Mapping[str, ScoredRule],
    jobs: Jobs,
    collected: Callable[[Progress], None],
    scored: Callable[[Score], None],
) -> list[Score]:
    place = folder / "collections" / f"{head_folder(head)}-{calibration.key(seed)}"
    found = collect(head, *calibration, seed, place, report=collected, jobs=jobs)
    try:
        fitted = fitted_rules(solve_collection(found, jobs))
    except QualityError as failure:
        fitted = {"own": PLAIN}  # what `calibrate fit` leaves in place
        warnings.warn(f"{head.name} has no fit of its own: {failure}", stacklevel=3)
    rules = in_order({**fixed_rules(), **fitted, **more})
    return evaluate(head, sizes, sets, seed, rules, scored, folder / "scores", jobs)
