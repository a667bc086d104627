"""Scoring logits on disk or in memory: the probability of targets under fits, row by row."""

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.datasets.logits_files import Arrays
from calibrate.datasets.row_quality import BAD, COUNTS, check_bad_rows
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.baselines import PAPER, paper, without_equals
from calibrate.evidence.evidence import (
    ENOUGH_ROWS,
    PLAIN,
    Evidence,
    OptionalHeadId,
    Scored,
    Stratum,
)
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, RANKED, ROWS, Metric, P
from calibrate.parallel.progress import SILENT, Progress
from calibrate.rows.kept_rows import examine
from calibrate.rows.work_units import UNIT_SIZES, Unit, UnitSizes, plan_units
from calibrate.solver.likelihood_profile import log_p
from calibrate.solver.solved_rows import head_label, known_index
from calibrate.store.coefficients import Coefficients, identity

WITHOUT_WEIGHT = "without_weight"  # a reason why rows are not scored, beside those of BAD


class _ScoredRows(NamedTuple):
    """Columns of scored rows, (rows,)."""

    stratum: np.ndarray  # int, the place of the size
    head: np.ndarray  # int, the place of the head
    weight: np.ndarray
    group: np.ndarray
    n_items: np.ndarray  # unmasked


class _Piece(NamedTuple):
    """The scores of some rows."""

    values: dict[Metric, np.ndarray]  # (rules, rows)
    rows: _ScoredRows
    counts: Mapping[str, int]  # of COUNTS


def score_logits(
    arrays: Arrays,
    fits: Mapping[str, Coefficients],
    progress: Progress = SILENT,
    unit_sizes: UnitSizes = UNIT_SIZES,
) -> Evidence:
    """Scores the baseline, fits, and the paper's numbers if none of them is that, on rows on disk.

    Each head is scored by the fit's own entry for it, and with beta = 1 where it has none. A piece
    of the rows is in memory at a time. Bad rows (NaN, +inf, a masked target) and those of weight 0
    are counted and left out.

    Args:
      arrays: the rows; fits should be made of others.
      fits: by name, with an entry for all heads, or one for each.
      progress: advances after each piece.
      unit_sizes: how many rows a piece has.
    Returns:
      Evidence: LOG_P, nats, P of the target (of several, their total), CONFIDENCE and RANKED, by
        head and size.
    Raises:
      CalibrateError: a fit for other heads, or rows that do not name their heads.
      QualityError: all weights are 0, or more than 1 % bad rows.
    Warns:
      UserWarning: a fit was made of these rows.
    """
    for name, fit in fits.items():
        _check_heads(name, fit, arrays)
        _warn_of_calibration_rows(name, fit, arrays)
    rules = {**without_equals({PLAIN: identity(), PAPER: paper()}, fits), **fits}
    units = [unit for n in arrays.sizes for unit in plan_units(n, arrays.count(n), unit_sizes)]
    pieces = []
    progress.begin("scoring", len(units))
    for unit in units:
        pieces.append(_score_piece(arrays, unit, rules))
        progress.advance()
    check_bad_rows({"sizes": [arrays.bad]}, arrays.has_mask)
    return _evidence(pieces, arrays, tuple(rules), fits)


def _evidence(
    pieces: Sequence[_Piece],
    arrays: Arrays,
    rules: tuple[str, ...],
    fits: Mapping[str, Coefficients],
) -> Evidence:
    """All pieces together; QualityError if they have no row."""
    rows = _joined([piece.rows for piece in pieces])
    if not len(rows.weight):
        raise QualityError(f"{arrays.name} has no row to score that is not bad; give some")
    return Evidence(
        rules=rules,
        values={
            metric: np.concatenate([piece.values[metric] for piece in pieces], axis=-1)
            for metric in pieces[0].values
        },
        strata=tuple(map(Stratum, arrays.sizes)),
        stratum=rows.stratum,
        group=rows.group,
        weight=rows.weight,
        of=Scored(arrays.name, arrays.fingerprint, ROWS, _left_out(pieces, arrays)),
        heads=tuple(_heads(arrays)),
        head=rows.head,
        fits=fits,
        enough=ENOUGH_ROWS,
        fewest={
            arrays.sizes[i]: int(rows.n_items[rows.stratum == i].min())
            for i in np.unique(rows.stratum)
        },
    )


def _joined(parts: Sequence[_ScoredRows]) -> _ScoredRows:
    return _ScoredRows(*map(np.concatenate, zip(*parts, strict=True)))


def _warn_of_calibration_rows(name: str, fit: Coefficients, arrays: Arrays) -> None:
    if fit.fingerprint == arrays.fingerprint:
        warnings.warn(
            f"{name} was made of these very rows ({arrays.name}): they are not held out",
            stacklevel=3,
        )


def _left_out(pieces: Sequence[_Piece], arrays: Arrays) -> dict[str, int]:
    """The number of rows that are not scored, by reason."""
    bad = {name: sum(piece.counts[name] for piece in pieces) for name in BAD}
    return {**bad, WITHOUT_WEIGHT: arrays.without_weight}


def _score_piece(arrays: Arrays, unit: Unit, rules: Mapping[str, Coefficients]) -> _Piece:
    """The good rows of a unit under each rule."""
    rows = arrays.rows(unit.size, unit.first, unit.sets)
    good, misranked, H, counted = examine(rows.logits, rows.target)
    rows, H = rows.take(good), H[good].astype(float)
    of_head = arrays.head_index(unit.size)[unit.first : unit.first + unit.sets][good]
    n = (rows.logits > -np.inf).sum(axis=1)
    betas = np.stack([_beta(fit, arrays, of_head, H, np.log(n)) for fit in rules.values()], axis=1)
    of_target, of_top = (
        log_p(rows.logits, x, betas).T for x in (rows.target, rows.logits.argmax(1))
    )
    values = {
        P: np.exp(of_target),
        LOG_P: of_target,
        CONFIDENCE: np.exp(of_top),
        RANKED: np.broadcast_to(~misranked[good], of_target.shape).astype(of_target.dtype),
    }
    stratum = np.full(len(of_head), arrays.sizes.index(unit.size))
    counts = dict(zip(COUNTS, counted.tolist(), strict=True))
    return _Piece(values, _ScoredRows(stratum, of_head, rows.weight, rows.group, n), counts)


def _check_heads(name: str, fit: Coefficients, arrays: Arrays) -> None:
    """Raises CalibrateError for a fit for other heads, which would leave every row unchanged."""
    heads = _heads(arrays)
    if heads and all(fit.entry_of(*head) is None for head in heads):
        unnamed = ", and the rows do not say which: give arrays `layer` and `head`"
        raise CalibrateError(
            f"{name} names none of the {len(heads)} heads that the rows of {arrays.name} are of"
            f"{unnamed if heads == [(None, None)] else f' (such as {head_label(*heads[0])})'}"
        )


def _heads(arrays: Arrays) -> list[OptionalHeadId]:
    return [(known_index(layer), known_index(head)) for layer, head in arrays.heads]


def _beta(
    fit: Coefficients, arrays: Arrays, of_head: np.ndarray, H: np.ndarray, log_n: np.ndarray
) -> np.ndarray:
    """(rows,) beta that a fit gives to rows of the heads with these indices."""
    beta = np.ones(len(of_head))
    for i, head in enumerate(_heads(arrays)):
        if entry := fit.entry_of(*head):
            rows_of_head = of_head == i
            beta[rows_of_head] = entry.beta_at(H[rows_of_head], log_n[rows_of_head], fit.rule)
    return beta
