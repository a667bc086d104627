"""Scores of fits on inputs of a head or on logits, and the report on a fit."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from calibrate.cli.options import Draws
from calibrate.errors import CalibrateError
from calibrate.evidence.baselines import baselines_beside
from calibrate.fitting.fit_rule import fit_best_constant
from calibrate.parallel import ONE_PROCESS, Jobs
from calibrate.report.blocks import Result
from calibrate.report.collection_record import Solved, SolvedHead, SolvedOne
from calibrate.report.fit_record import FitRecord, run_result
from calibrate.report.page import write_fit_page
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.terminal import Steps, stderr
from calibrate.rows.collection import RowCollection, open_collection
from calibrate.rows.heads import Head
from calibrate.rows.logits_files import Arrays
from calibrate.rows.score import score_head, score_logits
from calibrate.rows.solve import SolvedInputs, solve_collection
from calibrate.store.fit import Fit

PICTURED_HEADS = 4  # whose optimal temperatures a page shows


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


def score_fit_of_head(head: Head, draws: Draws, fit: Fit, constant: float | None) -> ScoresRecord:
    """Scores the fit of a head on new inputs, beside the baselines that people compare it with.

    Args:
      head: the head of the fit.
      draws: other inputs than those of the fit.
      fit: with one entry.
      constant: the beta of highest likelihood for the inputs of the fit; None leaves it out.
    """
    return score_rules_on_head(head, draws, baselines_beside(fit, constant), [fit.reference])


def score_fits_on_logits(arrays: Arrays, fits: Mapping[str, Fit]) -> ScoresRecord:
    """Scores fits on logits."""
    with Steps() as steps:
        evidence = score_logits(arrays, fits, steps)
    return ScoresRecord(evidence, tuple(fits))


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
    solved: Solved
    if record.rows is None:
        constant, solved = None, solve_heads_with_largest_gains(fit, collection)
    else:
        constant = best_constant(record.rows)
        solved = SolvedHead(collection, record.rows, constant)
    scores = None if head is None else score_fit_of_head(head, draws, fit, constant)
    page = fit.path.with_suffix(".html")
    try:
        write_report(page, fit, scores, solved)
    except CalibrateError as error:
        stderr.print(f"the report is not written: {error}")
        return run_result(record, scores, None)
    return run_result(record, scores, page)


def solve_inputs_of(fit: Fit, run: Path | None) -> Solved:
    """The solved inputs of a fit, from the folder of its collection; None without one.

    Raises:
      CalibrateError: the fit was fitted to another collection.
    """
    if run is None or fit.of_whole_model:
        return None
    collection = open_collection(run, RowCollection)
    if collection.digest != fit.source.get("collection"):
        raise CalibrateError(f"{fit.reference} was not fitted to {run}; give its own collection")
    if collection.heads:
        return solve_heads_with_largest_gains(fit, collection)
    rows = solve_collection(collection)
    return SolvedHead(collection, rows, best_constant(rows))


def solve_heads_with_largest_gains(
    fit: Fit, collection: RowCollection, most: int = PICTURED_HEADS
) -> list[SolvedOne]:
    """The solved inputs of the heads whose rules have the largest held-out gains.

    Heads without misranked inputs are left out.
    """
    gains = {
        (record.get("layer"), record.get("head")): record["gain"]
        for record in fit.evidence.get("heads", [])
        if "gain" in record and fit.entry_of(record.get("layer"), record.get("head"))
    }
    best = sorted(gains, key=lambda head: -gains[head])[:most]
    if not best:
        return []
    # SolvedInputs have -1 for an unknown layer or head.
    numbers = {
        (layer, head): (-1 if layer is None else layer, -1 if head is None else head)
        for layer, head in best
    }
    rows = solve_collection(collection, heads=list(numbers.values()))
    solved = []
    for head in best:
        own = rows.take(rows.is_of(*numbers[head]))
        if own.has_finite_optimum().any():
            solved.append(SolvedOne(*head, gains[head], own, best_constant(own)))
    return solved


def best_constant(rows: SolvedInputs) -> float | None:
    """The constant of highest likelihood; None for misranked inputs alone, where it is biased."""
    return None if rows.misranked[rows.weight > 0].all() else fit_best_constant(rows)


def write_report(page: Path, fit: Fit, scores: ScoresRecord | None, solved: Solved) -> None:
    """Writes the page on a fit, with a line on stderr."""
    stderr.print(f"writing the report {page}")
    write_fit_page(page, fit, scores, solved)
