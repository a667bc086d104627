"""Choosing the kind of rule that a head needs, by its score on rows that folds leave out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibrate.errors import QualityError
from calibrate.files.coefficients import Coefficients
from calibrate.fitting.gain import LEAST_GAIN, Evidence, Gain, Scores
from calibrate.fitting.held_out import HeldOut, held_out_by_size
from calibrate.fitting.rule_fitting import (
    KINDS,
    Options,
    Problem,
    build_problem,
    checked_coefficients,
    solve_problem,
    to_coefficients,
)
from calibrate.fitting.solved_rows import Rows
from calibrate.fitting.weighting import N_BLOCKS, assign_blocks, row_weights
from calibrate.maths import solver
from calibrate.maths.rule import beta_of

N_FOLDS = 5
NEAR_MAX_BETA = 0.99
KIND_LABELS = {
    "constant": "one constant",
    "log-size": "kappa log n + b",
    "polynomial": "the polynomial",
}


@dataclass(frozen=True, eq=False)
class Candidate:
    """A kind of rule, fitted to all rows, and its scores on rows that folds left out."""

    kind: str
    problem: Problem
    solution: np.ndarray  # coefficients in the form's own basis
    fit: Coefficients
    scores: Scores  # held out
    gain: Gain  # over plain softmax
    mean_log_p: float  # sizes equal, nats


@dataclass(frozen=True, eq=False)
class Trial:
    """Every kind of rule on the same rows."""

    evidence: Evidence  # of the rows that were solved
    plain: Scores  # under plain softmax
    candidates: list[Candidate]  # simplest first
    left_out: dict[str, str]  # kind -> why it could not be fitted

    def of_kinds(self, kinds: Sequence[str]) -> "Trial":
        """The same, of some kinds only."""
        return replace(
            self,
            candidates=[c for c in self.candidates if c.kind in kinds],
            left_out={kind: why for kind, why in self.left_out.items() if kind in kinds},
        )

    def simplest_unbeaten(self) -> Candidate | None:
        """The simplest rule that no other leads; None if none evidently beats plain softmax."""
        best: Candidate | None = None
        for candidate in self.candidates:
            gain = self.evidence.gain(candidate.scores, best.scores) if best else candidate.gain
            if gain.leads if best else gain.evident:
                best = candidate
        return best


@dataclass(frozen=True, eq=False)
class Choice:
    """The rule to publish, and why."""

    chosen: Candidate
    candidates: list[Candidate]  # simplest first
    left_out: dict[str, str]  # kind -> why it could not be fitted
    rows: Rows  # those that were solved
    block: np.ndarray  # (rows,) block of each
    held_out: list[HeldOut]
    verdict: str


def choose(rows: Rows, options: Options, force: str | None = None) -> Choice:
    """Fits every kind of rule, and chooses one; see `try_kinds` and `choose_from`."""
    return choose_from(try_kinds(rows, options), force)


def choose_from(trial: Trial, force: str | None = None) -> Choice:
    """The simplest rule that no other beats beyond chance.

    Args:
      trial: the kinds to choose from.
      force: a kind to choose even if another scores better, if it beats plain softmax.
    Raises:
      QualityError: too few rows for any fit, or none that evidently beats plain softmax.
    """
    evidence, candidates, left_out = trial.evidence, trial.candidates, trial.left_out
    if not candidates or force in left_out:
        raise QualityError(left_out[force or "constant"])
    unforced = trial.simplest_unbeaten()
    best = next((c for c in candidates if c.kind == force), unforced)
    if unforced is None or best is None or not best.gain.evident:
        raise QualityError(_refusal(trial, force))
    leads = {c.kind: evidence.gain(best.scores, c.scores).mean for c in candidates if c is not best}
    verdict = "; ".join([*_gain_sentences(best, unforced, leads, left_out), *_warnings(best)])
    held_out = held_out_by_size(evidence.rows, trial.plain.log_p, best.scores.log_p)
    return Choice(best, candidates, left_out, evidence.rows, evidence.block, held_out, verdict)


def try_kinds(rows: Rows, options: Options, kinds: Sequence[str] = KINDS) -> Trial:
    """Fits every kind of rule, and scores it on rows that folds leave out.

    Args:
      rows: of a collection; those without weight, or that the solver did not solve, are left out.
      options: of the fits.
      kinds: those to fit, simplest first.
    """
    counted = rows.weight > 0 if rows.weight.any() else np.full(len(rows.size), True)
    rows = rows.take(counted & (rows.status != solver.UNSOLVED))
    evidence = Evidence(rows, assign_blocks(rows), row_weights(rows), options.prior_rows)
    trial = Trial(evidence, evidence.score(np.ones_like(rows.beta)), [], {})
    for kind in kinds:
        try:
            trial.candidates.append(_fit_candidate(evidence, trial.plain, kind, options))
        except QualityError as failure:
            trial.left_out[kind] = str(failure)
    return trial


def _fit_candidate(evidence: Evidence, plain: Scores, kind: str, options: Options) -> Candidate:
    """The best rule of its kind, with its held-out scores."""
    rows, block = evidence.rows, evidence.block
    problem = build_problem(rows, block, kind, options)
    solution = solve_problem(problem)
    scores = evidence.score(held_out_beta(rows, block, problem, solution))
    return Candidate(
        kind=kind,
        problem=problem,
        solution=solution,
        fit=checked_coefficients(problem, solution),
        scores=scores,
        gain=evidence.gain(scores, plain),
        mean_log_p=float(evidence.weight @ scores.log_p),
    )


def held_out_beta(
    rows: Rows, block: np.ndarray, problem: Problem, start: np.ndarray, n_folds: int = N_FOLDS
) -> np.ndarray:
    """(rows,) beta that a fit to the other folds gives to each row."""
    beta = np.empty(len(block))
    for fold in range(n_folds):
        others = (np.arange(N_BLOCKS) % n_folds != fold).astype(float)
        fit = to_coefficients(problem, solve_problem(problem, others, start=start))
        in_fold = block % n_folds == fold
        beta[in_fold] = applied_beta(fit, rows.take(in_fold))
    return beta


def applied_beta(fit: Coefficients, rows: Rows) -> np.ndarray:
    """(rows,) beta under a fit."""
    entry = fit.only
    log_n = np.log(rows.items)
    beta = beta_of(rows.entropy, log_n, entry.coefficients, entry.domain, fit.rule, np)
    return np.asarray(beta)


def log_p_at(rows: Rows, beta: np.ndarray) -> np.ndarray:
    """(rows,) log p_t at each row's beta, within the bounds, in nats."""
    return rows.profile.log_p(np.clip(beta, rows.profile.low, rows.profile.high))


def mean_by_size(rows: Rows, score: np.ndarray) -> float:
    """The mean over set sizes of the mean of each; sizes with few rows have less weight."""
    return float(row_weights(rows) @ score)


def kind_label(kind: str) -> str:
    """The name of a kind of rule in sentences."""
    return KIND_LABELS.get(kind, kind)


def _gain_sentences(
    best: Candidate,
    unforced: Candidate,
    leads: dict[str, float],
    left_out: dict[str, str],
) -> list[str]:
    """The choice, its gains over plain softmax and over other kinds, and kinds left out."""
    mean, low, high, p = best.gain
    gain = (
        f"{kind_label(best.kind)} gains {mean:.4f} nats of log p over plain softmax "
        f"(95 % interval {low:.4f} to {high:.4f}, p = {p:.2g})"
    )
    if best is unforced and best.kind == "constant" and not left_out:
        gain = f"no other kind is better than one constant beyond chance: {gain}"
    sentences = [gain, *(f"{lead:+.4f} over {kind_label(kind)}" for kind, lead in leads.items())]
    if best is not unforced:
        sentences.append(f"forced: it does not beat {kind_label(unforced.kind)} beyond chance")
    return sentences + [
        f"{kind_label(kind)} was left out: {reason}" for kind, reason in left_out.items()
    ]


def _warnings(best: Candidate) -> list[str]:
    """Caveats on a gain."""
    if np.median(best.scores.beta) > NEAR_MAX_BETA * best.fit.rule.max_beta:
        return ["beta is at its upper bound: on this head hard attention may do as well"]
    return []


def _refusal(trial: Trial, force: str | None) -> str:
    """Why no rule is published."""
    candidates, n_groups = trial.candidates, trial.evidence.rows.n_groups()
    gains = ", ".join(
        f"{kind_label(c.kind)} {c.gain.mean:+.4f} ({c.gain.low:+.4f} to {c.gain.high:+.4f})"
        for c in candidates
    )
    subject = "no rule beats" if force is None else f"{kind_label(force)} does not beat"
    advice = "leave its softmax as it is, or check that the targets are the items that should win"
    if n_groups < N_BLOCKS and any(c.gain.mean >= LEAST_GAIN for c in candidates):
        advice = (
            f"{n_groups} prompts (groups) are too few to rule out failures that they do not show: "
            "collect more"
        )
    return (
        f"not for this head: {subject} plain softmax by {LEAST_GAIN:g} nats on average and beyond "
        f"chance on held-out rows (nats of log p, sizes equal: {gains}); {advice}"
    )
