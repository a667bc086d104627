"""`calibrate model`: collect, fit and evaluate, on the answers of a model."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, BadParameter, Option

from calibrate.cli.evaluate import FitsToScore
from calibrate.cli.fit import publish_fit
from calibrate.cli.options import (
    Device,
    Examples,
    FitName,
    Model,
    Overwrite,
    ReadStore,
    RequiredModel,
    Store,
    Workers,
)
from calibrate.cli.progress_bar import Steps
from calibrate.cli.request import Request
from calibrate.defaults import MAX_KL, MAX_STEPS, NLL_TOLERANCE, NLL_TOLERANCE_PER_TOKEN
from calibrate.report.blocks import Record
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from calibrate.datasets.examples import ExampleCollection
    from calibrate.model.collect_examples import Job
    from calibrate.model.fit import ModelFit
    from calibrate.report.fit_record import FitRecord


@dataclass(frozen=True)
class CollectRequest(Workers, Request, Examples):
    model: RequiredModel
    out: Annotated[
        Path | None, Option(help="Folder of the collection [default: runs/NAME of the model]")
    ] = None
    overwrite: Overwrite = False


def collect(request: CollectRequest) -> Record:
    """Collect examples of a model: prompts with their right answers.

    They are kept with the model's scores under the baseline. Give one or more of --prompts, --task
    and --retention-text. The same command continues an interrupted collection, or repairs damaged
    and missing files; a complete collection is left as it is.

    Example: calibrate model collect --model MODEL --task retrieval --out runs/model
    """
    from calibrate.cli.loading import require_transformers

    spec = request.example_spec()
    _ = spec.lines  # a file with an error is refused before a model is loaded
    require_transformers(request.device)
    from calibrate.datasets.resume import discard_collection
    from calibrate.model.collect_examples import collect_examples, plan
    from calibrate.report.collection_record import examples_result

    stderr.print(f"making examples for {request.model}")
    job = plan(request.model, spec, request.dtype, request.device, request.allow_unexpected)
    folder = request.out or Path("runs") / job.folder.name
    if request.overwrite:
        discard_collection(folder)
    with Steps() as steps:
        collection = collect_examples(job, folder, steps, request.workers)
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
class FitRequest(OfExamples):
    name: FitName
    # The names of KINDS, which would load NumPy for --help; a test compares them.
    kind: Annotated[
        Literal["constant", "log-size", "polynomial", "entropy-and-size"],
        Option(help="Kind of rule."),
    ] = "constant"
    trained_up_to: Annotated[
        int | None,
        Option(min=0, help="Largest context length of the model's training, in tokens."),
    ] = None
    tolerance: Annotated[
        float | None,
        Option(
            min=0,
            help="NLL that may be lost up to --trained-up-to, nats per token [default: "
            f"{NLL_TOLERANCE_PER_TOKEN}; {NLL_TOLERANCE} for rows]",
        ),
    ] = None
    max_kl: Annotated[
        float,
        Option(min=0, help="KL divergence of retention text in nats per token, at most."),
    ] = MAX_KL
    interpolation: Annotated[
        float | None,
        Option(
            min=0.01,
            max=1,
            help="Weight s of the fit, beta(s) = 1 + s (beta - 1) [default: the largest within the "
            "bounds]",
        ),
    ] = None
    steps: Annotated[int, Option(min=1, help="Optimiser steps, at most.")] = MAX_STEPS
    for_export: Annotated[
        bool,
        Option(
            "--for-export",
            help="Fit rules that `calibrate export` can write: constants, or with --kind log-size "
            "b (1 + r log n) with one r for all heads.",
        ),
    ] = False
    sharing: Annotated[
        Literal["global", "per_layer", "per_head"],
        Option(help="Heads that share a rule: all of them, those of a layer, or none."),
    ] = "per_head"
    heads_per_layer: Annotated[
        int | None,
        Option(
            min=1,
            help="Heads of each layer that may have another beta than 1, at most [default: all]",
        ),
    ] = None
    seed: Annotated[int, Option(min=0, help="Seed of the fit.")] = 0
    store: Store = None

    def __post_init__(self) -> None:
        """Checks that nothing is given that would be ignored."""
        if self.tolerance is not None and not self.trained_up_to:
            raise BadParameter("--tolerance is for --trained-up-to; give that, too")


def fit(request: FitRequest) -> "FitRecord":
    """Fit the temperatures of all heads of a model, and publish them.

    They are optimised end to end on the log-likelihood of the model's answers (PyTorch): one
    constant for each head, or another kind of rule. The fit is evaluated on the test split, with
    held-out prompt templates, and compared with one constant for all heads. --max-kl limits the KL
    divergence of retention text from the baseline. Heads without a gain stay as they are. Without a
    significant gain nothing is published (exit code 3). The same command continues an interrupted
    fit.

    Example: calibrate model fit runs/model --name mine
    """
    from calibrate.cli.loading import open_run
    from calibrate.store.publishing import check_store

    job, collection = open_run(request.run, request.model, request.device)
    check_store(request.store)
    from calibrate.report.collection_record import nearly_none_right
    from calibrate.report.fit_record import through_model
    from calibrate.report.sentences import with_verdict

    if warning := nearly_none_right(collection):
        stderr.print(warning)
    result = _fit(job, collection, request)
    fit = with_verdict(result.coefficients, result.evidence)
    return through_model(result, publish_fit(fit, request.store))


def _fit(job: "Job", collection: "ExampleCollection", request: FitRequest) -> "ModelFit":
    """Fits through the model, with a step per batch."""
    from calibrate.core.parameter_sharing import Sharing
    from calibrate.export.numerical_check import exportable
    from calibrate.model.fit import fit_examples
    from calibrate.model.options import ModelOptions

    options = ModelOptions(
        kind=request.kind,
        trained_up_to=request.trained_up_to,
        max_kl=request.max_kl,
        tolerance=NLL_TOLERANCE_PER_TOKEN if request.tolerance is None else request.tolerance,
        interpolation=request.interpolation,
        max_steps=request.steps,
        seed=request.seed,
        engines=exportable(job.folder) if request.for_export else None,
        sharing=Sharing[request.sharing.upper()],
        heads_per_layer=request.heads_per_layer,
    )
    stderr.print(f"fitting the heads of {job.folder.path} through the model")
    steps = Steps()
    steps.begin("loading the model", 1)
    with steps, job.running(request.workers) as runner:
        return fit_examples(runner, collection, request.name, options, steps)


@dataclass(frozen=True)
class EvaluateRequest(OfExamples):
    fits: FitsToScore = ""
    store: ReadStore = None


def evaluate(request: EvaluateRequest) -> Record:
    """Evaluate fits on a model's answers, beside the paper's polynomial.

    NLL and accuracy by prompt template and length, on a collection of examples. A fit to this
    collection is evaluated on its test split. Scores are cached: the same command continues an
    interrupted evaluation.

    Example: calibrate model evaluate runs/model --fits mine
    """
    from calibrate.cli.loading import load_fits, open_run

    fits = load_fits(request.fits, request.store)
    job, collection = open_run(request.run, request.model, request.device)
    from calibrate.cli.model_scoring import score_rules
    from calibrate.evidence.baselines import paper

    return score_rules(job, collection, fits, {"paper": paper()}, request.workers)
