"""Every kind of rule, fitted to rows and scored on rows that folds leave out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.core.rule import LOG_SIZE
from calibrate.errors import QualityError
from calibrate.evidence.metrics import BETA, EXPECTED, LOG_P, Metric
from calibrate.evidence.non_inferiority import NLL_TOLERANCE
from calibrate.evidence.prior import Gain, cautious_gain
from calibrate.evidence.scores import ENOUGH_ROWS, PLAIN, Evidence, Scored, Stratum
from calibrate.fitting.groups import N_BLOCKS, N_FOLDS, assign_blocks
from calibrate.fitting.pooled_rows import Pool
from calibrate.fitting.rule_fitting import KindFit, Options, applied_beta, pool_usable
from calibrate.solver.optimal_beta import UNSOLVED
from calibrate.solver.solved_rows import Rows
from calibrate.store.coefficients import Coefficients

# Options that may keep a rule from gaining, and their values without a constraint.
FREE: dict[str, Any] = {"trained_up_to": 0, "q": 0.0, "min_entropy": 0.0, "rows": "all"}


@dataclass(frozen=True, eq=False)
class Candidate:
    """A rule, fitted to all rows; its scores on rows that folds left out are in the evidence."""

    name: str  # in the evidence
    kind: str
    q: float  # exponent of the loss that it was fitted with; 0 is maximum likelihood
    kind_fit: KindFit
    solution: np.ndarray  # coefficients in the form's own basis
    fit: Coefficients
    gain: Gain  # of log p over the baseline
    mean_log_p: float  # held out, sizes equal, nats
    mean_p: float  # held out, sizes equal


class RowProblem:
    """The rows of one head to fit a rule to: those of any weight that the solver solved.

    `evidence` has held-out scores of the baseline and of all rules that were fitted so far.
    """

    def __init__(self, rows: Rows, options: Options) -> None:
        """Raises QualityError if there are rows, and none has any weight."""
        if len(rows.weight) and not rows.weight.any():
            raise QualityError("no row has any weight: all of them are 0; give some")
        self.rows = rows.take((rows.weight > 0) & (rows.status != UNSOLVED))
        self.options = options
        self.block = assign_blocks(self.rows)
        self.evidence = self._second = evidence_of(self.rows)  # by either split into folds
        self._pooled: dict[tuple[float, bytes], Pool] = {}
        self._solved: dict[tuple[str, float], Candidate | QualityError] = {}
        self._looser: dict[str, RowProblem] = {}

    def without(self, option: str) -> "RowProblem":
        """The same rows, where an option of FREE does not bind."""
        if option not in self._looser:
            free = self.options._replace(**{option: FREE[option]})
            self._looser[option] = RowProblem(self.rows, free)
        return self._looser[option]

    def solve(self, kind: str, q: float | None = None) -> Candidate:
        """The best rule of its kind at q, or that of the options; each is fitted once.

        Raises:
          QualityError: too few rows, rows that do not determine such a rule, or it costs more than
            the tolerance at a size that the head was trained on.
        """
        key = kind, (self.options.q or 0.0) if q is None else q
        if key not in self._solved:
            try:
                self._solved[key] = self._solve(*key)
            except QualityError as failure:
                self._solved[key] = failure
        solved = self._solved[key]
        if isinstance(solved, QualityError):
            raise solved
        return solved

    def solve_kinds(self, kinds: Sequence[str]) -> tuple[list[Candidate], dict[str, str]]:
        """Candidates of these kinds; and of those that could not be fitted, why."""
        candidates, left_out = [], {}
        for kind in kinds:
            try:
                candidates.append(self.solve(kind))
            except QualityError as failure:
                left_out[kind] = str(failure)
        return candidates, left_out

    def gain(self, candidate: Candidate, over: Candidate | None = None) -> Gain:
        """The held-out gain of a candidate over another, or over the baseline.

        Of two splits into folds, that with the lower end of the interval: which folds a richer
        kind was fitted to must not decide.
        """
        m, other = self.options.prior_rows, over.name if over else PLAIN
        first = cautious_gain(self.evidence, candidate.name, other, m)
        if over is None or not first.is_at_least(0):
            return first
        for rule in (candidate, over):
            if rule.name not in self._second.rules:
                beta = self._held_out_beta(rule.kind_fit, rule.solution, second=True)
                self._second = self._second.with_rule(rule.name, scores_at(self.rows, beta))
        second = cautious_gain(self._second, candidate.name, other, m)
        return min(first, second, key=lambda gain: gain.low)

    def kind_fit(self, kind: str, q: float) -> KindFit:
        """The fit of a kind of rule to the usable rows; raises QualityError as `solve`."""
        if kind == LOG_SIZE and self.options.min_entropy > 0:
            raise QualityError("a rule of log n does not depend on entropy, and has no threshold")
        usable = self.options.usable(self.rows, kind)
        key = q, usable.tobytes()
        if key not in self._pooled:
            used = self.rows.take(usable), self.block[usable]
            self._pooled[key] = pool_usable(*used, self.options, q)
        return KindFit.of(kind, self._pooled[key], self.options)

    def _solve(self, kind: str, q: float) -> Candidate:
        kind_fit, name = self.kind_fit(kind, q), f"{kind}, q = {q:g}"
        solution = kind_fit.solve()
        scores = scores_at(self.rows, self._held_out_beta(kind_fit, solution))
        evidence = self.evidence.with_rule(name, scores)
        up_to, tolerance = self.options.trained_up_to or 0, self.options.tolerance
        check_trained_sizes(evidence, name, self.rows.items, up_to, tolerance)
        self.evidence = evidence
        weight = evidence.design.item_weight
        gain = cautious_gain(evidence, name, PLAIN, self.options.prior_rows)
        means = [float(weight @ x) for x in (scores[LOG_P], np.exp(scores[LOG_P]))]
        fit = kind_fit.checked_coefficients(solution)
        return Candidate(name, kind, q, kind_fit, solution, fit, gain, *means)

    def _held_out_beta(
        self, kind_fit: KindFit, start: np.ndarray, second: bool = False
    ) -> np.ndarray:
        """(rows,) beta that a fit to the other folds gives to each row."""
        fold_of = np.arange(N_BLOCKS) // (N_FOLDS if second else 1) % N_FOLDS
        beta, fold = np.empty(len(self.block)), fold_of[self.block]
        others = fold_of != np.arange(N_FOLDS)[:, None]
        for left_out, c in enumerate(kind_fit.solve_each(others.astype(float), start)):
            fit, in_fold = kind_fit.coefficients(c), fold == left_out
            beta[in_fold] = applied_beta(fit, self.rows, in_fold)
        return beta


def evidence_of(rows: Rows) -> Evidence:
    """Rows under the baseline, to which rules are added: see `scores_at`."""
    sizes, stratum = np.unique(rows.size, return_inverse=True)
    plain = scores_at(rows, np.ones(len(rows.size)))
    return Evidence(
        rules=(PLAIN,),
        values={metric: x[None] for metric, x in plain.items()},
        strata=tuple(Stratum(n) for n in sizes.tolist()),
        stratum=stratum,
        group=rows.group,
        weight=rows.weight,
        of=Scored(""),
        enough=ENOUGH_ROWS,
        variance=rows.variance,
    )


def scores_at(rows: Rows, beta: np.ndarray) -> dict[Metric, np.ndarray]:
    """(rows,) of each metric, at a beta of each row."""
    beta = rows.within(beta)
    return {
        LOG_P: rows.profile.log_p(beta), BETA: beta, EXPECTED: rows.plain_profile.log_p(beta)
    }  # fmt: skip


def check_trained_sizes(
    evidence: Evidence, name: str, items: np.ndarray, trained_up_to: int,
    tolerance: float = NLL_TOLERANCE,
) -> None:  # fmt: skip
    """Raises QualityError if a rule costs more than the tolerance at a size of the training.

    The mean decides: the error of few rows allows for any loss.
    """
    for n, part in evidence.where(items <= trained_up_to).by("size").items():
        gain = part.gain(name, LOG_P)
        if gain.mean < -tolerance:
            raise QualityError(
                f"it costs {-gain.mean:.4f} ± {gain.error:.4f} nats at n = {n:,}, where "
                f"trained_up_to = {trained_up_to} has a tolerance of {tolerance:g}; give more rows "
                "of that size, a larger tolerance, or a lower trained_up_to"
            )


def fit_rule(rows: Rows, kind: str, options: Options | None = None) -> Coefficients:
    """The best rule of a kind for these rows; raises QualityError as `RowProblem.solve`."""
    options = options or Options()
    kind_fit = RowProblem(rows, options).kind_fit(kind, options.q or 0.0)
    return kind_fit.checked_coefficients(kind_fit.solve())
