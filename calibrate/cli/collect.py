"""`calibrate collect`: keep a sample of the inputs of a head, or of logits on disk."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Context, Option

from calibrate.cli.options import (
    AsJson,
    Dask,
    Draws,
    HeadName,
    LogitsPath,
    Overwrite,
    Processes,
    Seed,
    Sets,
    Sizes,
    check_source,
    parse_sizes,
)
from calibrate.defaults import SIZES
from calibrate.parallel import ONE_PROCESS, Jobs
from calibrate.report.terminal import Steps, show, stderr

if TYPE_CHECKING:
    from calibrate.rows.collection import RowCollection
    from calibrate.rows.heads import Head
    from calibrate.rows.logits_files import Arrays

DEFAULT_BYTES = 1e9


def collect_command(
    ctx: Context,
    *,
    head: HeadName = None,
    logits: LogitsPath = None,
    out: Annotated[
        Path | None,
        Option(help="Folder of the collection [default: runs/NAME of the head or file]"),
    ] = None,
    overwrite: Overwrite = False,
    sizes: Sizes = SIZES,
    sets: Sets = 4096,
    keep: Annotated[
        Literal["all", "misranked"],
        Option(help="Inputs to keep: all (of a head up to 2,048 of each size), or misranked."),
    ] = "all",
    max_bytes: Annotated[
        float,
        Option(
            min=1,
            max=1e18,
            show_default="1 GB",
            help="Largest size of the collection in bytes, such as 2e9.",
        ),
    ] = DEFAULT_BYTES,
    seed: Seed = 0,
    jobs: Processes = 1,
    dask: Dask = None,
    as_json: AsJson = False,
) -> None:
    """Collect inputs of a head or of logits.

    The result states how many inputs are misranked: another item has a higher logit than the
    target.
    The same command continues an interrupted collection; a complete one is left as it is.

    Example: calibrate collect --head my_head:Scorer --out runs/mine
    """
    check_source(ctx)
    draws = Draws(parse_sizes(sizes), sets, seed)
    from calibrate.cli.loading import open_head, open_logits
    from calibrate.report.collection_record import rows_result
    from calibrate.rows.logits_files import Arrays

    source = open_head(head) if logits is None else open_logits(logits)
    name = source.name if isinstance(source, Arrays) else Path(source.name).stem
    folder, workers = out or Path("runs") / name, Jobs(jobs, dask)
    collection = collect_rows(source, folder, draws, overwrite, keep, max_bytes, workers)
    show(rows_result(collection), as_json)


def collect_rows(
    source: "Head | Arrays",
    folder: Path,
    draws: Draws,
    overwrite: bool = False,
    keep: str = "all",
    max_bytes: float = DEFAULT_BYTES,
    jobs: Jobs = ONE_PROCESS,
) -> "RowCollection":
    """Collects inputs of a head, which draws them, or of logits."""
    from calibrate import pipeline
    from calibrate.rows.collect import collect_arrays
    from calibrate.rows.logits_files import Arrays
    from calibrate.rows.resume import discard_collection

    if overwrite:
        discard_collection(folder)
    with Steps() as steps:
        if isinstance(source, Arrays):
            collection = collect_arrays(source, folder, int(max_bytes), steps, keep, jobs)
        else:
            collection = pipeline.collect(
                source,
                draws.sizes,
                draws.sets,
                seed=draws.seed,
                folder=folder,
                keep=keep,
                max_bytes=int(max_bytes),
                jobs=jobs,
                progress=steps,
            )
    if not steps.done:
        stderr.print(f"{folder} is already complete")
    return collection
