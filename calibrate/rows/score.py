"""Scores of rules on held-out inputs: log-likelihood, confidence and accuracy, input by input.

`score_head` draws new inputs for a head and runs it once on each; `score_logits` reads arrays.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from calibrate.core.masking import NO_WEIGHT
from calibrate.core.row_batches import row_entropy
from calibrate.errors import CalibrateError, QualityError, warn_user
from calibrate.evidence.baselines import PAPER, paper, without_equals
from calibrate.evidence.calibration_error import ranked_first
from calibrate.evidence.evidence import BASELINE, Evidence, OptionalHeadId, Scored, Stratum
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, RANKED, RIGHT, ROWS, SETS, Metric, P
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress, run
from calibrate.rows.heads import Head
from calibrate.rows.likelihood_profile import log_p
from calibrate.rows.logits_files import Arrays
from calibrate.rows.rows import BAD, check_bad_rows, head_label, known_index
from calibrate.rows.units import (
    UNIT_SIZES,
    Unit,
    UnitSizes,
    attended_pieces,
    plan_units,
)
from calibrate.store.fit import Fit, identity

EVALUATE_STREAM = "evaluate"  # of inputs; `collect` draws from another one
WITHOUT_WEIGHT = "without_weight"  # a reason why rows are not scored, beside those of BAD


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
    """Scores the baseline and other rules on the same inputs; the head runs once on each.

    Args:
      head: also scored by accuracy if it has `correct`; workers load it as in `collect_from_head`.
      sizes: numbers of items n.
      sets: number of inputs of each size.
      seed: of the inputs.
      rules: by name; the baseline comes first, given or not.
      progress: advances after each size.
      jobs: processes or cluster; a task is a size. The scores do not depend on it.
    Returns:
      Evidence: of every rule on every input, sizes in order; each input is its own group.
    Raises:
      CalibrateError: the head breaks the protocol.
    Warns:
      UserWarning: a fit was made for another head.
    """
    rules = {BASELINE: identity(), **rules}
    _warn_of_other_heads(rules.values(), head)
    sizes = sorted(set(sizes))
    tasks = [partial(_score_size, head, n, sets, seed, [*rules.values()]) for n in sizes]
    progress.begin("scoring", len(tasks))
    scores = run(tasks, jobs, lambda scores_of_size: progress.advance())
    n_inputs = sets * len(sizes)
    return Evidence(
        rules=tuple(rules),
        values=_concatenate_scores(scores),
        strata=tuple(map(Stratum, sizes)),
        stratum=np.repeat(np.arange(len(sizes)), sets),
        group=np.full(n_inputs, -1),
        weight=np.ones(n_inputs, np.float32),
        of=Scored(head.name, head.fingerprint, SETS),
        fits={name: fit for name, fit in rules.items() if name != BASELINE},
    )


def _warn_of_other_heads(fits: Iterable[Fit], head: Head) -> None:
    for fit in fits:
        if fit.fingerprint not in (None, head.fingerprint):
            warn_user(
                f"{fit.reference} was made for head {fit.source.get('head')!r} "
                f"({fit.fingerprint}), and is scored on {head.name!r} ({head.fingerprint})"
            )


def _score_size(
    head: Head,
    size: int,
    sets: int,
    seed: int,
    fits: Sequence[Fit],
) -> dict[Metric, np.ndarray]:
    """Runs the head once on all inputs of a size; scores (fits, sets) by metric."""
    parts = []
    is_scored = callable(getattr(head, "correct", None)) or hasattr(head, "correct_each")
    for unit in plan_units(size, sets):
        logits, target, betas, right = [], [], [], []
        for piece in attended_pieces(head, EVALUATE_STREAM, seed, unit):
            logits.append(piece.logits)
            target.append(piece.target)
            betas.append(betas_of_rows(piece.logits, fits))
            if is_scored:
                weights = softmax_at(piece.logits, betas[-1])
                right.append(_call_correct(head, piece.attended, weights))
        scores = score_rows(*map(np.concatenate, (logits, target, betas)))
        parts.append(scores | ({RIGHT: np.concatenate(right).T} if is_scored else {}))
    return _concatenate_scores(parts)


def score_rows(
    logits: np.ndarray, target: np.ndarray, betas: np.ndarray
) -> dict[Metric, np.ndarray]:
    """(rules, rows) float32 scores of logits (rows, n) at betas (rows, rules), by metric."""
    of_target, of_top = (log_p(logits, x, betas).T for x in (target, logits.argmax(axis=1)))
    ranked = np.broadcast_to(ranked_first(logits, target), of_target.shape)
    return {LOG_P: of_target, CONFIDENCE: np.exp(of_top), RANKED: ranked}


def betas_of_rows(z: np.ndarray, fits: Sequence[Fit]) -> np.ndarray:
    """(count, fits) float32 beta of logits (count, n) under fits with one rule each."""
    H, log_n = row_entropy(z), np.log(np.maximum((z > -np.inf).sum(axis=1), 1))
    betas = np.empty((len(z), len(fits)), np.float32)
    for column, fit in zip(betas.T, fits, strict=True):
        column[:] = fit.only.beta_at(H.astype(float), log_n, fit.rule)
    return betas


def softmax_at(z: np.ndarray, betas: np.ndarray) -> np.ndarray:
    """(count, fits, n) float32 softmax of beta z, for betas (count, fits)."""
    # NumPy compiles nothing for each set size, and runs while JAX computes the next piece.
    with np.errstate(invalid="ignore", over="ignore"):  # rows of +inf; the largest beta
        shifted = np.maximum(z - z.max(axis=1, keepdims=True), NO_WEIGHT)
        powers: np.ndarray = betas[..., None] * shifted[:, None]
    np.exp(powers, out=powers)
    powers /= powers.sum(axis=-1, keepdims=True)
    return powers


def _call_correct(head: Head, attended: Any, weights: np.ndarray) -> np.ndarray:
    """bool (count, rules), True where the head is correct with weights (count, rules, n)."""
    if hasattr(head, "correct_each"):
        correct = np.asarray(head.correct_each(attended, weights))
    else:
        each = [head.correct(attended, weights[:, i]) for i in range(weights.shape[1])]
        correct = np.stack(each, axis=-1)
    if correct.shape != weights.shape[:2] or correct.dtype != bool:
        raise CalibrateError(
            f"head {head.name!r}: correct gave {correct.dtype}{correct.shape} for all rules, "
            f"expected bool {weights.shape[:2]}"
        )
    return correct


def score_logits(
    arrays: Arrays,
    fits: Mapping[str, Fit],
    progress: Progress = SILENT,
    unit_sizes: UnitSizes = UNIT_SIZES,
) -> Evidence:
    """Scores the baseline, the paper's published polynomial, and fits on arrays.

    Each head is scored with the entry of the fit for it, and with beta = 1 if there is none. One
    unit of rows is in memory at a time. Bad rows (NaN, +inf, a masked target) and rows of weight 0
    are counted and left out.

    Args:
      arrays: held-out rows.
      fits: by name, with an entry for all heads, or one for each.
      progress: advances after each unit.
      unit_sizes: number of rows of a unit.
    Returns:
      Evidence: LOG_P, nats, P of the target (of several, their total), CONFIDENCE and RANKED, by
        head and size.
    Raises:
      CalibrateError: a fit is for other heads, or the rows do not name their heads.
      QualityError: all weights are 0, or more than 1 % of the rows are bad.
    Warns:
      UserWarning: a fit was made of these rows.
    """
    for name, fit in fits.items():
        _check_heads(name, fit, arrays)
        _warn_of_calibration_rows(name, fit, arrays)
    rules = {**without_equals({BASELINE: identity(), PAPER: paper()}, fits), **fits}
    units = [unit for n in arrays.sizes for unit in plan_units(n, arrays.count(n), unit_sizes)]
    scores = []
    progress.begin("scoring", len(units))
    for unit in units:
        scores.append(_score_unit(arrays, unit, rules))
        progress.advance()
    check_bad_rows({"sizes": [arrays.bad]})
    return _join_scores(scores, arrays, tuple(rules), fits)


def _check_heads(name: str, fit: Fit, arrays: Arrays) -> None:
    """Raises CalibrateError if a fit has an entry for none of the heads."""
    heads = _optional_heads(arrays)
    if heads and all(fit.entry_of(*head) is None for head in heads):
        unnamed = ", and the rows do not say which: give arrays `layer` and `head`"
        raise CalibrateError(
            f"{name} names none of the {len(heads)} heads that the rows of {arrays.name} are of"
            f"{unnamed if heads == [(None, None)] else f' (such as {head_label(*heads[0])})'}"
        )


def _warn_of_calibration_rows(name: str, fit: Fit, arrays: Arrays) -> None:
    if fit.fingerprint == arrays.fingerprint:
        warn_user(f"{name} was made of these very rows ({arrays.name}): they are not held out")


def _score_unit(arrays: Arrays, unit: Unit, rules: Mapping[str, Fit]) -> dict[Metric, np.ndarray]:
    """The scores (rules, rows) of the good rows of a unit, by metric."""
    places = arrays.places(unit.size, unit.first, unit.sets)
    rows = arrays.rows(unit.size, unit.first, unit.sets)
    good = arrays.bad_reason[places] == 0
    H = row_entropy(rows.logits)[good].astype(float)
    places, rows = places[good], rows.take(good)
    head_number, log_n = arrays.head_number[places], np.log(arrays.n_items[places])
    betas = np.stack(
        [_betas_by_head(fit, arrays, head_number, H, log_n) for fit in rules.values()], axis=1
    )
    scores = score_rows(rows.logits, rows.target, betas)
    return {P: np.exp(scores[LOG_P]), **scores}


def _betas_by_head(
    fit: Fit, arrays: Arrays, head_number: np.ndarray, H: np.ndarray, log_n: np.ndarray
) -> np.ndarray:
    """(rows,) beta of a fit for rows of the heads with these numbers."""
    beta = np.ones(len(head_number))
    for i, head in enumerate(_optional_heads(arrays)):
        if entry := fit.entry_of(*head):
            rows_of_head = head_number == i
            beta[rows_of_head] = entry.beta_at(H[rows_of_head], log_n[rows_of_head], fit.rule)
    return beta


def _optional_heads(arrays: Arrays) -> list[OptionalHeadId]:
    """The heads of the rows, with None for unknown numbers."""
    return [(known_index(layer), known_index(head)) for layer, head in arrays.heads]


def _concatenate_scores(
    parts: Sequence[Mapping[Metric, np.ndarray]],
) -> dict[Metric, np.ndarray]:
    """Scores (rules, inputs) of all parts, by metric."""
    return {
        metric: np.concatenate([part[metric] for part in parts], axis=-1) for metric in parts[0]
    }


def _join_scores(
    scores: Sequence[Mapping[Metric, np.ndarray]],
    arrays: Arrays,
    rules: tuple[str, ...],
    fits: Mapping[str, Fit],
) -> Evidence:
    """The scores of all units as evidence; QualityError if there is no row."""
    rows = np.concatenate([arrays.places(size) for size in arrays.sizes])
    rows = rows[arrays.bad_reason[rows] == 0]
    if not len(rows):
        raise QualityError(f"{arrays.name} has no row to score that is not bad; give some")
    stratum, n_items = np.searchsorted(arrays.sizes, arrays.size[rows]), arrays.n_items[rows]
    bad = {name: int((arrays.bad_reason == i).sum()) for i, name in enumerate(BAD, 1)}
    left_out = {**bad, WITHOUT_WEIGHT: arrays.without_weight}
    return Evidence(
        rules=rules,
        values=_concatenate_scores(scores),
        strata=tuple(map(Stratum, arrays.sizes)),
        stratum=stratum,
        group=arrays.group[rows],
        weight=arrays.weight[rows],
        of=Scored(arrays.name, arrays.fingerprint, ROWS, left_out),
        heads=tuple(_optional_heads(arrays)),
        head=arrays.head_number[rows],
        fits=fits,
        fewest={arrays.sizes[i]: int(n_items[stratum == i].min()) for i in np.unique(stratum)},
    )
