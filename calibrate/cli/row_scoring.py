"""Scores of heads and logits, and the page on a fit and its scores."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from calibrate.cli.loading import collection_of
from calibrate.cli.options import Draws
from calibrate.cli.progress_bar import Steps
from calibrate.datasets.collection import open_collection
from calibrate.datasets.logits_files import Arrays
from calibrate.datasets.row_collection import RowCollection
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.baselines import fixed_rules
from calibrate.evidence.evidence import OWN, OptionalHeadId
from calibrate.evidence.metrics import LOG_P
from calibrate.fitting.fit_collection import fit_solved
from calibrate.fitting.fitted_baselines import fitted_baselines
from calibrate.fitting.options import Options, resolve_options
from calibrate.fitting.select import Selection, fit_and_select
from calibrate.parallel import ONE_PROCESS, Jobs
from calibrate.report.blocks import Result
from calibrate.report.fit_record import FitRecord
from calibrate.report.labels import beside
from calibrate.report.optimal_temperatures import Solved, SolvedOne
from calibrate.report.page import report_result, run_result, write_fit_page
from calibrate.report.plot_polynomial import with_finite_optimum
from calibrate.report.run_record import SolvedHead, rows_result
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.streams import stderr
from calibrate.rows import score_head as heads
from calibrate.rows import score_logits as logits
from calibrate.rows.heads import Head
from calibrate.solver.solved_rows import Rows, solve_collection
from calibrate.store.coefficients import Coefficients

Rules = Mapping[str, Coefficients]
N_HEADS = 4  # of which a page shows the optimal temperatures


def score_head(
    head: Head, draws: Draws, rules: Rules, fits: Sequence[str], jobs: Jobs = ONE_PROCESS
) -> ScoresRecord:
    """Scores rules, some of which are fits with a verdict, on fresh sets of a head."""
    with Steps() as steps:
        evidence = heads.score_head(head, *draws, rules, jobs=jobs, progress=steps)
    return ScoresRecord(evidence, tuple(fits))


def score_own(head: Head, draws: Draws, fit: Coefficients, baselines: Rules) -> ScoresRecord:
    """Scores the fit of a head, OWN, on fresh sets, beside rules fitted to the same rows."""
    scores = score_head(head, draws, beside(fit, {**fixed_rules(), **baselines}), [OWN])
    return replace(scores, own=fit.reference)


def score_logits(arrays: Arrays, fits: Rules) -> ScoresRecord:
    """Scores fits on logits."""
    with Steps() as steps:
        evidence = logits.score_logits(arrays, fits, steps)
    return ScoresRecord(evidence, tuple(fits))


def baselines_of(solved: SolvedHead | None, selection: Selection | None = None) -> Rules:
    """Rules fitted to the rows of a head; none without rows, or if no rule gains on them.

    Args:
      solved: the rows.
      selection: of a kind of rule for them; if None, or by least squares, another is made by
        likelihood, with the collection's options.
    """
    if solved is None:
        return {}
    try:
        if selection is None or not selection.is_of_likelihood:
            selection = fit_and_select(solved.rows, resolve_options(solved.collection))
        return fitted_baselines(solved.rows, selection, solved.polynomial)
    except QualityError:
        return {}


def end_run(record: FitRecord, scores: ScoresRecord, solved: SolvedHead | None = None) -> Result:
    """A fit, its scores, and the report beside its file; of rows also what they were solved for."""
    fit = record.coefficients
    assert fit.path is not None
    page = fit.path.with_suffix(".html")
    drawn = solved or solved_heads(fit, None, scores)
    written = write_report(page, fit, scores, drawn, needed=False)
    if solved is None:
        return run_result(record, scores, written)
    return rows_result(record, scores, solved, written)


def solved_head(collection: RowCollection, rows: Rows, name: str) -> SolvedHead:
    """The rows of a head with their polynomial by the paper's procedure, which is not published."""
    options = resolve_options(collection, Options.of_the_paper())
    try:
        fit = fit_solved(collection, rows, name, options)
    except QualityError as failure:
        return SolvedHead(collection, rows, None, str(failure))
    return SolvedHead(collection, rows, fit.coefficients)


def solved_of(fit: Coefficients, run: Path | None) -> SolvedHead | None:
    """The solved rows of the collection of a fit; None without one, or where rows name heads.

    Raises:
      CalibrateError: the fit was fitted to another collection.
    """
    collection = _rows_of(fit, run)
    if collection is None or collection.heads:
        return None
    return solved_head(collection, solve_collection(collection), f"{fit.name}-polynomial")


def solved_heads(
    fit: Coefficients, run: Path | None, scores: ScoresRecord, most: int = N_HEADS
) -> list[SolvedOne]:
    """The solved rows of the heads whose rules gain most in the scores; none without rows of heads.

    Args:
      fit: whose scores come first.
      run: the folder of its collection; None looks for it in ./runs.
      scores: by head.
      most: heads at most.
    Raises:
      CalibrateError: the fit was fitted to another collection.
    """
    collection = None if fit.of_whole_model else _rows_of(fit, run or collection_of(fit))
    if collection is None:
        return []
    rule, solved = scores.fits[0], []
    ranked = [
        (head, part)
        for head, part in scores.ranked_heads(rule)
        if scores.evidence.names(rule, head) and _with_unknown(head) in collection.heads
    ]
    if not ranked:
        return []
    rows = solve_collection(collection, heads=[_with_unknown(head) for head, _ in ranked[:most]])
    for head, part in ranked[:most]:
        own = rows.take(rows.is_of(*_with_unknown(head)))
        if with_finite_optimum(own).any():
            gain = float(part.gain(rule, LOG_P).mean)
            solved.append(SolvedOne(*head, gain, own, scores.evidence.is_held_out(rule)))
    return solved


def _with_unknown(head: OptionalHeadId) -> tuple[int, int]:
    """A head as rows name it: -1 where a number is unknown."""
    layer, index = (-1 if number is None else number for number in head)
    return layer, index


def _rows_of(fit: Coefficients, run: Path | None) -> RowCollection | None:
    """The collection of rows that a fit was fitted to.

    Raises:
      CalibrateError: the fit was fitted to another collection.
    """
    if run is None or fit.of_whole_model:
        return None
    collection = open_collection(run, RowCollection)
    if collection.digest != fit.source.get("collection"):
        raise CalibrateError(f"{fit.reference} was not fitted to {run}; give its own collection")
    return collection


def write_report(
    page: Path,
    fit: Coefficients,
    scores: ScoresRecord,
    solved: Solved = None,
    needed: bool = True,
) -> Result:
    """Writes the page on a fit; the path is None if it cannot be written and is not `needed`."""
    stderr.print(f"writing the report {page}")
    try:
        write_fit_page(page, fit, scores, solved)
    except CalibrateError as error:
        if needed:
            raise
        stderr.print(f"the report is not written: {error}")
        return report_result(scores, None)
    return report_result(scores, page)
