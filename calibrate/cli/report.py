"""`calibrate report`: one self-contained page on a fit."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Option

from calibrate.cli.options import (
    RUN_SETS,
    RUN_SIZES,
    AsJson,
    Device,
    Draws,
    HeadName,
    LogitsPath,
    ModelFolderPath,
    ReadStore,
    ScoredSets,
    Seed,
    check_file,
    check_source,
    parse_sizes,
)
from calibrate.defaults import MAX_SIZE
from calibrate.errors import CalibrateError
from calibrate.report.terminal import show, stderr

if TYPE_CHECKING:
    from calibrate.store.fit import Fit


def report_command(
    ctx: Context,
    fit: Annotated[str, Argument(help="NAME, NAME@3, a file, or an address.")],
    *,
    head: HeadName = None,
    logits: LogitsPath = None,
    model: ModelFolderPath = None,
    run: Annotated[
        Path | None, Option(help="Folder of its collection [default: found in ./runs]")
    ] = None,
    out: Annotated[
        Path,
        Option(callback=lambda path: check_file(path, ".html"), help="File of the page, .html."),
    ],
    sizes: Annotated[
        str | None, Option(help="Sizes n of the new inputs [default: those of the fit]")
    ] = None,
    sets: ScoredSets = RUN_SETS,
    seed: Seed = 0,
    device: Device = "cpu",
    store: ReadStore = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained page on a fit.

    The page has the verdict, scores, figures and provenance. A fit of a head is scored on new
    inputs; if its collection is found, the page shows the optimal temperatures of its inputs. A fit
    of several heads, or of recorded logits, is scored on the rows of --logits: give rows that it
    was not fitted to. A fit of `model fit` is evaluated on the model's answers, on the test split
    of its collection.

    Example: calibrate report max-retrieval --out report.html
    """
    check_source(ctx)
    given_sizes = None if sizes is None else parse_sizes(sizes)
    from calibrate.cli import loading, row_scoring
    from calibrate.report.fit_record import report_result
    from calibrate.report.page import write_fit_page
    from calibrate.storage.atomic_io import check_writable
    from calibrate.store.loading import load

    loaded = load(fit, store)
    run = run or loading.collection_of(loaded)
    check_writable(out)
    solved = None
    if run is not None and not loaded.of_whole_model:
        solved = row_scoring.open_inputs_of(loaded, run)
    if logits is not None:
        arrays = loading.open_logits(logits)
        scores = row_scoring.score_fits_on_logits(arrays, {loaded.reference: loaded})
    elif loaded.of_whole_model:
        if run is None:
            raise CalibrateError(f"{loaded.reference} has no collection in ./runs; give --run")
        job, collection = loading.open_model_run(run, model, device)
        from calibrate.cli.model_scoring import score_fit_of_model

        scores = score_fit_of_model(loaded, job, collection)
    else:
        source = loading.load_head_of_fit(loaded, head)
        draws = Draws(given_sizes or sizes_of_fit(loaded), sets, seed)
        scores = row_scoring.score_fit_of_head(source, draws, loaded, solved)
    stderr.print(f"writing the report {out}")
    write_fit_page(out, loaded, scores, solved)
    show(report_result(loaded, scores, out), as_json)


def sizes_of_fit(fit: "Fit") -> list[int]:
    """The sizes n of the inputs of a fit, by its evidence; 16 to 4,096 without any."""
    sizes = {record.get("n", 0) for record in fit.evidence.get("held_out", [])}
    return sorted(n for n in sizes if 2 <= n <= MAX_SIZE) or parse_sizes(RUN_SIZES)
