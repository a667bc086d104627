"""Scoring a fit and writing the page on it, with progress on stderr."""

from collections.abc import Callable, Sequence
from pathlib import Path

from calibrate.cli.evaluate_model_steps import rules_beside, score_model
from calibrate.cli.evaluate_steps import score_rows, score_with_progress
from calibrate.cli.loading import find_fit, find_model_fit, head_of_fit, refuse_per_head
from calibrate.cli.model_options import Source
from calibrate.errors import CalibrateError, QualityError
from calibrate.files.atomic_io import check_writable
from calibrate.files.coefficients import Coefficients
from calibrate.files.rows import RowCollection
from calibrate.report.fit_verdict import compare_rivals, describe_fit, verdict, verdict_on_logits
from calibrate.report.head_page import write_head_page
from calibrate.report.logits_page import write_logits_page
from calibrate.report.logits_record import FIRST_FIT
from calibrate.report.model_scores_record import ModelScoresRecord
from calibrate.report.run_record import ReportRecord
from calibrate.report.selection import chosen_kind
from calibrate.report.streams import stderr
from calibrate.rows.baselines import (
    ScoredRule,
    beside,
    by_sharpness,
    fitted_rules,
    fixed_rules,
)
from calibrate.rows.comparison import compare
from calibrate.rows.fit_collection import resolve_options
from calibrate.rows.heads import Head
from calibrate.rows.model_selection import choose
from calibrate.rows.score_head import Score
from calibrate.rows.score_logits import LogitScores
from calibrate.rows.solved_rows import solve_collection


def report_on_head(
    run_or_fit: str,
    store: Path | None,
    page: Path,
    reference: str | None,
    *,
    sizes: list[int],
    sets: int,
    seed: int,
) -> ReportRecord:
    """Scores a fit on its head, beside rules that are fitted to the same collection."""
    fit, collection = find_fit(run_or_fit, store)
    refuse_per_head(fit)
    head = head_of_fit(fit, reference)
    check_writable(page)
    rules = beside(fit, {**fixed_rules(), **_fitted_rivals(fit, collection)})
    scores = score_with_progress(head, sizes, sets, seed, rules)
    return write_head_report(page, fit, head, scores, seed)


def report_on_logits(run_or_fit: str, store: Path | None, page: Path, logits: Path) -> ReportRecord:
    """Scores a fit on logits on disk."""
    fit, _ = find_fit(run_or_fit, store)
    check_writable(page)
    return write_logits_report(page, fit, score_rows(logits, {fit.reference: fit}))


def report_on_model(
    run_or_fit: str, store: Path | None, page: Path, source: Source, constants: Sequence[float]
) -> ReportRecord:
    """Scores a fit by a model's answers, on its collection or on examples made for the page.

    Raises:
      CalibrateError: the fit's collection is not in ./runs, and no examples are given.
    """
    fit, run = find_model_fit(run_or_fit, store)
    if source.wanted is None and run is None:
        raise CalibrateError(
            f"the collection of {fit.reference} is not in ./runs; give its folder in place of the "
            "fit, or --model FOLDER with examples, such as --task retrieval"
        )
    check_writable(page)
    source = source._replace(run=run if source.wanted is None else None)
    return write_model_report(page, fit, score_model_fit(fit, source, constants))


def score_model_fit(
    fit: Coefficients, source: Source, constants: Sequence[float] = ()
) -> ModelScoresRecord:
    """Scores a fit by a model's answers, beside constants and log n."""
    trained = fit.source.get("options", {}).get("trained_up_to") or 0
    rules = rules_beside({fit.reference: fit}, constants, trained if trained > 1 else None)
    return score_model(source, rules)


def write_head_report(
    page: Path, fit: Coefficients, head: Head, scores: list[Score], seed: int, needed: bool = True
) -> ReportRecord:
    """Writes the page on one head's scores; see `_write`."""
    comparison = compare(head.name, scores)
    path = _write(page, needed, lambda: write_head_page(page, fit, head, comparison, seed))
    rivals = f"{compare_rivals(comparison)} {describe_fit(fit, comparison)}"
    return ReportRecord(verdict(comparison, fit), path, rivals)


def write_logits_report(
    page: Path, fit: Coefficients, scores: LogitScores, needed: bool = True
) -> ReportRecord:
    """Writes the page on scores of logits; see `_write`."""
    path = _write(page, needed, lambda: write_logits_page(page, fit, scores))
    return ReportRecord(verdict_on_logits(scores, FIRST_FIT), path)


def write_model_report(
    page: Path, fit: Coefficients, scores: ModelScoresRecord, needed: bool = True
) -> ReportRecord:
    """Writes the page on scores of a model; see `_write`."""
    from calibrate.report.model_page import page_verdict, write_model_page

    path = _write(page, needed, lambda: write_model_page(page, fit, scores))
    return ReportRecord(page_verdict(scores), path)


def _write(page: Path, needed: bool, write: Callable[[], None]) -> Path | None:
    """The path of the page; None if it cannot be written and is not `needed`."""
    stderr.print(f"writing the report {page}")
    try:
        write()
    except CalibrateError as error:
        if needed:
            raise
        stderr.print(f"the report is not written: {error}")
        return None
    return page


def _fitted_rivals(fit: Coefficients, collection: RowCollection | None) -> dict[str, ScoredRule]:
    """Rules fitted to a fit's collection; none without a collection or with too few rows."""
    if collection is None:
        return {}
    try:
        rows = solve_collection(collection)
        choice = choose(rows, resolve_options(collection))
        fitted = fitted_rules(rows, choice)
    except QualityError as failure:
        stderr.print(f"rules fitted to {collection.folder} are not compared: {failure}")
        return {}
    same_kind = choice.chosen.kind == chosen_kind(fit) and choice.chosen.fit.rule == fit.rule
    return (by_sharpness(choice) if same_kind else {}) | fitted
