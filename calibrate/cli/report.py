"""`calibrate report`: one self-contained page on a fit."""

from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli.model_options import (
    OF_MODEL,
    ConstantsOption,
    ModelRequest,
    Source,
    parse_betas,
    takes_model,
)
from calibrate.cli.options import (
    JsonOption,
    LogitsOption,
    ReadStoreOption,
    SeedOption,
    SizesOption,
    check_page,
    parse_sizes,
    refuse_with,
)
from calibrate.report.terminal import show

FitArgument = Annotated[str, typer.Argument(help="A fit (NAME, NAME@3), or a collection's folder.")]
OutOption = Annotated[Path, typer.Option(callback=check_page, help="File of the page, .html.")]
OtherHeadOption = Annotated[
    str | None, typer.Option(help="Head to score [default: the head that the fit names]")
]
HeldOutSetsOption = Annotated[int, typer.Option(min=2, help="Held-out sets of each size.")]


@takes_model
def report(
    run_or_fit: FitArgument,
    out: OutOption,
    head: OtherHeadOption = None,
    logits: LogitsOption = None,
    sizes: SizesOption = "16..4096",
    sets: HeldOutSetsOption = 4096,
    seed: SeedOption = 0,
    store: ReadStoreOption = None,
    request: ModelRequest = ModelRequest(),  # noqa: B008 (immutable)
    constants: ConstantsOption = "",
    as_json: JsonOption = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Write one self-contained page on a fit.

    It has the verdict, scores, figures and provenance. If the fit's collection is in ./runs, the
    page compares rules fitted to the same rows. A fit with an entry per head, or one made from
    logits on disk, is scored on the rows of --logits; use rows that it was not fitted to.

    A fit made through a model is scored by the model's answers: on the examples of its collection
    that it has not seen, or on those of --model and the options of `collect`.

    Example: calibrate report max-retrieval --out report.html
    """
    from calibrate.cli.loading import made_through_model
    from calibrate.cli.report_steps import report_on_head, report_on_logits, report_on_model

    n = parse_sizes(sizes)
    if logits is None and (request.model is not None or made_through_model(run_or_fit, store)):
        refuse_with(context, "a fit of a model", ("head", "sizes", "sets"))
        source = Source(None, request.model, None, device=request.device)
        if request.prompts or request.task or request.text:
            if request.model is None:
                raise typer.BadParameter("examples need the model: give --model FOLDER")
            source = request.source(seed)
        else:
            refuse_with(
                context, "a collection, which has its own", ("lengths", "examples", "dtype")
            )
        show(report_on_model(run_or_fit, store, out, source, parse_betas(constants)), as_json)
        return
    refuse_with(context, "a head or logits", ("model", "constants", *OF_MODEL))
    if logits is not None:
        refuse_with(context, "--logits", ("head", "sizes", "sets", "seed"))
        record = report_on_logits(run_or_fit, store, out, logits)
    else:
        record = report_on_head(run_or_fit, store, out, head, sizes=n, sets=sets, seed=seed)
    show(record, as_json)
