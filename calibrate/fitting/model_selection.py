"""Choice: which kind of rule a head needs, by the score of rows that the rule has not seen."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from calibrate.errors import QualityError
from calibrate.files.coefficients import Coefficients
from calibrate.fitting.rule_fitting import (
    KINDS,
    N_BLOCKS,
    Options,
    Sample,
    as_rule,
    deal,
    draw,
    export,
    row_weights,
    solve,
)
from calibrate.fitting.solved_rows import Rows
from calibrate.maths import solver
from calibrate.maths.rule import beta_of

N_FOLDS = 5
N_RESAMPLES = 2_000
INTERVAL = (2.5, 97.5)  # per cent
NEARLY_MOST = 0.99
LEAST_GAIN = 1e-4  # nats, or of beta or theta: less is within the errors of profiles and solver
_WORDS = {
    "constant": "one constant",
    "log-size": "kappa log n + b",
    "polynomial": "the polynomial",
}


class Gain(NamedTuple):
    """What one rule has over another, sizes alike, and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    @property
    def evident(self) -> bool:
        """Whether it is beyond chance, and beyond rounding."""
        return self.low > LEAST_GAIN


class Candidate(NamedTuple):
    """A kind of rule, fitted to all rows, and its scores on rows that folds left out."""

    kind: str
    sample: Sample
    solution: np.ndarray  # coefficients in the form's own basis
    fit: Coefficients
    beta: np.ndarray  # (rows,) held out
    score: np.ndarray  # (rows,) the objective
    log_p: np.ndarray  # (rows,) nats
    gain: Gain  # of the objective, over plain softmax
    mean_log_p: float  # sizes alike, nats


class HeldOut(NamedTuple):
    """Mean log p_t of one set size, nats: under plain softmax, and held out under the rule."""

    size: int
    rows: int
    before: float
    after: float
    error: float  # standard error of the difference


class Choice(NamedTuple):
    """The rule to publish, and why."""

    chosen: Candidate
    candidates: list[Candidate]  # simplest first
    left_out: dict[str, str]  # kind -> why it could not be fitted
    rows: Rows  # those that were solved
    block: np.ndarray  # (rows,) as they were dealt
    unit: str  # of gains
    held_out: list[HeldOut]
    verdict: str


def choose(
    rows: Rows, options: Options, force: str | None = None, kinds: Sequence[str] = KINDS
) -> Choice:
    """Fits every kind of rule, and takes the simplest that no other beats beyond chance.

    Args:
      rows: of a collection; those that the solver did not solve are left out.
      options: of the fits.
      force: a kind to take whatever the others score, if it beats plain softmax.
      kinds: those to choose from, simplest first.
    Raises:
      QualityError: too few rows for any fit, or none that beats plain softmax.
    """
    rows = rows.take(rows.status != solver.UNSOLVED)
    block, weight, one = deal(rows), row_weights(rows, options), np.ones_like(rows.beta)
    plain_log_p = scores(rows, one, "likelihood")
    plain = plain_log_p
    if options.objective != "likelihood":
        plain = scores(rows, one, options.objective)
    judge = partial(_gain, block, weight)
    candidates, left_out = [], {}
    for kind in kinds:
        try:
            sample = draw(rows, block, kind, options)
            found = _candidate(rows, block, weight, sample, options.objective, plain)
            candidates.append(found)
        except QualityError as failure:
            left_out[kind] = str(failure)
    if not candidates or force in left_out:
        raise QualityError(left_out[force or "constant"])
    free: Candidate | None = None
    for candidate in candidates:
        over = candidate.gain if free is None else judge(candidate.score - free.score)
        free = candidate if over.evident else free
    best = next((c for c in candidates if c.kind == force), free)
    if best is None or free is None or not best.gain.evident:
        raise QualityError(_not_worth_it(candidates, options, force))
    beside = {c.kind: judge(best.score - c.score).mean for c in candidates if c is not best}
    verdict = _verdict(best, free, beside, left_out, float(weight @ plain_log_p), options)
    held_out = _held_out(rows, plain_log_p, best.log_p)
    return Choice(best, candidates, left_out, rows, block, unit(options), held_out, verdict)


def _candidate(
    rows: Rows,
    block: np.ndarray,
    weight: np.ndarray,
    sample: Sample,
    objective: str,
    plain: np.ndarray,
) -> Candidate:
    """The best rule of its kind; `plain` is the (rows,) objective under plain softmax."""
    solution = solve(sample)
    fit = export(sample, solution)
    beta = held_out_beta(rows, block, sample, solution)
    log_p = scores(rows, beta, "likelihood")
    score = log_p if objective == "likelihood" else scores(rows, beta, objective)
    gain = _gain(block, weight, score - plain)
    mean_log_p = float(weight @ log_p)
    return Candidate(sample.kind, sample, solution, fit, beta, score, log_p, gain, mean_log_p)


def held_out_beta(
    rows: Rows, block: np.ndarray, sample: Sample, solution: np.ndarray
) -> np.ndarray:
    """(rows,) beta that a fit to the other folds gives to each row."""
    beta = np.empty(len(block))
    for fold in range(N_FOLDS):
        others = (np.arange(N_BLOCKS) % N_FOLDS != fold).astype(float)
        fit = as_rule(sample, solve(sample, others, start=solution))
        mine = block % N_FOLDS == fold
        beta[mine] = applied_beta(fit, rows.take(mine))
    return beta


def applied_beta(fit: Coefficients, rows: Rows) -> np.ndarray:
    """(rows,) beta under a fit."""
    entry = fit.only
    log_n = np.log(rows.items)
    return beta_of(rows.entropy, log_n, entry.coefficients, entry.domain, fit.rule, np)


def scores(rows: Rows, beta: np.ndarray, objective: str) -> np.ndarray:
    """(rows,) the objective at each row's beta, within the bounds; more is better."""
    low, high = rows.profile.low, rows.profile.high
    if objective == "likelihood":
        return rows.profile.log_p(np.clip(beta, low, high))
    optimum = np.clip(rows.beta, low, high)
    if objective == "theta":
        return -np.abs(1 / beta - 1 / optimum)
    return -np.abs(beta - optimum)


def mean_by_size(rows: Rows, score: np.ndarray) -> float:
    """The mean over set sizes of the mean of each; sizes with few rows count less."""
    return float(row_weights(rows, Options()) @ score)


def _gain(block: np.ndarray, weight: np.ndarray, difference: np.ndarray) -> Gain:
    """Weighted mean of a difference, (rows,), and its interval when whole blocks are drawn anew."""
    total = np.bincount(block, weight * difference, N_BLOCKS)
    share = np.bincount(block, weight, N_BLOCKS)
    drawn = np.random.default_rng(0).multinomial(N_BLOCKS, [1 / N_BLOCKS] * N_BLOCKS, N_RESAMPLES)
    low, high = np.percentile((drawn @ total) / (drawn @ share), INTERVAL)
    return Gain(float(total.sum()), float(low), float(high))


def _held_out(rows: Rows, plain: np.ndarray, log_p: np.ndarray) -> list[HeldOut]:
    """By set size, of (rows,) log p_t under plain softmax and under the rule."""
    found = []
    for n in np.unique(rows.size):
        mine = rows.size == n
        before, after, own = plain[mine], log_p[mine], rows.weight[mine].astype(float)
        count, own = len(own), own if own.any() else np.ones(len(own))
        before, after = (float(np.average(x, weights=own)) for x in (before, after))
        spread = own / own.sum() * (log_p[mine] - plain[mine] - (after - before))
        alike = own.sum() ** 2 / (own @ own)  # so many rows of one weight would say as much
        error = float(np.linalg.norm(spread) * np.sqrt(alike / max(alike - 1, 1)))
        found.append(HeldOut(int(n), count, before, after, error))
    return found


def in_words(kind: str) -> str:
    """What a kind of rule is called in sentences."""
    return _WORDS.get(kind, kind)


def unit(options: Options) -> str:
    """What a score is measured in."""
    return "nats of log p" if options.objective == "likelihood" else f"of {options.objective}"


def _verdict(
    best: Candidate,
    free: Candidate,
    beside: dict[str, float],
    left_out: dict[str, str],
    plain_log_p: float,
    options: Options,
) -> str:
    """One sentence: what was taken, what it gains over plain softmax, and over the others."""
    mean, low, high = best.gain
    said = [
        f"{in_words(best.kind)} gains {mean:.4f} {unit(options)} over plain softmax "
        f"({low:.4f} to {high:.4f})",
        *(f"{gain:+.4f} over {in_words(kind)}" for kind, gain in beside.items()),
    ]
    if best is not free:
        said.append(f"forced: {in_words(free.kind)} does as well or better")
    elif best.kind == "constant" and not left_out:
        said[0] = f"one constant does as well on this head: {said[0]}"
    said += [f"{in_words(kind)} was left out: {reason}" for kind, reason in left_out.items()]
    if best.mean_log_p < plain_log_p:
        said.append(
            f"but the log-probability of the target falls from {plain_log_p:.3f} to "
            f"{best.mean_log_p:.3f}: the rule is sharp where it is wrong, too"
        )
    if np.median(best.beta) > NEARLY_MOST * best.fit.rule.max_beta:
        said.append("beta is at its upper bound: this head may take its highest logit as well")
    return "; ".join(said)


def _not_worth_it(candidates: list[Candidate], options: Options, force: str | None) -> str:
    found = ", ".join(
        f"{in_words(c.kind)} {c.gain.mean:+.4f} ({c.gain.low:+.4f} to {c.gain.high:+.4f})"
        for c in candidates
    )
    nothing = "no rule beats" if force is None else f"{in_words(force)} does not beat"
    return (
        f"not for this head: {nothing} plain softmax on held-out rows ({unit(options)}, sizes "
        f"alike: {found}); leave its softmax as it is, or check that the targets are the items "
        "that should win"
    )
