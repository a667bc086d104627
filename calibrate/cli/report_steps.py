"""Scoring a fit and writing the page on it, with progress on stderr."""

from collections.abc import Sequence
from pathlib import Path

from calibrate.cli.evaluate_model_steps import rules_beside, score_model
from calibrate.cli.evaluate_steps import score_rows, score_with_progress
from calibrate.cli.loading import find_fit, find_model_fit, head_of_fit, refuse_per_head
from calibrate.cli.model_options import Source
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.baselines import beside, fixed_rules
from calibrate.evidence.evidence import OWN
from calibrate.evidence.verdict import chosen_kind
from calibrate.files.atomic_io import check_writable
from calibrate.files.coefficients import Coefficients
from calibrate.files.rows import RowCollection
from calibrate.report.fit_page import write_fit_page
from calibrate.report.run_record import ReportRecord
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.streams import stderr
from calibrate.rows.choose_rule import choose
from calibrate.rows.fit_collection import resolve_options
from calibrate.rows.rivals import by_sharpness, fitted_rules
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
    return write_report(page, fit, ScoresRecord(scores, (OWN,), fit.reference))


def report_on_logits(run_or_fit: str, store: Path | None, page: Path, logits: Path) -> ReportRecord:
    """Scores a fit on logits on disk."""
    fit, _ = find_fit(run_or_fit, store)
    check_writable(page)
    scores = score_rows(logits, {fit.reference: fit})
    return write_report(page, fit, ScoresRecord(scores, (fit.reference,)))


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
    return write_report(page, fit, score_model_fit(fit, source, constants))


def score_model_fit(
    fit: Coefficients, source: Source, constants: Sequence[float] = ()
) -> ScoresRecord:
    """Scores a fit by a model's answers, beside constants and log n."""
    trained = fit.source.get("options", {}).get("trained_up_to") or 0
    rules = rules_beside({fit.reference: fit}, constants, trained if trained > 1 else None)
    return score_model(source, rules)


def write_report(
    page: Path, fit: Coefficients, scores: ScoresRecord, needed: bool = True
) -> ReportRecord:
    """Writes the page on a fit; the path is None if it cannot be written and is not `needed`."""
    stderr.print(f"writing the report {page}")
    verdict, path = " ".join(scores.verdicts().values()), None
    try:
        write_fit_page(page, fit, scores)
        path = page
    except CalibrateError as error:
        if needed:
            raise
        stderr.print(f"the report is not written: {error}")
    return ReportRecord(verdict, path)


def _fitted_rivals(fit: Coefficients, collection: RowCollection | None) -> dict[str, Coefficients]:
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
