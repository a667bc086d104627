"""`calibrate report`: one self-contained page on a fit."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Option

from calibrate.cli.options import (
    Constants,
    Examples,
    HeadOrLogits,
    Model,
    ReadStore,
    Sizes,
    check_page,
    parse_betas,
)
from calibrate.cli.request import Request
from calibrate.errors import CalibrateError
from calibrate.report.blocks import Record

if TYPE_CHECKING:
    from calibrate.files.coefficients import Coefficients
    from calibrate.report.scores_record import ScoresRecord


@dataclass(frozen=True)
class ReportRequest(Request, Examples, HeadOrLogits):
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


def report(request: ReportRequest) -> Record:
    """Write one self-contained page on a fit.

    It has the verdict, scores, figures and provenance. If the fit's collection is in ./runs, the
    page compares rules fitted to the same rows. A fit with an entry per head, or one made from
    logits on disk, is scored on the rows of --logits; use rows that it was not fitted to.

    A fit made through a model is scored by the model's answers: on the examples of its collection
    that it has not seen, or on those that --model and the options of `model collect` make.

    Example: calibrate report max-retrieval --out report.html
    """
    from calibrate.cli.loading import find_fit
    from calibrate.cli.scoring import write_report

    fit, run = find_fit(request.fit, request.store)
    return write_report(request.out, fit, _scores(request, fit, run))


def _scores(request: ReportRequest, fit: "Coefficients", run: Path | None) -> "ScoresRecord":
    """Scores a fit on logits, by a model's answers, or on its head.

    Raises:
      CalibrateError: the fit's collection is not in ./runs, and no examples are given.
    """
    from calibrate.cli import loading, scoring
    from calibrate.files.atomic_io import check_writable

    if request.logits is not None:
        check_writable(request.out)
        return scoring.score_logits(loading.read_logits(request.logits), {fit.reference: fit})
    if request.model is not None or fit.of_whole_model:
        if run is None and not request.named:
            raise CalibrateError(
                f"the collection of {fit.reference} is not in ./runs; give its folder in place of "
                "the fit, or --model FOLDER with examples, such as --task retrieval"
            )
        check_writable(request.out)
        found = loading.open_or_make(request.model, request, None if request.named else run)
        from calibrate.cli.model_scoring import score_fit

        return score_fit(fit, *found, parse_betas(request.constants))
    loading.refuse_per_head(fit)
    head = loading.load_head_of(fit, request.head)
    check_writable(request.out)
    return scoring.score_own(head, request, fit, scoring.fitted_rivals(run))
