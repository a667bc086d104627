"""Held-out log-likelihoods: rules are fitted to four fifths of the groups, scored on the rest.

`fit_rule` chooses lambda by folds of those four fifths: this is nested cross-validation, in which
no held-out row chooses the penalty that it is scored by.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from calibrate.core.rule import KINDS
from calibrate.defaults import MAX_BETA, MIN_BETA
from calibrate.errors import QualityError
from calibrate.evidence.estimate import Estimate, estimate
from calibrate.evidence.evidence import BASELINE, held_out_records
from calibrate.fitting.fit_rule import N_FOLDS, FittedRule, can_have_slope, deal_folds, fit_rule
from calibrate.fitting.options import LEAST_SQUARES, MIN_INPUTS, FitOptions
from calibrate.fitting.penalised_likelihood import fit_constant_beta
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress, run
from calibrate.rows.solve import SolvedInputs


class HeldOut(NamedTuple):
    """log p of the target of each row, by rules that were not fitted to it; arrays are (rows,).

    Attributes:
      size, weight, group: of the rows.
      uniform: log p under the uniform distribution.
      unbounded: log p under the best constant of the other folds, from 1/1024 to 1024 whatever the
        bounds of the options.
      log_p: by procedure, and of BASELINE.
    """

    size: np.ndarray
    weight: np.ndarray
    group: np.ndarray
    uniform: np.ndarray
    unbounded: np.ndarray
    log_p: Mapping[str, np.ndarray]

    def estimate(self, values: np.ndarray, some: np.ndarray | slice = slice(None)) -> Estimate:
        """The weighted mean of (rows,) values, of all rows or of some."""
        return estimate(values[some], self.weight[some], self.group[some])

    def nll(self, procedure: str) -> float:
        """The mean NLL of a procedure, nats."""
        return -float(self.estimate(self.log_p[procedure]).mean)

    def gain(
        self, procedure: str, over: str = BASELINE, some: np.ndarray | slice = slice(None)
    ) -> Estimate:
        """The mean paired difference in log p of a procedure to another."""
        return self.estimate(self.log_p[procedure] - self.log_p[over], some)

    def records(self, saved: str) -> dict[str, list[dict[str, Any]]]:
        """The records of a coefficient file: "held_out" by size n, and "kinds".

        Args:
          saved: the procedure of the fit, over which the others have a gain, too.
        """
        scores = self.log_p[BASELINE], self.log_p[saved]
        by_size = held_out_records(self.size, *scores, self.weight, self.group)
        kinds = []
        for procedure in self.log_p:
            gain, over_fit = self.gain(procedure), self.gain(procedure, saved)
            kinds.append(
                {
                    "kind": procedure,
                    "nll": self.nll(procedure),
                    "gain": float(gain.mean),
                    "se": float(np.nan_to_num(gain.error)),
                    "gain_over_fit": float(over_fit.mean),
                    "se_over_fit": float(np.nan_to_num(over_fit.error)),
                }
            )
        return {"held_out": by_size, "kinds": kinds}


def list_procedures(solved: SolvedInputs, options: FitOptions) -> list[str]:
    """The procedures that are compared: all kinds, and least squares if it has enough inputs."""
    enough = np.count_nonzero(solved.fitted_by_least_squares()) >= MIN_INPUTS
    return [*KINDS, *([LEAST_SQUARES] if enough or options.loss == LEAST_SQUARES else [])]


def score_held_out(
    solved: SolvedInputs,
    procedures: Sequence[str],
    options: FitOptions,
    jobs: Jobs = ONE_PROCESS,
    progress: Progress = SILENT,
) -> HeldOut:
    """Fits every procedure to the rows outside of each fold, and scores it on the rows inside.

    Penalties are chosen again for every fold, from the rows outside of it.

    Args:
      solved: of one head, of positive weight.
      procedures: to score; one that cannot be fitted to some fold is left out.
      options: resolved.
      jobs: where the fits run; the result does not depend on it.
      progress: advances after each fold.
    """
    fold, has_slope = deal_folds(solved, options.seed), can_have_slope(solved)
    tasks = (
        partial(_fit_rules, solved.take(fold != i), procedures, options, has_slope)
        for i in range(N_FOLDS)
    )
    progress.begin("fitting", N_FOLDS)
    rules_of_folds = run(tasks, jobs, lambda rules: progress.advance())
    fitted = [
        procedure for procedure in procedures if all(procedure in rules for rules in rules_of_folds)
    ]
    log_p = {procedure: np.empty(len(fold)) for procedure in fitted}
    unbounded = np.empty(len(fold))
    for i, rules in enumerate(rules_of_folds):
        inside, outside = solved.take(fold == i), solved.take(fold != i)
        constant = fit_constant_beta(outside, (MIN_BETA, MAX_BETA))
        unbounded[fold == i] = inside.log_p(constant)
        for procedure in fitted:
            log_p[procedure][fold == i] = inside.log_p(rules[procedure].beta(inside))
    log_p = {BASELINE: solved.log_p(1.0), **log_p}
    return HeldOut(solved.size, solved.weight, solved.group, solved.uniform, unbounded, log_p)


def _fit_rules(
    solved: SolvedInputs, procedures: Sequence[str], options: FitOptions, has_slope: bool
) -> dict[str, FittedRule]:
    """The rule of each procedure that can be fitted to the rows."""
    rules = {}
    for procedure in procedures:
        with suppress(QualityError):
            rules[procedure] = fit_rule(solved, procedure, options, has_slope)
    return rules


def join_held_out(parts: Sequence[HeldOut]) -> HeldOut:
    """The rows of several heads, under the procedures that all have."""
    log_p = {
        procedure: np.concatenate([part.log_p[procedure] for part in parts])
        for procedure in parts[0].log_p
        if all(procedure in part.log_p for part in parts)
    }
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("size", "weight", "group", "uniform", "unbounded")
    }
    return HeldOut(**columns, log_p=log_p)
