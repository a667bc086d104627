"""`calibrate evaluate`: score a head under fits and simpler rules, on held-out sets."""

from typing import Annotated

import typer

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

HeldOutSetsOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Held-out sets of each size "
        "[default: 32,768 up to n = 256, 4,096 up to 4,096, 1,024 above]",
    ),
]
FitsOption = Annotated[str, typer.Option(help="Fits to score: REFERENCE,...")]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print accuracies as CSV.")]

# Options that concern a head, and not logits on disk.
_HEAD_OPTIONS = ("head", "sizes", "sets", "seed", "jobs", "dask", "stall", "as_csv")


def evaluate(
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
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Score a head under fits and simpler rules, on held-out sets.

    --fits are compared with plain softmax, the paper's numbers, log n, hard attention, and the best
    constant of each size, chosen in hindsight; p-values are of paired t-tests. Nothing is collected
    or fitted.

    With --logits, --fits are scored on the rows of a file or folder by the probability of the
    target, each head with its own entry. Use rows that were not fitted.

    Example: calibrate evaluate --head max-retrieval-3 --sizes 16..256 --fits max-retrieval@1
    """
    from calibrate.cli.evaluate_steps import compare_rules, score_logits_files

    if logits is not None:
        refuse_with(context, "--logits", _HEAD_OPTIONS)
        show(score_logits_files(logits, fits, store), as_json)
        return
    if as_json and as_csv:
        raise typer.BadParameter("--json cannot be used with --csv")
    n, workers = parse_sizes(sizes), Jobs(jobs, dask, stall)
    record = compare_rules(head, fits, store, sizes=n, sets=sets, seed=seed, jobs=workers)
    if as_csv:
        print(record.as_csv(), end="")
    else:
        show(record, as_json)
