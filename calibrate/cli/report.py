"""`calibrate report`: one self-contained page on a fit."""

from collections.abc import Mapping
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
from calibrate.report.blocks import Result
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from calibrate.files.coefficients import Coefficients
    from calibrate.report.scores_record import ScoresRecord


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


def report(request: ReportRequest) -> Result:
    """Write one self-contained page on a fit.

    It has the verdict, scores, figures and provenance. If the fit's collection is in ./runs, the
    page compares rules fitted to the same rows. A fit with an entry per head, or one made from
    logits on disk, is scored on the rows of --logits; use rows that it was not fitted to.

    A fit made through a model is scored by the model's answers: on the examples of its collection
    that it has not seen, or on those that --model and the options of `model collect` make.

    Example: calibrate report max-retrieval --out report.html
    """
    from calibrate.report.scores_record import ScoresRecord

    found = find_fit(request.fit, request.store)
    if request.logits is not None:
        check_writable(request.out)
        scores = score_logits(read_logits(request.logits), {found.fit.reference: found.fit})
        return write_report(request.out, found.fit, ScoresRecord(scores, (found.fit.reference,)))
    if request.model is not None or found.fit.of_whole_model:
        return _report_on_model(request, found.fit, found.run)
    return _report_on_head(request, found.fit, found.run)


def _report_on_head(request: ReportRequest, fit: "Coefficients", run: Path | None) -> Result:
    """Scores a fit on its head, beside rules that are fitted to the same collection."""
    from calibrate.evidence.baselines import beside, fixed_rules
    from calibrate.evidence.evidence import OWN
    from calibrate.report.scores_record import ScoresRecord

    refuse_per_head(fit)
    head = load_head_of(fit, request.head)
    check_writable(request.out)
    rules = beside(fit, {**fixed_rules(), **_fitted_rivals(fit, run)})
    scores = ScoresRecord(score_head(head, request, rules), (OWN,), fit.reference)
    return write_report(request.out, fit, scores)


def _report_on_model(request: ReportRequest, fit: "Coefficients", run: Path | None) -> Result:
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
    return write_report(request.out, fit, scores)


def _fitted_rivals(fit: "Coefficients", run: Path | None) -> "Mapping[str, Coefficients]":
    """Rules fitted to a fit's collection; none without a collection or with too few rows."""
    from calibrate.evidence.verdict import chosen_kind
    from calibrate.files.collection import open_collection
    from calibrate.files.rows import RowCollection
    from calibrate.rows.choose_rule import choose
    from calibrate.rows.fit_collection import resolve_options
    from calibrate.rows.rivals import by_sharpness, fitted_rules
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


def write_report(
    page: Path, fit: "Coefficients", scores: "ScoresRecord", needed: bool = True
) -> Result:
    """Writes the page on a fit; the path is None if it cannot be written and is not `needed`."""
    from calibrate.report.fit_page import write_fit_page
    from calibrate.report.run_record import report_result

    stderr.print(f"writing the report {page}")
    verdict, path = " ".join(scores.verdicts().values()), None
    try:
        write_fit_page(page, fit, scores)
        path = page
    except CalibrateError as error:
        if needed:
            raise
        stderr.print(f"the report is not written: {error}")
    return report_result(verdict, path)
