"""Scores of heads and logits, and the page on a fit and its scores."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from calibrate.cli.options import Draws
from calibrate.cli.progress_bar import Steps
from calibrate.datasets.collection import open_collection
from calibrate.datasets.logits_files import Arrays
from calibrate.datasets.row_collection import RowCollection
from calibrate.errors import CalibrateError
from calibrate.evidence.baselines import baselines_beside
from calibrate.fitting.fit_rule import fit_best_constant
from calibrate.parallel import ONE_PROCESS, Jobs
from calibrate.report.blocks import Result
from calibrate.report.fit_record import FitRecord
from calibrate.report.optimal_temperatures import Solved, SolvedOne
from calibrate.report.page import write_fit_page
from calibrate.report.plot_polynomial import with_finite_optimum
from calibrate.report.run_record import SolvedHead, run_result
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.streams import stderr
from calibrate.rows import score_head as heads
from calibrate.rows import score_logits as logits
from calibrate.rows.heads import Head
from calibrate.solver.solved_rows import solve_collection
from calibrate.store.fit import Fit

Rules = Mapping[str, Fit]
N_HEADS = 4  # of which a page shows the optimal temperatures


def score_head(
    head: Head, draws: Draws, rules: Rules, fits: Sequence[str], jobs: Jobs = ONE_PROCESS
) -> ScoresRecord:
    """Scores rules, some of which are fits with a verdict, on new inputs of a head."""
    with Steps() as steps:
        evidence = heads.score_head(head, *draws, rules, jobs=jobs, progress=steps)
    return ScoresRecord(evidence, tuple(fits))


def score_fit(head: Head, draws: Draws, fit: Fit, solved: SolvedHead | None) -> ScoresRecord:
    """Scores the fit of a head on new inputs, beside the rules that people compare it with.

    Args:
      head: that the fit was made for.
      draws: inputs, which are others than those that it was fitted to.
      fit: of one entry.
      solved: the inputs that it was fitted to, for the best constant; None leaves that out.
    """
    constant = None if solved is None else fit_constant(solved)
    return score_head(head, draws, baselines_beside(fit, constant), [fit.reference])


def fit_constant(solved: SolvedHead) -> float | None:
    """The constant of highest likelihood; None of misranked inputs alone, where it is biased."""
    return None if solved.collection.misranked_only else fit_best_constant(solved.rows)


def score_logits(arrays: Arrays, fits: Rules) -> ScoresRecord:
    """Scores fits on logits."""
    with Steps() as steps:
        evidence = logits.score_logits(arrays, fits, steps)
    return ScoresRecord(evidence, tuple(fits))


def end_run(record: FitRecord, head: Head | None, draws: Draws) -> Result:
    """Scores a saved fit, and writes the report beside its file.

    Args:
      record: of the fit.
      head: that it was made for, scored on new inputs; None of logits, whose fit has its own
        held-out scores.
      draws: the new inputs.
    """
    fit, collection = record.fit, record.collection
    assert fit.path is not None
    assert collection is not None
    solved = None if record.rows is None else SolvedHead(collection, record.rows)
    scores = None if head is None else score_fit(head, draws, fit, solved)
    page = fit.path.with_suffix(".html")
    try:
        write_report(page, fit, scores, solved or solve_best(fit, collection))
    except CalibrateError as error:
        stderr.print(f"the report is not written: {error}")
        return run_result(record, scores, None)
    return run_result(record, scores, page)


def solved_of(fit: Fit, run: Path | None) -> Solved:
    """The solved inputs of the collection of a fit, in a folder; None without one.

    Raises:
      CalibrateError: the fit was fitted to another collection.
    """
    if run is None or fit.of_whole_model:
        return None
    collection = open_collection(run, RowCollection)
    if collection.digest != fit.source.get("collection"):
        raise CalibrateError(f"{fit.reference} was not fitted to {run}; give its own collection")
    if collection.heads:
        return solve_best(fit, collection)
    return SolvedHead(collection, solve_collection(collection))


def solve_best(fit: Fit, collection: RowCollection, most: int = N_HEADS) -> list[SolvedOne]:
    """The solved inputs of the heads whose rules have the largest held-out gains."""
    gains = {
        (record.get("layer"), record.get("head")): record["gain"]
        for record in fit.evidence.get("heads", [])
        if "gain" in record and fit.entry_of(record.get("layer"), record.get("head"))
    }
    best = sorted(gains, key=lambda head: -gains[head])[:most]
    if not best:
        return []
    numbers = {head: _with_unknown(*head) for head in best}
    rows = solve_collection(collection, heads=list(numbers.values()))
    own = {head: rows.take(rows.is_of(*numbers[head])) for head in best}
    return [
        SolvedOne(*head, gains[head], own[head])
        for head in best
        if with_finite_optimum(own[head]).any()
    ]


def _with_unknown(layer: int | None, head: int | None) -> tuple[int, int]:
    """A head as rows name it: -1 where a number is unknown."""
    return -1 if layer is None else layer, -1 if head is None else head


def write_report(page: Path, fit: Fit, scores: ScoresRecord | None, solved: Solved = None) -> None:
    """Writes the page on a fit, with a line on stderr."""
    stderr.print(f"writing the report {page}")
    write_fit_page(page, fit, scores, solved)
