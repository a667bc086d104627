"""Held-out log-likelihoods: every procedure fitted to four fifths of the groups, on the others."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from calibrate.core.rule import KINDS
from calibrate.defaults import MAX_BETA, MIN_BETA
from calibrate.errors import QualityError
from calibrate.evidence.estimate import Estimate, estimate
from calibrate.evidence.evidence import BASELINE, held_out_records
from calibrate.fitting.fit_rule import fit_rule
from calibrate.fitting.folds import N_FOLDS, deal_folds
from calibrate.fitting.options import LEAST_SQUARES, MIN_INPUTS, FitOptions
from calibrate.fitting.smoothed_fit import can_have_slope, fit_constant
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress, run
from calibrate.solver.solved_rows import Rows

UNBOUNDED = "unbounded"  # a constant, whatever the bounds of the options


class HeldOut(NamedTuple):
    """log p of rows that were left out, by procedure; arrays are (rows,)."""

    size: np.ndarray
    weight: np.ndarray
    group: np.ndarray
    uniform: np.ndarray  # log p under the uniform distribution
    unbounded: np.ndarray  # log p under a constant without the options' bounds
    log_p: Mapping[str, np.ndarray]  # by procedure, and of BASELINE

    def estimate(self, values: np.ndarray, some: np.ndarray | None = None) -> Estimate:
        """The mean of values, of some rows."""
        rows = np.ones(len(values), bool) if some is None else some
        return estimate(values[rows], self.weight[rows], self.group[rows])

    def nll(self, name: str) -> float:
        """The mean NLL of a procedure, nats."""
        return -float(self.estimate(self.log_p[name]).mean)

    def gain(self, name: str, over: str = BASELINE, some: np.ndarray | None = None) -> Estimate:
        """The mean difference in log p of a procedure to another, of some rows."""
        return self.estimate(self.log_p[name] - self.log_p[over], some)

    def by_size(self, name: str) -> list[dict[str, Any]]:
        """Records of each size n: inputs, the NLL of the baseline and of a procedure, and SE."""
        before, after = self.log_p[BASELINE], self.log_p[name]
        return held_out_records(self.size, before, after, self.weight, self.group)

    def by_kind(self) -> list[dict[str, Any]]:
        """Records of the baseline and of each procedure: NLL, gain over the baseline, and SE."""
        return [
            {
                "kind": name,
                "nll": self.nll(name),
                "gain": float(self.gain(name).mean),
                "se": float(np.nan_to_num(self.gain(name).error)),
            }
            for name in self.log_p
        ]


def procedures(rows: Rows, options: FitOptions) -> list[str]:
    """The procedures that are compared: all kinds, and the paper's where it has enough inputs."""
    enough = np.count_nonzero(rows.fitted_by_least_squares()) >= MIN_INPUTS
    return [*KINDS, *([LEAST_SQUARES] if enough or options.loss == LEAST_SQUARES else [])]


def score_held_out(
    rows: Rows,
    names: Sequence[str],
    options: FitOptions,
    jobs: Jobs = ONE_PROCESS,
    progress: Progress = SILENT,
) -> HeldOut:
    """Fits every procedure to the rows outside of each fold, and scores it on those inside.

    Args:
      rows: of one head, of positive weight.
      names: of procedures; one that cannot be fitted to some fold is left out.
      options: resolved.
      jobs: where the folds run; the result does not depend on it.
      progress: advances after each fold.
    """
    fold, has_slope = deal_folds(rows, options.seed), can_have_slope(rows)
    tasks = [
        partial(_score_fold, rows, fold == i, names, options, has_slope) for i in range(N_FOLDS)
    ]
    progress.begin("fitting", N_FOLDS)
    scores = run(tasks, jobs, lambda done: progress.advance())
    fitted = [name for name in names if all(name in of_fold for of_fold in scores)]
    log_p = {BASELINE: rows.log_p(1.0)}
    for name in [*fitted, UNBOUNDED]:
        log_p[name] = np.empty(len(fold))
        for i, of_fold in enumerate(scores):
            log_p[name][fold == i] = of_fold[name]
    unbounded = log_p.pop(UNBOUNDED)
    return HeldOut(rows.size, rows.weight, rows.group, rows.uniform, unbounded, log_p)


def _score_fold(
    rows: Rows, inside: np.ndarray, names: Sequence[str], options: FitOptions, has_slope: bool
) -> dict[str, np.ndarray]:
    """By procedure, log p of the rows inside a fold."""
    train, test = rows.take(~inside), rows.take(inside)
    scores = {UNBOUNDED: test.log_p(fit_constant(train, (MIN_BETA, MAX_BETA)))}
    for name in names:
        try:
            scores[name] = test.log_p(fit_rule(train, name, options, has_slope).beta(test))
        except QualityError:
            continue
    return scores


def join_held_out(parts: Sequence[HeldOut]) -> HeldOut:
    """The rows of several heads, under the procedures that all have."""
    names = [name for name in parts[0].log_p if all(name in part.log_p for part in parts)]

    def joined(column: str) -> np.ndarray:
        return np.concatenate([getattr(part, column) for part in parts])

    log_p = {name: np.concatenate([part.log_p[name] for part in parts]) for name in names}
    return HeldOut(
        joined("size"),
        joined("weight"),
        joined("group"),
        joined("uniform"),
        joined("unbounded"),
        log_p,
    )
