"""`calibrate model fit`: fit the temperatures of all heads of a model, and save them."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, BadParameter, Option

from calibrate.cli.fit import save_new_version
from calibrate.cli.options import (
    EXECUTION_PANEL,
    RULE_PANEL,
    AsJson,
    Dask,
    Device,
    FitName,
    ModelFolderPath,
    Processes,
    Store,
)
from calibrate.defaults import MAX_KL, MAX_STEPS, NLL_TOLERANCE_PER_TOKEN
from calibrate.parallel import Jobs
from calibrate.report.terminal import Steps, show, stderr


def model_fit_command(
    run: Annotated[
        Path, Argument(metavar="collection", help="Folder of examples, from `model collect`.")
    ],
    *,
    name: FitName,
    model: ModelFolderPath = None,
    # The literal repeats KINDS, which would load NumPy for --help; a test compares them.
    kind: Annotated[
        Literal["constant", "log-size", "polynomial", "entropy-and-size"],
        Option(
            help="Kind of rule. A constant is the default, since other engines run it and since it "
            "changes long text less.",
        ),
    ] = "constant",
    sharing: Annotated[
        Literal["global", "per_layer", "per_head"],
        Option(
            rich_help_panel=RULE_PANEL,
            help="Heads that share a rule: all of them, those of a layer, or none.",
        ),
    ] = "per_head",
    heads_per_layer: Annotated[
        int | None,
        Option(
            min=1,
            rich_help_panel=RULE_PANEL,
            help="Most heads of each layer that may have another beta than 1 [default: all]",
        ),
    ] = None,
    trained_up_to: Annotated[
        int | None,
        Option(min=0, help="Largest context length of the model's training, in tokens."),
    ] = None,
    tolerance: Annotated[
        float | None,
        Option(
            min=0,
            help="NLL in nats per token that may be lost up to --trained-up-to [default: "
            f"{NLL_TOLERANCE_PER_TOKEN}]",
        ),
    ] = None,
    max_kl: Annotated[
        float,
        Option(min=0, help="Largest KL divergence of retention text, nats per token."),
    ] = MAX_KL,
    steps: Annotated[
        int, Option(min=1, rich_help_panel=EXECUTION_PANEL, help="Most steps of the optimiser.")
    ] = MAX_STEPS,
    for_export: Annotated[
        bool,
        Option(
            "--for-export",
            help="Fit only what an export of this model can hold, such as a constant for each "
            "layer of a Qwen3.",
        ),
    ] = False,
    seed: Annotated[int, Option(min=0, help="Seed of the fit.")] = 0,
    device: Device = "cpu",
    jobs: Processes = 1,
    dask: Dask = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Fit the temperatures of all heads of a model, and save them.

    They are optimised end to end on the log-likelihood of the model's answers. The fit is evaluated
    on the test split, with held-out prompt templates, and compared with one constant for all heads.
    Heads without a gain keep beta = 1. Without a significant gain nothing is saved (exit code 3).
    The same command continues an interrupted fit.

    Example: calibrate model fit runs/Qwen3 --name mine
    """
    if tolerance is not None and not trained_up_to:
        raise BadParameter("--tolerance is for --trained-up-to; give that, too")
    from calibrate.cli.loading import open_model_run
    from calibrate.store.saving import check_store

    job, collection = open_model_run(run, model, device)
    check_store(store)
    from calibrate.core.rule import Sharing
    from calibrate.export.numerical_check import exportable
    from calibrate.model.fit import fit_examples
    from calibrate.model.options import ModelOptions
    from calibrate.report.collection_record import nearly_none_right
    from calibrate.report.fit_record import through_model
    from calibrate.report.sentences import with_verdict

    if warning := nearly_none_right(collection):
        stderr.print(warning)
    options = ModelOptions(
        kind=kind,
        trained_up_to=trained_up_to,
        max_kl=max_kl,
        tolerance=NLL_TOLERANCE_PER_TOKEN if tolerance is None else tolerance,
        max_steps=steps,
        seed=seed,
        engines=exportable(job.folder) if for_export else None,
        sharing=Sharing[sharing.upper()],
        heads_per_layer=heads_per_layer,
    )
    stderr.print(f"fitting the heads of {job.folder.path} through the model")
    progress = Steps()
    progress.begin("loading the model", 1)
    with progress:
        result = fit_examples(job.runner(Jobs(jobs, dask)), collection, name, options, progress)
    fitted = with_verdict(result.coefficients, result.evidence)
    show(through_model(result, save_new_version(fitted, store)), as_json)
