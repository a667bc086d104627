"""Candidates: rules fitted to all rows, with their scores on rows that folds leave out."""

from dataclasses import dataclass

import numpy as np

from calibrate.errors import QualityError
from calibrate.files.coefficients import Coefficients
from calibrate.maths.rule import beta_of
from calibrate.rows.gain import Evidence, Gain, Scores
from calibrate.rows.pooling import HARM
from calibrate.rows.rule_fitting import (
    Options,
    Pools,
    Problem,
    build_problem,
    checked_coefficients,
    solve_each,
    solve_problem,
    to_coefficients,
)
from calibrate.rows.solved_rows import Rows
from calibrate.rows.weighting import N_BLOCKS, estimate_mean, row_weights

N_FOLDS = 5
KIND_LABELS = {
    "constant": "one constant",
    "log-size": "kappa log n + b",
    "polynomial": "the polynomial",
    "entropy-and-size": "the rule of entropy and size",
}


def kind_label(kind: str) -> str:
    """The name of a kind of rule in sentences."""
    return KIND_LABELS.get(kind, kind)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A rule, fitted to all rows, and its scores on rows that folds left out."""

    kind: str
    q: float  # the dial of sharpness that it was fitted with
    problem: Problem
    solution: np.ndarray  # coefficients in the form's own basis
    fit: Coefficients
    scores: Scores  # held out
    gain: Gain  # of log p over plain softmax
    mean_log_p: float  # held out, sizes equal, nats
    mean_p: float  # held out, sizes equal


def fit_candidate(
    evidence: Evidence, plain: Scores, kind: str, options: Options, pools: Pools
) -> Candidate:
    """The best rule of its kind, with its held-out scores.

    Raises:
      QualityError: as of `build_problem` and `solve_problem`, or the rule evidently costs more than
        HARM at a size that the head was trained on.
    """
    rows, block = evidence.rows, evidence.block
    problem = build_problem(rows, block, kind, options, pools)
    solution = solve_problem(problem)
    scores = evidence.score(held_out_beta(rows, block, problem, solution))
    _refuse_harm(rows, scores.log_p - plain.log_p, options.trained_up_to or 0)
    return Candidate(
        kind=kind,
        q=options.q or 0.0,
        problem=problem,
        solution=solution,
        fit=checked_coefficients(problem, solution),
        scores=scores,
        gain=evidence.gain(scores, plain),
        mean_log_p=float(evidence.weight @ scores.log_p),
        mean_p=float(evidence.weight @ np.exp(scores.log_p)),
    )


def _refuse_harm(rows: Rows, gain: np.ndarray, trained_up_to: int) -> None:
    for n in np.unique(rows.size[rows.items <= trained_up_to]):
        of_size = rows.size == n
        mean, error = estimate_mean(rows.take(of_size), gain[of_size])
        if mean + 2 * np.nan_to_num(error) < -HARM:
            raise QualityError(
                f"it costs {-mean:.4f} ± {error:.4f} nats at n = {n:,}, a size that the head was "
                f"trained on; {HARM:g} are allowed"
            )


def held_out_beta(rows: Rows, block: np.ndarray, problem: Problem, start: np.ndarray) -> np.ndarray:
    """(rows,) beta that a fit to the other folds gives to each row."""
    beta, fold = np.empty(len(block)), block % N_FOLDS
    others = np.arange(N_BLOCKS) % N_FOLDS != np.arange(N_FOLDS)[:, None]
    for left_out, c in enumerate(solve_each(problem, others.astype(float), start)):
        fit, in_fold = to_coefficients(problem, c), fold == left_out
        beta[in_fold] = _applied(fit, rows.entropy[in_fold], rows.items[in_fold])
    return beta


def applied_beta(fit: Coefficients, rows: Rows) -> np.ndarray:
    """(rows,) beta under a fit."""
    return _applied(fit, rows.entropy, rows.items)


def _applied(fit: Coefficients, entropy: np.ndarray, items: np.ndarray) -> np.ndarray:
    entry, log_n = fit.only, np.log(items)
    beta = beta_of(entropy, log_n, entry.coefficients, entry.domain, fit.rule, np)
    return np.asarray(beta)


def log_p_at(rows: Rows, beta: np.ndarray) -> np.ndarray:
    """(rows,) log p_t at each row's beta, within the bounds, in nats."""
    return rows.profile.log_p(np.clip(beta, rows.profile.low, rows.profile.high))


def mean_by_size(rows: Rows, score: np.ndarray) -> float:
    """The mean over set sizes of the mean of each; sizes with few rows have less weight."""
    return float(row_weights(rows) @ score)
