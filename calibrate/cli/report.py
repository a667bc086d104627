"""`calibrate report`: one self-contained page on a fit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Option

from calibrate.cli.evaluate import score_head, score_logits
from calibrate.cli.loading import find_fit, load_head_of, read_logits, refuse_per_head
from calibrate.cli.model_collect import Constants, Examples, Model, open_or_make, parse_betas
from calibrate.cli.options import HeadOrLogits, ReadStore, Sizes, check_page
from calibrate.cli.request import Request
from calibrate.errors import CalibrateError, QualityError
from calibrate.files.atomic_io import check_writable
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from calibrate.files.coefficients import Coefficients
    from calibrate.report.model_scores_record import ModelScoresRecord
    from calibrate.report.run_record import ReportRecord
    from calibrate.rows.baselines import ScoredRule
    from calibrate.rows.heads import Head
    from calibrate.rows.score_head import Score
    from calibrate.rows.score_logits import LogitScores


@dataclass(frozen=True)
class ReportRequest(Request, Examples, HeadOrLogits):
    """What `calibrate report` is asked for."""

    fit: Annotated[str, Argument(help="NAME, NAME@3, a file, or a collection.")]
    out: Annotated[Path, Option(callback=check_page, help="File of the page, .html.")]
    store: ReadStore = None
    model: Model = None
    constants: Constants = ""
    _: KW_ONLY
    sizes: Sizes = "16..4096"
    sets: Annotated[int, Option(min=2, help="Held-out sets of each size.")] = 4096

    def __post_init__(self) -> None:
        """Checks what goes together."""
        super().__post_init__()
        if self.named and self.model is None:
            raise BadParameter("examples need the model: give --model FOLDER")
        parse_betas(self.constants)


def report(request: ReportRequest) -> "ReportRecord":
    """Write one self-contained page on a fit.

    It has the verdict, scores, figures and provenance. If the fit's collection is in ./runs, the
    page compares rules fitted to the same rows. A fit with an entry per head, or one made from
    logits on disk, is scored on the rows of --logits; use rows that it was not fitted to.

    A fit made through a model is scored by the model's answers: on the examples of its collection
    that it has not seen, or on those that --model and the options of `model collect` make.

    Example: calibrate report max-retrieval --out report.html
    """
    found = find_fit(request.fit, request.store)
    if request.logits is not None:
        check_writable(request.out)
        scores = score_logits(read_logits(request.logits), {found.fit.reference: found.fit})
        return write_logits_report(request.out, found.fit, scores)
    if request.model is not None or found.fit.of_whole_model:
        return _report_on_model(request, found.fit, found.run)
    return _report_on_head(request, found.fit, found.run)


def _report_on_head(
    request: ReportRequest, fit: "Coefficients", run: Path | None
) -> "ReportRecord":
    """Scores a fit on its head, beside rules that are fitted to the same collection."""
    from calibrate.rows.baselines import beside, fixed_rules

    refuse_per_head(fit)
    head = load_head_of(fit, request.head)
    check_writable(request.out)
    rules = beside(fit, {**fixed_rules(), **_fitted_rivals(fit, run)})
    scores = score_head(head, request, rules)
    return write_head_report(request.out, fit, head, scores, request.seed)


def _report_on_model(
    request: ReportRequest, fit: "Coefficients", run: Path | None
) -> "ReportRecord":
    """Scores a fit by a model's answers, on its collection or on examples made for the page.

    Raises:
      CalibrateError: the fit's collection is not in ./runs, and no examples are given.
    """
    from calibrate.cli.model_evaluate import score_fit

    if run is None and not request.named:
        raise CalibrateError(
            f"the collection of {fit.reference} is not in ./runs; give its folder in place of the "
            "fit, or --model FOLDER with examples, such as --task retrieval"
        )
    check_writable(request.out)
    job, collection = open_or_make(request.model, request, None if request.named else run)
    scores = score_fit(fit, job, collection, parse_betas(request.constants))
    return write_model_report(request.out, fit, scores)


def _fitted_rivals(fit: "Coefficients", run: Path | None) -> "Mapping[str, ScoredRule]":
    """Rules fitted to a fit's collection; none without a collection or with too few rows."""
    from calibrate.files.collection import open_collection
    from calibrate.files.rows import RowCollection
    from calibrate.report.selection import chosen_kind
    from calibrate.rows.baselines import by_sharpness, fitted_rules
    from calibrate.rows.fit_collection import resolve_options
    from calibrate.rows.model_selection import choose
    from calibrate.rows.solved_rows import solve_collection

    if run is None:
        return {}
    collection = open_collection(run, RowCollection)
    try:
        rows = solve_collection(collection)
        choice = choose(rows, resolve_options(collection))
        fitted = fitted_rules(rows, choice)
    except QualityError as failure:
        stderr.print(f"rules fitted to {run} are not compared: {failure}")
        return {}
    same_kind = choice.chosen.kind == chosen_kind(fit) and choice.chosen.fit.rule == fit.rule
    return (by_sharpness(choice) if same_kind else {}) | fitted


def write_head_report(
    page: Path,
    fit: "Coefficients",
    head: "Head",
    scores: "Sequence[Score]",
    seed: int,
    needed: bool = True,
) -> "ReportRecord":
    """Writes the page on one head's scores; see `_write`."""
    from calibrate.report.fit_verdict import compare_rivals, describe_fit, verdict
    from calibrate.report.head_page import write_head_page
    from calibrate.report.run_record import ReportRecord
    from calibrate.rows.comparison import compare

    comparison = compare(head.name, scores)
    path = _write(page, needed, lambda: write_head_page(page, fit, head, comparison, seed))
    rivals = f"{compare_rivals(comparison)} {describe_fit(fit, comparison)}"
    return ReportRecord(verdict(comparison, fit), path, rivals)


def write_logits_report(
    page: Path, fit: "Coefficients", scores: "LogitScores", needed: bool = True
) -> "ReportRecord":
    """Writes the page on scores of logits; see `_write`."""
    from calibrate.report.fit_verdict import verdict_on_logits
    from calibrate.report.logits_page import write_logits_page
    from calibrate.report.logits_record import FIRST_FIT
    from calibrate.report.run_record import ReportRecord

    path = _write(page, needed, lambda: write_logits_page(page, fit, scores))
    return ReportRecord(verdict_on_logits(scores, FIRST_FIT), path)


def write_model_report(
    page: Path, fit: "Coefficients", scores: "ModelScoresRecord", needed: bool = True
) -> "ReportRecord":
    """Writes the page on scores of a model; see `_write`."""
    from calibrate.report.model_page import page_verdict, write_model_page
    from calibrate.report.run_record import ReportRecord

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
