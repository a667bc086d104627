"""Fitting a collection: a calibrated rule with its evidence, uncertainty and provenance.

`fit_collection` solves the rows and fits them; `fit_solved` fits rows that are solved. Either fits
one head, or each head that the rows name.
"""

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from calibrate.datasets.collection import open_collection
from calibrate.datasets.row_collection import RowCollection
from calibrate.datasets.row_quality import check_bad_rows, count_bad
from calibrate.defaults import MIN_BETA_LIMIT
from calibrate.errors import CalibrateError, QualityError
from calibrate.fitting.fit_result import FitResult, with_metadata
from calibrate.fitting.fit_rule import applied_beta
from calibrate.fitting.groups import ADVICE
from calibrate.fitting.options import Options, resolve_options
from calibrate.fitting.per_head import (
    FamilyFits,
    combine_heads,
    fit_each_head,
    fit_heads,
)
from calibrate.fitting.quality_of_fit import quality_of_fit, row_counts
from calibrate.fitting.quality_of_heads import quality_of_heads
from calibrate.fitting.select import ScoreOnSets, Selection, fit_and_select
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress
from calibrate.rows.heads import Head
from calibrate.rows.score_head import VALIDATION_STREAM, score_head
from calibrate.solver.solved_rows import ROWS_PER_GROUP, Rows, solve_collection

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
            f"{folder} is unfinished; the fit is made of its {n_shards} finished "
            f"shard{'s' * (n_shards != 1)}",
            stacklevel=2,
        )
    return collection


def fit_collection(
    collection: RowCollection | Path,
    name: str,
    options: Options | None = None,
    jobs: Jobs = ONE_PROCESS,
    head: Head | None = None,
    progress: Progress = SILENT,
    rows_per_group: int = ROWS_PER_GROUP,
) -> FitResult:
    """Solves a collection, and fits a rule to its head; if rows name heads, one to each.

    Args:
      collection: or its folder.
      name: of the fit.
      options: of the fit; None are the defaults.
      jobs: where solver, bootstrap and head run; the result does not depend on it. Where rows name
        heads, a task is a group of heads.
      head: of the collection, whose accuracy selects q if the options leave it open; without one
        that can be scored q is 0.
      progress: advances by the heads of a group.
      rows_per_group: of heads, about.
    Raises:
      CalibrateError: the collection is absent, unfinished or damaged, lacks the rows asked for, or
        is of another head; a head is given and rows name theirs; or an option is out of range.
      QualityError: too few rows, too many bad ones, or no significant improvement by any rule.
    Warns:
      UserWarning: a beta at its bound, of one head.
    """
    if not isinstance(collection, RowCollection):
        collection = open_for_fit(Path(collection))
    check_bad_rows(collection.manifest)
    check_no_head(collection, head)
    options = resolve_options(collection, options)
    if collection.heads:
        fits, statuses = fit_heads(collection, options, jobs, progress, rows_per_group)
        return _of_heads(collection, name, options, fits, statuses)
    rows = solve_collection(collection, jobs, options.min_beta)
    result = fit_solved(collection, rows, name, options, jobs, head)
    result.warn_of_bound()
    return result


def check_no_head(collection: RowCollection, head: object) -> None:
    """Raises CalibrateError if a head is given, and the rows name theirs."""
    if collection.heads and head is not None:
        raise CalibrateError(
            f"{collection.folder} is fitted head by head, and has q = 0 or q=; leave out head=",
            parameter=("q", "head"),
        )


def fit_solved(
    collection: RowCollection,
    rows: Rows,
    name: str,
    options: Options,
    jobs: Jobs = ONE_PROCESS,
    head: Head | None = None,
) -> FitResult:
    """Fits solved rows: the rule of their head, or of each head that they name.

    Args:
      collection: whose rows these are.
      rows: all that it has, solved for betas from the options' `min_beta` on, or from a lower one.
      name: of the fit.
      options: those that `resolve_options` gives.
      jobs: where bootstrap and head run.
      head: see `fit_collection`.
    Raises:
      CalibrateError: the collection is of another head.
      QualityError: see `fit_collection`.
    """
    check_bad_rows(collection.manifest)
    if collection.heads:
        fits = fit_each_head(rows, options, collection.misranked_only)
        return _of_heads(collection, name, options, fits, rows.count_by_status())
    score_on_sets = None if head is None else validation_scorer(head, collection, jobs)
    selection = fit_and_select(rows, options, score_on_sets, collection.misranked_only)
    _require_information(collection, rows, selection)
    quality = quality_of_fit(collection, rows, selection, jobs)
    coefficients = selection.published.coefficients
    fit = with_metadata(coefficients, name, collection, quality, options.record())
    return FitResult(fit, rows, selection)


def _of_heads(
    collection: RowCollection,
    name: str,
    options: Options,
    fits: list[FamilyFits],
    statuses: Mapping[str, int],
) -> FitResult:
    """The rules of the heads that gain, in one file; QualityError if there is no row."""
    if not fits:
        raise QualityError(f"{collection.folder} has no rows; {ADVICE}")
    coefficients, heads = combine_heads(fits, options)
    quality = {"rows": row_counts(collection, statuses)} | quality_of_heads(heads, options)
    fit = with_metadata(coefficients, name, collection, quality, options.record())
    return FitResult(fit, heads=heads)


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


def _require_information(collection: RowCollection, rows: Rows, selection: Selection) -> None:
    """Raises QualityError if beta is at its lower bound, 1/64, and argmax is at chance.

    That is decided by all good rows, whichever are kept. Ties with a target count as wrong, as
    constant logits would be right otherwise.
    """
    fit = selection.published.coefficients
    at_lower = fit.rule.min_beta == MIN_BETA_LIMIT and bool(applied_beta(fit, rows).mean() < 1)
    if not (at_lower and selection.bound_note):
        return
    sizes = [x for x in collection.manifest["sizes"] if (rows.size == x["size"]).any()]
    good = np.array([size["rows"] - count_bad(size) for size in sizes])
    n, chances = good.sum(), [np.mean(1 / rows.items[rows.size == x["size"]]) for x in sizes]
    accuracy = 1 - sum(size["misranked"] + size["ties"] for size in sizes) / n
    chance = float(good @ chances / n)
    if accuracy <= chance + N_ERRORS * np.sqrt(chance * (1 - chance) / n):
        raise QualityError(
            "the logits carry no information about the targets (argmax is right in "
            f"{accuracy:.1%} of the rows, a guess in {chance:.1%}); check that target holds the "
            "positions that should win"
        )
