"""Fitting a collection: a calibrated rule with its evidence, uncertainty and provenance."""

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.core.rule_kinds import KINDS
from calibrate.datasets.collection import open_collection
from calibrate.datasets.row_quality import check_bad_rows, count_bad
from calibrate.datasets.rows import RowCollection
from calibrate.defaults import MIN_BETA_LIMIT
from calibrate.errors import CalibrateError, QualityError
from calibrate.fitting.bootstrap import bootstrap
from calibrate.fitting.cross_validate import cross_validate
from calibrate.fitting.fit_result import FitResult, row_counts, with_metadata
from calibrate.fitting.fit_rule import applied_beta
from calibrate.fitting.least_squares import fit_least_squares
from calibrate.fitting.maximum_likelihood import LikelihoodFit
from calibrate.fitting.options import LIKELIHOOD, Options, resolve_options
from calibrate.fitting.per_head import (
    HeadFit,
    combine_heads,
    fit_each_head,
    fit_heads,
    quality_of_heads,
)
from calibrate.fitting.select import ScoreOnSets, Selection, bound_note, select_rule
from calibrate.parallel.jobs import ONE_PROCESS, Jobs, with_cluster
from calibrate.parallel.progress import SILENT, Progress
from calibrate.rows.heads import Head
from calibrate.rows.score_head import VALIDATION_STREAM, score_head
from calibrate.solver.solved_rows import ROWS_PER_GROUP, Rows, solve_collection
from calibrate.store.coefficients import Coefficients

# Of each size, at most, that select q.
VALIDATION_SETS = 1_024
VALIDATION_ITEMS = 1 << 19
N_ERRORS = 3  # standard errors by which argmax has to be better than a guess


def open_for_fit(folder: Path, allow_partial: bool = False) -> RowCollection:
    """Opens a collection to fit it; an unfinished one with a warning, and only if it is allowed."""
    collection = open_collection(folder, RowCollection, allow_partial)
    if collection.partial:
        n_shards = len(collection.manifest["shards"])
        warnings.warn(
            f"{folder} is unfinished; the fit is made of its {n_shards} finished shards",
            stacklevel=2,
        )
    return collection


def fit_collection(
    collection: RowCollection | Path,
    name: str,
    options: Options | None = None,
    jobs: Jobs = ONE_PROCESS,
    head: Head | None = None,
) -> FitResult:
    """Solves a collection, and fits the rule that its head needs.

    Args:
      collection: or its folder.
      name: of the fit.
      options: of the fit; None are the defaults.
      jobs: where solver, bootstrap and head run; the result does not depend on it.
      head: of the collection, whose accuracy selects q if the options leave it open; without one
        that can be scored q is 0.
    Raises:
      CalibrateError: the collection is absent, unfinished or damaged, names heads, lacks the rows
        asked for, or is of another head; or an option is out of range.
      QualityError: too few rows, too many bad ones, or no significant improvement by any rule.
    """
    collection = _opened(collection)
    given, options = options, resolve_options(collection, options)
    if given is not None and given.loss != LIKELIHOOD:
        rows = solve_collection(collection, jobs, given.min_beta)
        return fit_solved(collection, rows, name, given)
    with with_cluster(jobs) as running:
        rows = solve_collection(collection, running, options.min_beta)
        score_on_sets = None if head is None else validation_scorer(head, collection, running)
        validation = cross_validate(rows, tuple(KINDS.values()), options)
        selection = select_rule(validation, tuple(KINDS), score_on_sets)
        _check_bounds(collection, rows, selection.published.coefficients)
        quality = _quality(collection, rows, selection, running)
    fit = with_metadata(
        selection.published.coefficients, name, collection, quality, options.record()
    )
    return FitResult(fit, rows, selection)


def _opened(collection: RowCollection | Path, per_head: bool = False) -> RowCollection:
    """A collection without too many bad rows; for one rule, of rows that name no heads."""
    if not isinstance(collection, RowCollection):
        collection = open_for_fit(Path(collection))
    check_bad_rows(collection.manifest)
    if collection.heads and not per_head:
        raise CalibrateError(
            f"{collection.folder} says which heads its rows are of ({len(collection.heads)}); fit "
            "each of them, as `calibrate fit` does"
        )
    return collection


def validation_scorer(head: Head, collection: RowCollection, jobs: Jobs) -> ScoreOnSets | None:
    """Scores rules on validation sets; None of a head that cannot be scored.

    Raises:
      CalibrateError: the collection is of another head.
    """
    configuration = collection.manifest["configuration"]
    if head.fingerprint != configuration["fingerprint"]:
        raise CalibrateError(
            f"{collection.folder} was made of head {configuration['head']!r} "
            f"({configuration['fingerprint']}), not of {head.name!r} ({head.fingerprint}); give "
            "that head"
        )
    if getattr(head, "correct", None) is None:
        return None
    sizes = [size["size"] for size in collection.manifest["sizes"]]
    sets = {n: min(VALIDATION_SETS, max(1, VALIDATION_ITEMS // n)) for n in sizes}
    return partial(
        score_head, head, sizes, sets, configuration["seed"], jobs=jobs, stream=VALIDATION_STREAM
    )


def _check_bounds(collection: RowCollection, rows: Rows, fit: Coefficients) -> None:
    """Warns of a beta at a bound; raises QualityError if it is 1/64 and argmax is at chance.

    That is decided by all good rows, whichever are kept. Ties with a target count as wrong, as
    constant logits would be right otherwise.
    """
    note = bound_note(rows, fit)
    if not note:
        return
    at_lower = fit.rule.min_beta == MIN_BETA_LIMIT and bool(applied_beta(fit, rows).mean() < 1)
    sizes = [x for x in collection.manifest["sizes"] if (rows.size == x["size"]).any()]
    good = np.array([size["rows"] - count_bad(size) for size in sizes])
    n, chances = good.sum(), [np.mean(1 / rows.items[rows.size == x["size"]]) for x in sizes]
    accuracy = 1 - sum(size["misranked"] + size["ties"] for size in sizes) / n
    chance = float(good @ chances / n)
    if at_lower and accuracy <= chance + N_ERRORS * np.sqrt(chance * (1 - chance) / n):
        raise QualityError(
            "the logits carry no information about the targets (argmax is right in "
            f"{accuracy:.1%} of the rows, a guess in {chance:.1%}); check that target holds the "
            "positions that should win"
        )
    warnings.warn(note, stacklevel=2)


def _quality(
    collection: RowCollection, rows: Rows, selection: Selection, jobs: Jobs
) -> dict[str, Any]:
    published, options = selection.published, selection.published.options
    assert isinstance(published.fitted, LikelihoodFit)
    errors, band = bootstrap(published.fitted, jobs)
    least = published.coefficients.rule.min_entropy
    counts = {
        "used": int(options.usable(rows).sum()),
        "gated": int((least > 0) * (rows.entropy <= least).sum()),
    }
    return {
        "rows": row_counts(collection, rows.count_by_status()) | counts,
        "standard_errors": [errors],
        "condition": published.fitted.regression.condition,
        "held_out": selection.held_out_evidence.gain_records(),
        "candidates": [c.record() for c in [*selection.candidates, *selection.by_q[1:]]],
        **({} if band is None else {"band": band.tolist()}),
        "q": published.q,
        "verdict": selection.verdict,
    }


def fit_heads_of_collection(
    collection: RowCollection | Path,
    name: str,
    options: Options | None = None,
    jobs: Jobs = ONE_PROCESS,
    progress: Progress = SILENT,
    rows_per_group: int = ROWS_PER_GROUP,
) -> FitResult:
    """Solves a collection of named heads, and fits each of them.

    Args and errors are those of `fit_collection`; a task of `jobs` is a group of heads, with about
    `rows_per_group` rows, and `progress` advances after each by their number.
    """
    collection = _opened(collection, per_head=True)
    options = resolve_options(collection, options)
    fits, heads, statuses = fit_heads(collection, options, jobs, progress, rows_per_group)
    return _of_heads(collection, name, options, fits, heads, statuses)


def _of_heads(
    collection: RowCollection,
    name: str,
    options: Options,
    fits: Coefficients,
    heads: list[HeadFit],
    statuses: Mapping[str, int],
) -> FitResult:
    """A rule with entries for heads as the result of a fit."""
    quality = {"rows": row_counts(collection, statuses)} | quality_of_heads(heads, options)
    coefficients = with_metadata(fits, name, collection, quality, options.record())
    return FitResult(coefficients, heads=heads)


def fit_solved(collection: RowCollection, rows: Rows, name: str, options: Options) -> FitResult:
    """Fits the polynomial to the optimal betas of solved rows, of each head if they name heads.

    Args:
      collection: whose rows these are.
      rows: all that it has, solved.
      name: of the fit.
      options: with a loss of the optimal beta; not yet those of the collection.
    Raises:
      CalibrateError: an option is out of range.
      QualityError: fewer than 100 rows with a finite optimum, in each head; or too many bad ones.
    Warns:
      UserWarning: a beta at its bound, of one head.
    """
    check_bad_rows(collection.manifest)
    options = resolve_options(collection, options)
    if collection.heads:
        families = fit_each_head(rows, options, collection.misranked_only)
        fits, heads = combine_heads(families, options)
        return _of_heads(collection, name, options, fits, heads, rows.count_by_status())
    result = fit_least_squares(rows, options, collection.misranked_only)
    if result.bound_note:
        warnings.warn(result.bound_note, stacklevel=2)
    counts = {"used": result.powers.n_rows, "at_bound": result.powers.n_at_bound}
    quality = {
        "rows": row_counts(collection, rows.count_by_status()) | counts,
        "residuals": result.residuals(rows),
        "held_out": result.polynomial.held_out_evidence.gain_records(),
        "candidates": [candidate.record() for candidate in result.candidates],
        "verdict": result.verdict,
    }
    coefficients = result.polynomial.coefficients
    fit = with_metadata(coefficients, name, collection, quality, options.record())
    return FitResult(fit, rows)
