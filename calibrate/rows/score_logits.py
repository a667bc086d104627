"""Scoring logits on disk or in memory: the probability of targets under fits, row by row."""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from calibrate.core.row_batches import row_entropy
from calibrate.datasets.logits_files import Arrays
from calibrate.datasets.row_quality import BAD, check_bad_rows
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.baselines import PAPER, paper, without_equals
from calibrate.evidence.calibration_error import ranked_first
from calibrate.evidence.evidence import BASELINE, Evidence, OptionalHeadId, Scored, Stratum
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, RANKED, ROWS, Metric, P
from calibrate.parallel import SILENT, Progress
from calibrate.rows.work_units import UNIT_SIZES, Unit, UnitSizes, plan_units
from calibrate.solver.likelihood_profile import log_p
from calibrate.solver.solved_rows import head_label, known_index
from calibrate.store.fit import Fit, identity

WITHOUT_WEIGHT = "without_weight"  # a reason why rows are not scored, beside those of BAD


def score_logits(
    arrays: Arrays,
    fits: Mapping[str, Fit],
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
    rules = {**without_equals({BASELINE: identity(), PAPER: paper()}, fits), **fits}
    units = [unit for n in arrays.sizes for unit in plan_units(n, arrays.count(n), unit_sizes)]
    pieces = []
    progress.begin("scoring", len(units))
    for unit in units:
        pieces.append(_score_unit(arrays, unit, rules))
        progress.advance()
    check_bad_rows({"sizes": [arrays.bad]}, arrays.has_mask)
    return _evidence(pieces, arrays, tuple(rules), fits)


def _evidence(
    pieces: Sequence[Mapping[Metric, np.ndarray]],
    arrays: Arrays,
    rules: tuple[str, ...],
    fits: Mapping[str, Fit],
) -> Evidence:
    """The scores of all units together; QualityError if they have no row."""
    rows = np.concatenate([arrays.places(size) for size in arrays.sizes])
    rows = rows[arrays.bad_reason[rows] == 0]
    if not len(rows):
        raise QualityError(f"{arrays.name} has no row to score that is not bad; give some")
    stratum, n_items = np.searchsorted(arrays.sizes, arrays.size[rows]), arrays.n_items[rows]
    return Evidence(
        rules=rules,
        values={
            metric: np.concatenate([of_unit[metric] for of_unit in pieces], axis=-1)
            for metric in pieces[0]
        },
        strata=tuple(map(Stratum, arrays.sizes)),
        stratum=stratum,
        group=arrays.group[rows],
        weight=arrays.weight[rows],
        of=Scored(arrays.name, arrays.fingerprint, ROWS, _left_out(arrays)),
        heads=tuple(_heads(arrays)),
        head=arrays.head_number[rows],
        fits=fits,
        fewest={arrays.sizes[i]: int(n_items[stratum == i].min()) for i in np.unique(stratum)},
    )


def _warn_of_calibration_rows(name: str, fit: Fit, arrays: Arrays) -> None:
    if fit.fingerprint == arrays.fingerprint:
        warnings.warn(
            f"{name} was made of these very rows ({arrays.name}): they are not held out",
            stacklevel=3,
        )


def _left_out(arrays: Arrays) -> dict[str, int]:
    """The number of rows that are not scored, by reason."""
    bad = {name: int((arrays.bad_reason == i).sum()) for i, name in enumerate(BAD, 1)}
    return {**bad, WITHOUT_WEIGHT: arrays.without_weight}


def _score_unit(arrays: Arrays, unit: Unit, rules: Mapping[str, Fit]) -> dict[Metric, np.ndarray]:
    """The scores of the good rows of a unit, (rules, rows) each."""
    places = arrays.places(unit.size, unit.first, unit.sets)
    rows = arrays.rows(unit.size, unit.first, unit.sets)
    good = arrays.bad_reason[places] == 0
    H = row_entropy(rows.logits)[good].astype(float)
    places, rows = places[good], rows.take(good)
    of_head, log_n = arrays.head_number[places], np.log(arrays.n_items[places])
    betas = np.stack([_beta(fit, arrays, of_head, H, log_n) for fit in rules.values()], axis=1)
    of_target, of_top = (
        log_p(rows.logits, x, betas).T for x in (rows.target, rows.logits.argmax(1))
    )
    ranked = np.broadcast_to(ranked_first(rows.logits, rows.target), of_target.shape)
    return {P: np.exp(of_target), LOG_P: of_target, CONFIDENCE: np.exp(of_top), RANKED: ranked}


def _check_heads(name: str, fit: Fit, arrays: Arrays) -> None:
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
    fit: Fit, arrays: Arrays, of_head: np.ndarray, H: np.ndarray, log_n: np.ndarray
) -> np.ndarray:
    """(rows,) beta that a fit gives to rows of the heads with these indices."""
    beta = np.ones(len(of_head))
    for i, head in enumerate(_heads(arrays)):
        if entry := fit.entry_of(*head):
            rows_of_head = of_head == i
            beta[rows_of_head] = entry.beta_at(H[rows_of_head], log_n[rows_of_head], fit.rule)
    return beta
