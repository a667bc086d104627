"""Scoring a fit and writing the page on it, with progress on stderr."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.cli.evaluate_model_steps import Source, rules_beside, score_model
from calibrate.cli.evaluate_steps import score_rows, score_with_progress
from calibrate.cli.loading import find_fit, find_model_fit, head_of_fit, refuse_per_head
from calibrate.errors import CalibrateError, QualityError
from calibrate.evaluation.baselines import (
    ScoredRule,
    beside,
    by_sharpness,
    fitted_rules,
    fixed_rules,
)
from calibrate.evaluation.comparison import compare
from calibrate.evaluation.score_head import Score
from calibrate.files.atomic_io import check_writable
from calibrate.files.coefficients import Coefficients
from calibrate.files.collection import Collection
from calibrate.fitting.fit_collection import resolve_options
from calibrate.fitting.model_selection import choose
from calibrate.fitting.solved_rows import solve_collection
from calibrate.heads import Head
from calibrate.report.fit_verdict import compare_rivals, verdict, verdict_on_logits
from calibrate.report.head_page import write_head_page
from calibrate.report.logits_page import write_logits_page
from calibrate.report.logits_record import FIRST_FIT
from calibrate.report.run_record import ReportRecord
from calibrate.report.selection import chosen_kind
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from calibrate.examples.sources import Wanted


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
    scores = score_rows(logits, {fit.reference: fit})
    stderr.print(f"writing the report {page}")
    write_logits_page(page, fit, scores)
    return ReportRecord(verdict_on_logits(scores, FIRST_FIT), page)


def report_on_model(
    run_or_fit: str, store: Path | None, page: Path, model: Path | None,
    wanted: "Wanted | None", dtype: str, device: str, constants: Sequence[float],
) -> ReportRecord:  # fmt: skip
    """Scores a fit by a model's answers, on its collection or on examples made for the page.

    Raises:
      CalibrateError: the fit's collection is not in ./runs, and no examples are given.
    """
    from calibrate.report.model_page import page_verdict, write_model_page

    fit, run = find_model_fit(run_or_fit, store)
    if wanted is None and run is None:
        raise CalibrateError(
            f"the collection of {fit.reference} is not in ./runs; give its folder in place of the "
            "fit, or --model FOLDER with examples, such as --task retrieval"
        )
    check_writable(page)
    source = Source(run if wanted is None else None, model, wanted, dtype, device)
    trained = fit.source.get("options", {}).get("trained_up_to") or 0
    rules = rules_beside({fit.reference: fit}, constants, trained if trained > 1 else None)
    scores = score_model(source, rules)
    stderr.print(f"writing the report {page}")
    write_model_page(page, fit, scores)
    return ReportRecord(page_verdict(scores), page)


def write_head_report(
    page: Path, fit: Coefficients, head: Head, scores: list[Score], seed: int, needed: bool = True
) -> ReportRecord:
    """Writes the page on one head's scores.

    If it is not `needed`, a page that cannot be written is no error: the record's path is None.
    """
    stderr.print(f"writing the report {page}")
    comparison = compare(head.name, scores)
    path: Path | None = page
    try:
        write_head_page(page, fit, head, comparison, seed)
    except CalibrateError as error:
        if needed:
            raise
        stderr.print(f"the report is not written: {error}")
        path = None
    return ReportRecord(verdict(comparison, fit.reference), path, compare_rivals(comparison))


def _fitted_rivals(fit: Coefficients, collection: Collection | None) -> dict[str, ScoredRule]:
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
