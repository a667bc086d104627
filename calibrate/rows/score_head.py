"""Scoring one head under several rules, on held-out inputs: log-likelihood, ECE and accuracy."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from calibrate.core.masking import NO_WEIGHT
from calibrate.core.row_batches import row_entropy
from calibrate.datasets.logit_rows import at_target
from calibrate.datasets.logits_checks import in_float32
from calibrate.errors import CalibrateError
from calibrate.evidence.calibration_error import ranked_first
from calibrate.evidence.evidence import BASELINE, Evidence, Scored, Stratum
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, RANKED, RIGHT, SETS, Metric
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress, run
from calibrate.rows.heads import Head, HeadReference, call, received, to_send
from calibrate.rows.work_units import attended_pieces, one_ahead, plan_units
from calibrate.store.fit import Fit, identity

STREAM = "evaluate"  # of inputs; those of another stream, such as that of `collect`, differ
TINY = 1e-30  # a probability below which float32 is not exact
MIN_LOG_P = -1e30  # of argmax, whose log p is -infinity where it is wrong


def score_head(
    head: Head,
    sizes: Sequence[int],
    sets: int,
    seed: int,
    rules: Mapping[str, Fit],
    *,
    progress: Progress = SILENT,
    jobs: Jobs = ONE_PROCESS,
) -> Evidence:
    """Scores the baseline and other rules on the same inputs; the head runs once per input.

    Args:
      head: scored by its accuracy, too, if it has `correct`; processes load it as in `collect`.
      sizes: numbers of items n.
      sets: inputs of each size.
      seed: of the data.
      rules: by name; the baseline is the first, given or not.
      progress: advances after each size.
      jobs: where it runs, a set size at a time; the scores do not depend on it.
    Returns:
      Evidence: of every rule on every input, sizes in order; each input is its own group.
    Raises:
      CalibrateError: a head that breaks the protocol; UserWarning: a fit for another head.
    """
    rules = {BASELINE: identity(), **rules}
    _warn_of_other_heads(rules.values(), head)
    sent, fits = to_send(head), list(rules.values())
    in_order = sorted(set(sizes))
    tasks = [partial(_score_size, sent, n, sets, seed, fits) for n in in_order]
    progress.begin("scoring", len(tasks))
    scores = run(tasks, jobs, lambda scored: progress.advance())
    n_inputs = sets * len(in_order)
    return Evidence(
        rules=tuple(rules),
        values={m: np.concatenate([x[m] for x in scores], axis=-1) for m in scores[0]},
        strata=tuple(map(Stratum, in_order)),
        stratum=np.repeat(np.arange(len(in_order)), sets),
        group=np.full(n_inputs, -1),
        weight=np.ones(n_inputs, np.float32),
        of=Scored(head.name, head.fingerprint, SETS),
        fits={name: fit for name, fit in rules.items() if name != BASELINE},
    )


def _warn_of_other_heads(fits: Iterable[Fit], head: Head) -> None:
    for fit in fits:
        if fit.fingerprint not in (None, head.fingerprint):
            warnings.warn(
                f"{fit.reference} was made for head {fit.source.get('head')!r} "
                f"({fit.fingerprint}), and is scored on {head.name!r} ({head.fingerprint})",
                stacklevel=3,
            )


def _score_size(
    sent: Head | HeadReference,
    size: int,
    sets: int,
    seed: int,
    fits: Sequence[Fit],
) -> dict[Metric, np.ndarray]:
    """Runs the head over all sets of one size, once: by metric, (fits, sets)."""
    head, scores = received(sent), dict[Metric, np.ndarray]()
    for unit in plan_units(size, sets):
        for part, batch, attended in one_ahead(attended_pieces(head, STREAM, seed, unit)):
            for metric, of_piece in _scores_of_sets(head, batch, attended, fits).items():
                if metric not in scores:
                    scores[metric] = np.empty((len(fits), sets), np.float32)
                scores[metric][:, unit.first :][:, part] = of_piece.T
    return scores


def _scores_of_sets(
    head: Head, batch: Any, attended: Any, fits: Sequence[Fit]
) -> dict[Metric, np.ndarray]:
    """Some sets under each fit: by metric, (count, fits), or (count, 1) where all are alike."""
    logits, _ = in_float32(np.asarray(attended.logits))
    target, betas = np.asarray(batch.target), betas_of(logits, fits)
    weights = weights_at(logits, betas)
    scores = {
        LOG_P: log_p_of_target(logits, target, betas, weights),
        CONFIDENCE: weights.max(axis=-1),
        RANKED: ranked_first(logits, target)[:, None],
    }
    return scores | ({RIGHT: _correct(head, attended, weights)} if _has_correct(head) else {})


def betas_of(z: np.ndarray, fits: Sequence[Fit]) -> np.ndarray:
    """(count, fits) float32 beta of each row under fits of one rule each.

    Takes (count, n) float32 logits, -inf where masked.
    """
    H, log_n = row_entropy(z), np.log(np.maximum((z > -np.inf).sum(axis=1), 1))
    betas = np.empty((len(z), len(fits)), np.float32)
    for column, fit in zip(betas.T, fits, strict=True):
        column[:] = fit.only.beta_at(H.astype(float), log_n, fit.rule)
    return betas


def log_p_of_target(
    z: np.ndarray, target: np.ndarray, betas: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """(count, fits) log p of the target, or of several together, also where p is 0 in float32.

    The top item has p = 1 / sum, and the log-odds of another one to it are beta times their
    difference.
    """
    below = (at_target(z, target) - z.max(axis=1)).astype(float)
    log_odds = np.maximum(betas.astype(float) * below[:, None], MIN_LOG_P)
    log_p: np.ndarray = log_odds + np.log(weights.max(axis=-1))
    if target.ndim == 1:
        return log_p
    total = (weights * target[:, None]).sum(axis=-1)
    return np.where(total > TINY, np.log(np.maximum(total, TINY)), log_p)


def attention_weights(z: np.ndarray, fits: Sequence[Fit]) -> np.ndarray:
    """(count, fits, n) float32, what `adaptive_softmax` gives for each fit: of one rule each.

    Takes (count, n) float32 logits, -inf where masked.
    """
    return weights_at(z, betas_of(z, fits))


def weights_at(z: np.ndarray, betas: np.ndarray) -> np.ndarray:
    """(count, fits, n) float32 softmax of beta z, for betas (count, fits)."""
    # NumPy, which compiles nothing for each set size, works while JAX runs the next piece.
    with np.errstate(invalid="ignore", over="ignore"):  # rows of +inf; the largest beta
        shifted = np.maximum(z - z.max(axis=1, keepdims=True), NO_WEIGHT)
        powers: np.ndarray = betas[..., None] * shifted[:, None]
    np.exp(powers, out=powers)
    powers /= powers.sum(axis=-1, keepdims=True)
    return powers


def _has_correct(head: Head) -> bool:
    return callable(getattr(head, "correct", None)) or hasattr(head, "correct_each")


def _correct(head: Head, attended: Any, weights: np.ndarray) -> np.ndarray:
    """bool (count, rules): whether the head is right with weights (count, rules, n)."""
    count, n_rules, _ = weights.shape
    if hasattr(head, "correct_each"):
        correct = call(head, "correct_each", attended, weights)
        return _check_correct(head, correct, (count, n_rules))
    columns = (call(head, "correct", attended, weights[:, i]) for i in range(n_rules))
    return np.stack([_check_correct(head, column, (count,)) for column in columns], axis=1)


def _check_correct(head: Head, correct: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    correct = np.asarray(correct)
    if correct.shape != shape or correct.dtype != bool:
        given = f"{correct.dtype}{correct.shape}"
        raise CalibrateError(f"head {head.name!r}: correct gave {given}, expected bool {shape}")
    return correct
