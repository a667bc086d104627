"""`calibrate report`: one self-contained page on a fit."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from calibrate.cli import options
from calibrate.cli.request import Request
from calibrate.errors import CalibrateError
from calibrate.report.blocks import Record

if TYPE_CHECKING:
    from calibrate.report.run_record import SolvedHead
    from calibrate.report.scores_record import ScoresRecord
    from calibrate.store.coefficients import Coefficients


@dataclass(frozen=True)
class ReportRequest(Request, options.HeadOrLogits):
    fit: Annotated[str, Argument(help="NAME, NAME@3, a file, or an address.")]
    out: Annotated[Path, Option(callback=options.check_page, help="File of the page, .html.")]
    run: Annotated[
        Path | None, Option(help="Folder of its collection [default: found in ./runs]")
    ] = None
    store: options.ReadStore = None
    model: options.Model = None
    device: options.Device = "cpu"
    _: KW_ONLY
    sizes: options.Sizes = "16..4096"
    sets: Annotated[
        int, Option(min=2, max=options.MAX_SETS, help="Held-out sets of each size.")
    ] = 4096


def report(request: ReportRequest) -> Record:
    """Write one self-contained page on a fit.

    It has the verdict, scores, figures and provenance. If the fit's collection is found, the page
    compares rules fitted to the same rows. A fit with an entry per head, or one made from
    logits on disk, is scored on the rows of --logits; use rows that it was not fitted to.

    A fit made through a model is evaluated on the model's answers, on the test split of its
    collection.

    Example: calibrate report max-retrieval --out report.html
    """
    from calibrate.cli.loading import collection_of
    from calibrate.cli.row_scoring import solved_heads, solved_of, write_report
    from calibrate.storage.atomic_io import check_writable
    from calibrate.store.fits_store import load

    fit = load(request.fit, request.store)
    run = request.run or collection_of(fit)
    check_writable(request.out)
    solved = solved_of(fit, run)
    scores = _scores(request, fit, run, solved)
    return write_report(request.out, fit, scores, solved or solved_heads(fit, run, scores))


def _scores(
    request: ReportRequest, fit: "Coefficients", run: Path | None, solved: "SolvedHead | None"
) -> "ScoresRecord":
    """Scores a fit on logits, by a model's answers, or on its head.

    Raises:
      CalibrateError: the collection of a model's examples is not found.
    """
    from calibrate.cli import loading, row_scoring

    if request.logits is not None:
        return row_scoring.score_logits(loading.read_logits(request.logits), {fit.reference: fit})
    if fit.of_whole_model:
        if run is None:
            raise CalibrateError(
                f"the collection of {fit.reference} is not in ./runs; give its folder with --run"
            )
        found = loading.open_run(run, request.model, request.device)
        from calibrate.cli.model_scoring import score_fit

        return score_fit(fit, *found)
    head = loading.load_head_of(fit, request.head)
    return row_scoring.score_own(head, request, fit, row_scoring.baselines_of(solved))
