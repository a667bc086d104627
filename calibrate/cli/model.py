"""`calibrate model`: collect, diagnose, fit, evaluate and run, for a model by its own answers."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from calibrate.cli.diagnose import DiagnosisFolder, diagnosis_folder
from calibrate.cli.evaluate import FitsToScore
from calibrate.cli.fit import publish_fit
from calibrate.cli.options import (
    Device,
    Examples,
    FitName,
    Fresh,
    Model,
    ReadStore,
    Request,
    RequiredModel,
    Store,
    Workers,
)
from calibrate.cli.progress import Steps
from calibrate.cli.run import RunOptions, name_after
from calibrate.report.blocks import Record
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from calibrate.files.examples import ExampleCollection
    from calibrate.model.collect_examples import Job
    from calibrate.model.fit import ModelFit
    from calibrate.report.fit_record import FitRecord


@dataclass(frozen=True)
class CollectRequest(Workers, Request, Examples):
    model: RequiredModel
    out: Annotated[
        Path | None, Option(help="Folder of the collection [default: runs/NAME of the model]")
    ] = None
    fresh: Fresh = False


def collect(request: CollectRequest) -> Record:
    """Collect examples of a model: prompts with their right answers.

    They are kept with the model's scores under the baseline. Give --prompts, --task and --text, or
    some of them. Run the same command again to continue an interrupted collection or to repair
    damaged and missing files; a complete collection is left as it is.

    Example: calibrate model collect --model MODEL --task retrieval --text book.txt --out runs/model
    """
    from calibrate.cli.loading import require_transformers

    wanted = request.wanted()
    _ = wanted.lines  # what is wrong with a file is told before a model is looked at
    require_transformers(request.device)
    from calibrate.cli.model_scoring import model_steps
    from calibrate.files.resuming import discard_collection
    from calibrate.model.collect_examples import collect_examples, plan
    from calibrate.report.collection_record import examples_result

    stderr.print(f"making examples for {request.model}")
    job = plan(request.model, wanted, request.dtype, request.device, request.allow_unexpected)
    folder = request.out or Path("runs") / job.folder.name
    if request.fresh:
        discard_collection(folder)
    units, jobs = job.examples.units(), request.workers
    with model_steps("scoring", job.examples, units, jobs) as steps:
        collection = collect_examples(job, folder, steps.advance, jobs)
    if not steps.done:
        stderr.print(f"{folder} is already complete")
    return examples_result(collection)


@dataclass(frozen=True)
class OfExamples(Workers, Request):
    """A collection of examples, and the model that they are run through."""

    run: Annotated[Path, Argument(help="Folder of a collection of examples.")]
    _: KW_ONLY
    model: Model = None
    device: Device = "cpu"


@dataclass(frozen=True)
class DiagnoseRequest(OfExamples):
    out: DiagnosisFolder = None


def diagnose(request: DiagnoseRequest) -> Record:
    """Rank a model's heads by what calibration could add.

    The derivative of log p of its answers by log beta of every head, in one backward pass for each
    example: which heads want to be sharper, which more diffuse, and what a step gains to first
    order.

    Example: calibrate model diagnose runs/model
    """
    from calibrate.cli.loading import open_run

    job, collection = open_run(request.run, request.model, request.device)
    from calibrate.cli.model_scoring import model_steps
    from calibrate.model.first_look import derivatives, sensitivity
    from calibrate.report.first_look_record import RECORD, save_first_look

    folder = diagnosis_folder(request.run, request.out, RECORD)
    stderr.print(f"loading {job.folder.path}")
    everything, jobs = [range(len(job.examples.examples))], request.workers
    steps = model_steps("differentiating", job.examples, everything, jobs)
    with steps, job.running(jobs) as runner:
        look = sensitivity(derivatives(runner, job.examples, steps.advance), job.examples)
    return save_first_look(
        folder, look, job.folder.name, job.configuration["fingerprint"], collection.digest
    )


@dataclass(frozen=True)
class FitRequest(OfExamples):
    name: FitName
    kind: Annotated[
        Literal["constant", "log-size", "commitment", "entropy-and-size"] | None,
        Option(help="Kind of rule [default: the simplest as good as any]"),
    ] = None
    trained_up_to: Annotated[
        int | None,
        Option(min=0, help="Tokens that the model was trained up to: answers may lose little."),
    ] = None
    allowed_loss: Annotated[
        float, Option(min=0, help="Nats a token that protected text, as KL, and answers may lose.")
    ] = 0.01
    strength: Annotated[
        float | None,
        Option(
            min=0.01, max=1, help="Share of beta - 1 to publish [default: the most that is allowed]"
        ),
    ] = None
    steps: Annotated[int, Option(min=1, help="Steps for each kind of rule, at most.")] = 100
    for_export: Annotated[
        bool,
        Option(
            "--for-export",
            help="Publish rules that `calibrate export` can write: constants, or b (1 + r log n) "
            "with one r for all heads.",
        ),
    ] = False
    seed: Annotated[int, Option(min=0, help="Seed of the fit.")] = 0
    store: Store = None


def fit(request: FitRequest) -> "FitRecord":
    """Fit the rules of all heads of a model, and publish them.

    They follow the gradient of the mean log p of the model's answers through the model (PyTorch).
    Kinds are chosen, and the fit is judged, on examples that it was not fitted to; plain text may
    lose --allowed-loss in the mean at most, and heads that gain nothing stay as they are. If the
    fit is not worth it, nothing is published (exit code 3). The same command continues what was
    interrupted.

    Example: calibrate model fit runs/model --name mine
    """
    from calibrate.cli.loading import open_run
    from calibrate.files.publishing import check_store

    job, collection = open_run(request.run, request.model, request.device)
    check_store(request.store)
    from calibrate.report.collection_record import nearly_none_right
    from calibrate.report.fit_record import through_model

    if warning := nearly_none_right(collection):
        stderr.print(warning)
    found = _fit(job, collection, request)
    return through_model(found, publish_fit(found.coefficients, request.store))


def _fit(job: "Job", collection: "ExampleCollection", request: FitRequest) -> "ModelFit":
    """Fits through the model, with a step per batch, and prints a line per kind of rule."""
    from calibrate.cli.model_scoring import amount
    from calibrate.export.proof import exportable
    from calibrate.model.fit import fit_through
    from calibrate.model.problem import ModelOptions

    options = ModelOptions(
        kind=request.kind, trained_up_to=request.trained_up_to, allowed=request.allowed_loss,
        strength=request.strength, most_steps=request.steps, seed=request.seed,
        engines=exportable(job.folder) if request.for_export else None,
    )  # fmt: skip
    stderr.print(f"fitting the heads of {job.folder.path} through the model")
    steps = Steps("loading the model", 1, at_once=request.workers.uses_workers)

    def begin(what: str, passes: list[list[int]]) -> None:
        steps.begin(what, *amount(collection.set, passes))

    with steps, job.running(request.workers) as runner:
        return fit_through(
            runner, collection, request.name, options, steps.advance, begin,
            lambda found: stderr.print(
                f"{found.form.label}: {found.value.gain:+.3f} nats on examples that choose"
            ),
        )  # fmt: skip


@dataclass(frozen=True)
class EvaluateRequest(OfExamples):
    fits: FitsToScore = ""
    store: ReadStore = None


def evaluate(request: EvaluateRequest) -> Record:
    """Score fits by a model's own answers, beside the paper's numbers.

    Log p and how many are right, by template and length, on a collection of examples. A fit that
    was made of it is judged by the examples that it has not seen. Scores are kept: the same command
    continues where it was interrupted.

    Example: calibrate model evaluate runs/model --fits mine
    """
    from calibrate.cli.loading import load_fits, open_run

    fits = load_fits(request.fits, request.store)
    found = open_run(request.run, request.model, request.device)
    from calibrate.cli.model_scoring import score_rules
    from calibrate.evidence.baselines import paper

    return score_rules(*found, fits, {"paper": paper()}, request.workers)


@dataclass(frozen=True)
class RunRequest(Workers, RunOptions, Examples):
    model: RequiredModel


def run(request: RunRequest) -> Record:
    """Collect, fit, evaluate and report on a model, in one command.

    Examples are made or read as by `model collect`, the heads are fitted through the model, and the
    report is on the examples that no fit has seen. The fit is published as NAME, the report beside
    it. The same command continues what was interrupted.

    Example: calibrate model run --model MODEL --task retrieval --text book.txt
    """
    from calibrate.files.publishing import check_store

    check_store(request.store)
    name = request.name or name_after(request.model)
    folder = Path("runs") / name
    examples = {field: getattr(request, field) for field in Examples.__dataclass_fields__}
    shared = {field: getattr(request, field) for field in Workers.__dataclass_fields__}
    collect(CollectRequest(request.model, folder, request.fresh, **examples, **shared))
    record = fit(FitRequest(
        folder, name, seed=request.seed, model=request.model, device=request.device,
        store=request.store, **shared,
    ))  # fmt: skip
    from calibrate.cli.loading import open_run
    from calibrate.cli.model_scoring import score_fit
    from calibrate.cli.scoring import end_run

    found = open_run(folder, request.model, request.device)
    return end_run(record, score_fit(record.coefficients, *found, request.workers))
