"""`calibrate evaluate`: score a head, or a model, under fits and simpler rules."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calibrate.cli.model_options import (
    OF_EXAMPLES,
    OF_MODEL,
    ConstantsOption,
    ModelRequest,
    parse_betas,
    takes_model,
)
from calibrate.cli.options import (
    DaskOption,
    HeadOption,
    JobsOption,
    JsonOption,
    LogitsOption,
    ReadStoreOption,
    SeedOption,
    SizesOption,
    StallOption,
    parse_sizes,
    refuse_with,
)
from calibrate.parallel.jobs import Jobs
from calibrate.report.terminal import show

if TYPE_CHECKING:
    from calibrate.report.scores_record import ScoresRecord

HeldOutSetsOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Held-out sets of each size "
        "[default: 32,768 up to n = 256, 4,096 up to 4,096, 1,024 above]",
    ),
]
FitsOption = Annotated[str, typer.Option(help="Fits to score: REFERENCE,...")]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print scores as CSV.")]

RunArgument = Annotated[
    Path | None, typer.Argument(help="Folder of a complete collection of a model's examples.")
]
TrainedOption = Annotated[
    int | None,
    typer.Option(
        min=2, help="Of a model: tokens it was trained up to, N; log n / log N is compared."
    ),
]

# Options that concern a head, and not logits on disk or a model.
_HEAD_OPTIONS = ("head", "sizes", "sets", "jobs", "dask", "stall")
_MODEL_OPTIONS = ("model", "constants", "trained_up_to", *OF_MODEL)


@takes_model
def evaluate(
    run: RunArgument = None,
    head: HeadOption = "max-retrieval",
    logits: LogitsOption = None,
    sizes: SizesOption = "16..16384",
    sets: HeldOutSetsOption = None,
    seed: SeedOption = 0,
    fits: FitsOption = "",
    store: ReadStoreOption = None,
    jobs: JobsOption = 1,
    dask: DaskOption = None,
    stall: StallOption = 600.0,
    request: ModelRequest = ModelRequest(),  # noqa: B008 (immutable)
    constants: ConstantsOption = "",
    trained_up_to: TrainedOption = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Score a head, logits or a model under fits and simpler rules.

    --fits are compared with plain softmax, the paper's numbers, log n and hard attention, on the
    same sets. Nothing is collected or fitted.

    With --logits, --fits are scored on the rows of a file or folder by the probability of the
    target, each head with its own entry. Use rows that were not fitted.

    With RUN, a collection of examples, or --model and the options of `collect`, --fits are scored
    by the model's answers: log p and how many are right, by template and length. Of the collection
    that a fit was made of, only the examples count that it has not seen. With RUN, scores are kept:
    the same command continues where it was interrupted.

    Example: calibrate evaluate --head max-retrieval-3 --sizes 16..256 --fits max-retrieval@1

    Example: calibrate evaluate runs/model --fits mine --constants 1.15,1.3
    """
    if as_json and as_csv:
        raise typer.BadParameter("--json cannot be used with --csv")
    if run is not None or request.model is not None:
        refuse_with(context, "RUN or --model", (*_HEAD_OPTIONS, "logits"))
        if run is not None:
            refuse_with(context, "a collection, which has its own", OF_EXAMPLES)
        from calibrate.cli.evaluate_model_steps import rules_beside, score_model
        from calibrate.cli.loading import load_fits

        rules = rules_beside(load_fits(fits, store), parse_betas(constants), trained_up_to)
        _show_scores(score_model(request.source(seed, run), rules), as_json, as_csv)
        return
    refuse_with(context, "a head or logits; they need RUN or --model", _MODEL_OPTIONS)
    from calibrate.cli.evaluate_steps import compare_rules, score_logits_files

    if logits is not None:
        refuse_with(context, "--logits", (*_HEAD_OPTIONS, "seed"))
        _show_scores(score_logits_files(logits, fits, store), as_json, as_csv)
        return
    n, workers = parse_sizes(sizes), Jobs(jobs, dask, stall)
    record = compare_rules(head, fits, store, sizes=n, sets=sets, seed=seed, jobs=workers)
    _show_scores(record, as_json, as_csv)


def _show_scores(record: "ScoresRecord", as_json: bool, as_csv: bool) -> None:
    if as_csv:
        print(record.as_csv(), end="")
    else:
        show(record, as_json)
