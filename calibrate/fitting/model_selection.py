"""Choosing the kind of rule that a head needs, by its score on rows that folds leave out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from calibrate.errors import QualityError
from calibrate.files.coefficients import Coefficients
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
N_RESAMPLES = 2_000
INTERVAL = (2.5, 97.5)  # per cent
NEAR_MAX_BETA = 0.99
MIN_GAIN = 1e-4  # nats, or of beta or theta: less is within the errors of profiles and solver
KIND_LABELS = {
    "constant": "one constant",
    "log-size": "kappa log n + b",
    "polynomial": "the polynomial",
}


class Gain(NamedTuple):
    """Mean difference of two rules' scores, sizes equal, and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    @property
    def evident(self) -> bool:
        """Whether it is beyond chance, and beyond rounding."""
        return self.low > MIN_GAIN


@dataclass(frozen=True, eq=False)
class Candidate:
    """A kind of rule, fitted to all rows, and its scores on rows that folds left out."""

    kind: str
    problem: Problem
    solution: np.ndarray  # coefficients in the form's own basis
    fit: Coefficients
    beta: np.ndarray  # (rows,) held out
    score: np.ndarray  # (rows,) the objective
    log_p: np.ndarray  # (rows,) nats
    gain: Gain  # of the objective, over plain softmax
    mean_log_p: float  # sizes equal, nats


class HeldOut(NamedTuple):
    """Mean log p_t of one set size, nats: under plain softmax, and held out under the rule."""

    size: int
    rows: int
    before: float
    after: float
    error: float  # standard error of the difference


@dataclass(frozen=True, eq=False)
class Choice:
    """The rule to publish, and why."""

    chosen: Candidate
    candidates: list[Candidate]  # simplest first
    left_out: dict[str, str]  # kind -> why it could not be fitted
    rows: Rows  # those that were solved
    block: np.ndarray  # (rows,) block of each
    unit: str  # of gains
    held_out: list[HeldOut]
    verdict: str


@dataclass(frozen=True, eq=False)
class _PlainScores:
    """The rows that rules are scored on, and their scores under plain softmax, all (rows,)."""

    rows: Rows
    block: np.ndarray
    weight: np.ndarray
    objective: str
    score: np.ndarray
    log_p: np.ndarray

    @classmethod
    def of(cls, rows: Rows, objective: str) -> "_PlainScores":
        plain_beta = np.ones_like(rows.beta)
        score, log_p = (row_scores(rows, plain_beta, name) for name in (objective, "likelihood"))
        return cls(rows, assign_blocks(rows), row_weights(rows), objective, score, log_p)

    def gain(self, difference: np.ndarray) -> Gain:
        return estimate_gain(self.block, self.weight, difference)


def choose(
    rows: Rows, options: Options, force: str | None = None, kinds: Sequence[str] = KINDS
) -> Choice:
    """Fits every kind of rule, and chooses the simplest that no other beats beyond chance.

    Args:
      rows: of a collection; those that the solver did not solve are left out.
      options: of the fits.
      force: a kind to choose even if another scores better, if it beats plain softmax.
      kinds: those to choose from, simplest first.
    Raises:
      QualityError: too few rows for any fit, or none that beats plain softmax.
    """
    rows = rows.take(rows.status != solver.UNSOLVED)
    plain = _PlainScores.of(rows, options.objective)
    candidates, left_out = [], {}
    for kind in kinds:
        try:
            candidates.append(_fit_candidate(plain, kind, options))
        except QualityError as failure:
            left_out[kind] = str(failure)
    if not candidates or force in left_out:
        raise QualityError(left_out[force or "constant"])
    unforced: Candidate | None = None
    for candidate in candidates:
        lead = plain.gain(candidate.score - unforced.score) if unforced else candidate.gain
        unforced = candidate if lead.evident else unforced
    best = next((c for c in candidates if c.kind == force), unforced)
    if best is None or unforced is None or not best.gain.evident:
        raise QualityError(_refusal(candidates, options, force))
    leads = {c.kind: plain.gain(best.score - c.score).mean for c in candidates if c is not best}
    verdict = "; ".join([
        *_gain_sentences(best, unforced, leads, left_out, options),
        *_warnings(best, float(plain.weight @ plain.log_p)),
    ])  # fmt: skip
    held_out = held_out_by_size(rows, plain.log_p, best.log_p)
    unit = score_unit(options)
    return Choice(best, candidates, left_out, rows, plain.block, unit, held_out, verdict)


def _fit_candidate(plain: _PlainScores, kind: str, options: Options) -> Candidate:
    """The best rule of its kind, with its held-out scores."""
    rows = plain.rows
    problem = build_problem(rows, plain.block, kind, options)
    solution = solve_problem(problem)
    beta = held_out_beta(rows, plain.block, problem, solution)
    score, log_p = (row_scores(rows, beta, name) for name in (plain.objective, "likelihood"))
    return Candidate(
        kind=kind,
        problem=problem,
        solution=solution,
        fit=checked_coefficients(problem, solution),
        beta=beta,
        score=score,
        log_p=log_p,
        gain=plain.gain(score - plain.score),
        mean_log_p=float(plain.weight @ log_p),
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


def row_scores(rows: Rows, beta: np.ndarray, objective: str) -> np.ndarray:
    """(rows,) the objective at each row's beta, within the bounds; more is better."""
    low, high = rows.profile.low, rows.profile.high
    if objective == "likelihood":
        return rows.profile.log_p(np.clip(beta, low, high))
    optimum = np.clip(rows.beta, low, high)
    difference = 1 / beta - 1 / optimum if objective == "theta" else beta - optimum
    return np.asarray(-np.abs(difference))


def mean_by_size(rows: Rows, score: np.ndarray) -> float:
    """The mean over set sizes of the mean of each; sizes with few rows have less weight."""
    return float(row_weights(rows) @ score)


def estimate_gain(block: np.ndarray, weight: np.ndarray, difference: np.ndarray) -> Gain:
    """Weighted mean of a difference, (rows,), and its interval when whole blocks are resampled."""
    total = np.bincount(block, weight * difference, N_BLOCKS)
    share = np.bincount(block, weight, N_BLOCKS)
    drawn = np.random.default_rng(0).multinomial(N_BLOCKS, [1 / N_BLOCKS] * N_BLOCKS, N_RESAMPLES)
    low, high = np.percentile((drawn @ total) / (drawn @ share), INTERVAL)
    return Gain(float(total.sum()), float(low), float(high))


def held_out_by_size(rows: Rows, plain: np.ndarray, log_p: np.ndarray) -> list[HeldOut]:
    """By set size, of (rows,) log p_t under plain softmax and under the rule."""
    sizes = []
    for n in np.unique(rows.size):
        of_size = rows.size == n
        before, after = plain[of_size], log_p[of_size]
        weight = rows.weight[of_size].astype(float)
        weight = weight if weight.any() else np.ones(len(weight))
        mean_before, mean_after = (float(np.average(x, weights=weight)) for x in (before, after))
        spread = weight / weight.sum() * (after - before - (mean_after - mean_before))
        effective = weight.sum() ** 2 / (weight @ weight)  # as many rows of equal weight
        error = float(np.linalg.norm(spread) * np.sqrt(effective / max(effective - 1, 1)))
        sizes.append(HeldOut(int(n), len(weight), mean_before, mean_after, error))
    return sizes


def kind_label(kind: str) -> str:
    """The name of a kind of rule in sentences."""
    return KIND_LABELS.get(kind, kind)


def score_unit(options: Options) -> str:
    """The unit of a score."""
    return "nats of log p" if options.objective == "likelihood" else f"of {options.objective}"


def _gain_sentences(
    best: Candidate,
    unforced: Candidate,
    leads: dict[str, float],
    left_out: dict[str, str],
    options: Options,
) -> list[str]:
    """The choice, its gains over plain softmax and over other kinds, and kinds left out."""
    mean, low, high = best.gain
    gain = (
        f"{kind_label(best.kind)} gains {mean:.4f} {score_unit(options)} over plain softmax "
        f"({low:.4f} to {high:.4f})"
    )
    if best is unforced and best.kind == "constant" and not left_out:
        gain = f"one constant does as well on this head: {gain}"
    sentences = [gain, *(f"{lead:+.4f} over {kind_label(kind)}" for kind, lead in leads.items())]
    if best is not unforced:
        sentences.append(f"forced: {kind_label(unforced.kind)} does as well or better")
    return sentences + [
        f"{kind_label(kind)} was left out: {reason}" for kind, reason in left_out.items()
    ]


def _warnings(best: Candidate, plain_log_p: float) -> list[str]:
    """Caveats on a gain."""
    sentences = []
    if best.mean_log_p < plain_log_p:
        sentences.append(
            f"but the log-probability of the target falls from {plain_log_p:.3f} to "
            f"{best.mean_log_p:.3f}: the rule is sharp where it is wrong, too"
        )
    if np.median(best.beta) > NEAR_MAX_BETA * best.fit.rule.max_beta:
        sentences.append("beta is at its upper bound: on this head hard attention may do as well")
    return sentences


def _refusal(candidates: list[Candidate], options: Options, force: str | None) -> str:
    gains = ", ".join(
        f"{kind_label(c.kind)} {c.gain.mean:+.4f} ({c.gain.low:+.4f} to {c.gain.high:+.4f})"
        for c in candidates
    )
    subject = "no rule beats" if force is None else f"{kind_label(force)} does not beat"
    return (
        f"not for this head: {subject} plain softmax on held-out rows ({score_unit(options)}, "
        f"sizes equal: {gains}); leave its softmax as it is, or check that the targets are the "
        "items that should win"
    )
