"""Scores of fits on inputs of a head or on logits, and the report on a fit."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from calibrate.cli.options import Draws
from calibrate.errors import CalibrateError
from calibrate.evidence.baselines import baselines_beside
from calibrate.fitting.fit_rule import fit_best_constant
from calibrate.parallel import ONE_PROCESS, Jobs
from calibrate.report.blocks import Result
from calibrate.report.fit_record import FitRecord, run_result
from calibrate.report.page import SolvedHead, write_fit_page
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.terminal import Steps, stderr
from calibrate.rows.collection import RowCollection, open_collection
from calibrate.rows.heads import Head
from calibrate.rows.logits_files import Arrays
from calibrate.rows.score import score_head, score_logits
from calibrate.rows.solve import SolvedInputs, solve_collection
from calibrate.store.fit import Fit


def score_rules_on_head(
    head: Head,
    draws: Draws,
    rules: Mapping[str, Fit],
    fits: Sequence[str],
    jobs: Jobs = ONE_PROCESS,
) -> ScoresRecord:
    """Scores rules on new inputs of a head; those in `fits` get a verdict."""
    with Steps() as steps:
        evidence = score_head(head, *draws, rules, jobs=jobs, progress=steps)
    return ScoresRecord(evidence, tuple(fits))


def score_fits_on_logits(arrays: Arrays, fits: Mapping[str, Fit]) -> ScoresRecord:
    """Scores fits on logits."""
    with Steps() as steps:
        evidence = score_logits(arrays, fits, steps)
    return ScoresRecord(evidence, tuple(fits))


def score_fit_of_head(
    head: Head, draws: Draws, fit: Fit, solved: SolvedHead | None
) -> ScoresRecord:
    """Scores the fit of a head on new inputs, beside the baselines that people compare it with.

    Args:
      head: the head of the fit.
      draws: other inputs than those of the fit.
      fit: with one entry.
      solved: the inputs of the fit, which have the best constant; None if they are unknown.
    """
    constant = solved.constant if solved else None
    return score_rules_on_head(head, draws, baselines_beside(fit, constant), [fit.reference])


def score_and_report(record: FitRecord, head: Head | None, draws: Draws) -> Result:
    """Scores a saved fit, and writes the report beside its file.

    Args:
      record: of the fit.
      head: the head of the fit, scored on new inputs; None for logits, whose fit has held-out
        scores of its own.
      draws: the new inputs.
    """
    fit, collection = record.fit, record.collection
    assert fit.path is not None
    assert collection is not None
    solved = solve_inputs_of(collection, record.rows)
    scores = None if head is None else score_fit_of_head(head, draws, fit, solved)
    page = fit.path.with_suffix(".html")
    stderr.print(f"writing the report {page}")
    try:
        write_fit_page(page, fit, scores, solved)
    except CalibrateError as error:
        stderr.print(f"the report is not written: {error}")
        return run_result(record, scores, None)
    return run_result(record, scores, page)


def open_inputs_of(fit: Fit, run: Path) -> SolvedHead | None:
    """The solved inputs of a fit of one head, from the folder of its collection.

    Raises:
      CalibrateError: the fit was fitted to another collection.
    """
    collection = open_collection(run, RowCollection)
    if collection.digest != fit.source.get("collection"):
        raise CalibrateError(f"{fit.reference} was not fitted to {run}; give its own collection")
    return solve_inputs_of(collection)


def solve_inputs_of(
    collection: RowCollection, rows: SolvedInputs | None = None
) -> SolvedHead | None:
    """The solved inputs of a head, with their best constant; None for inputs of several heads.

    Args:
      collection: of the inputs.
      rows: the solved inputs, if they are known.
    """
    if collection.heads:
        return None
    rows = solve_collection(collection) if rows is None else rows
    return SolvedHead(rows, best_constant(rows))


def best_constant(rows: SolvedInputs) -> float | None:
    """The constant of highest likelihood; None for misranked inputs alone, where it is biased."""
    return None if rows.misranked[rows.weight > 0].all() else fit_best_constant(rows)
