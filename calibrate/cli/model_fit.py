"""`calibrate model fit`: publish the rules that the heads of a model need, fitted through it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from calibrate.cli.fit import publish_fit
from calibrate.cli.options import Device, FitName, Model, Store
from calibrate.cli.progress import Steps
from calibrate.cli.request import Request
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from calibrate.export.proof import Exportable
    from calibrate.files.examples import ExampleCollection
    from calibrate.model.collect_examples import Job
    from calibrate.model.fit import ModelFit
    from calibrate.model.problem import ModelOptions
    from calibrate.report.fit_record import FitRecord
    from calibrate.transformers.folders import ModelFolder


@dataclass(frozen=True)
class ModelFitRequest(Request):
    run: Annotated[Path, Argument(help="Folder of a collection of examples.")]
    name: FitName
    model: Model = None
    kind: Annotated[
        Literal["constant", "log-size", "entropy-and-size"] | None,
        Option(help="Kind of rule [default: the simplest as good as any]"),
    ] = None
    trained_up_to: Annotated[
        int | None,
        Option(min=0, help="Tokens that the model was trained up to, where answers are protected."),
    ] = None
    allowed_loss: Annotated[
        float, Option(min=0, help="Nats a token that protected text and answers may lose.")
    ] = 0.005
    steps: Annotated[int, Option(min=1, help="Steps for each kind of rule, at most.")] = 100
    for_export: Annotated[
        bool,
        Option(
            "--for-export",
            help="Publish rules that `calibrate export` can write: constants, or b (1 + r log n) "
            "with one r for all heads. The other kinds are fitted too, to say what that costs.",
        ),
    ] = False
    seed: Annotated[int, Option(min=0, help="Seed of the fit.")] = 0
    device: Device = "cpu"
    store: Store = None


def fit(request: ModelFitRequest) -> "FitRecord":
    """Fit the rules of all heads of a model, and publish them.

    They follow the gradient of the mean log p of the model's answers through the model (PyTorch).
    Kinds are chosen, and the fit is judged, on examples that it was not fitted to; plain text may
    lose no more than --allowed-loss, and heads that gain nothing stay as they are. If the fit is
    not worth it, nothing is published (exit code 3). The same command continues what was
    interrupted.

    Example: calibrate model fit runs/model --name mine
    """
    from calibrate.cli.loading import open_run
    from calibrate.files.publishing import check_store

    job, collection = open_run(request.run, request.model, request.device)
    check_store(request.store)
    from calibrate.model.problem import ModelOptions
    from calibrate.report.collection_record import nearly_none_right
    from calibrate.report.fit_record import through_model

    options = ModelOptions(
        request.kind, request.trained_up_to, request.allowed_loss, request.steps, request.seed,
        _engines(job.folder) if request.for_export else None,
    )  # fmt: skip
    if warning := nearly_none_right(collection):
        stderr.print(warning)
    found = _fit(job, collection, request, options)
    coefficients, figure = publish_fit(found.coefficients, request.store, found.heads)
    return through_model(found, coefficients, figure)


def _fit(
    job: "Job", collection: "ExampleCollection", request: ModelFitRequest, options: "ModelOptions"
) -> "ModelFit":
    """Fits through the model, with a step per batch, and prints a line per kind of rule.

    What is known of a refused fit at each length is printed before the refusal is raised.
    """
    from calibrate.model.fit import NotWorthItError, fit_through
    from calibrate.model.passes import batch_tokens
    from calibrate.report.scores_record import ScoresRecord
    from calibrate.report.terminal import as_text

    stderr.print(f"fitting the heads of {job.folder.path} through the model")
    steps = Steps("loading the model", 1)

    def begin(what: str, passes: list[list[int]]) -> None:
        work = [n for which in passes for n in batch_tokens(collection.set.examples, which)]
        steps.begin(what, len(work), sum(work))

    try:
        with steps:
            return fit_through(
                lambda: job.folder.load(job.dtype, request.device), collection, request.name,
                options, steps.advance, begin,
                lambda found: stderr.print(
                    f"{found.form.label}: {found.value.gain:+.3f} nats on examples that choose"
                ),
            )  # fmt: skip
    except NotWorthItError as failure:
        tables = ScoresRecord(failure.evidence).tables()
        stderr.print("\n".join(as_text(table) for table in tables if not table.detail))
        raise


def _engines(folder: "ModelFolder") -> "Exportable":
    """What engines run of a model, and on stderr what they do not."""
    from calibrate.export.plan import HEAD
    from calibrate.export.proof import exportable

    stderr.print(f"trying exports of a small copy of {folder.path}")
    found = exportable(folder)
    if found.factors != HEAD:
        stderr.print(f"for export, rules are for {found.factors}: heads share what is scaled")
    if found.no_size:
        stderr.print(f"for export, no rules by log n: {found.no_size}")
    return found
