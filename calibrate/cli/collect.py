"""`calibrate collect`: keep a sample of the rows of a head, or of logits on disk."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli.options import (
    BytesOption,
    DaskOption,
    HeadOption,
    JobsOption,
    JsonOption,
    LogitsOption,
    SeedOption,
    SetsOption,
    SizesOption,
    StallOption,
    parse_bytes,
    parse_sizes,
    refuse_with,
)
from calibrate.parallel.jobs import Jobs
from calibrate.report.terminal import show


class Keep(StrEnum):
    """Which rows a collection keeps."""

    ALL = "all"
    MISRANKED = "misranked"


OutOption = Annotated[
    Path | None,
    typer.Option(help="Folder of the collection [default: runs/NAME of the head or file]"),
]
KeepOption = Annotated[
    Keep, typer.Option(help="Keep up to 2,048 rows of each size, or only misranked rows.")
]


def collect(
    out: OutOption = None,
    head: HeadOption = "max-retrieval",
    logits: LogitsOption = None,
    sizes: SizesOption = "16..16384",
    sets: SetsOption = 4096,
    seed: SeedOption = 0,
    keep: KeepOption = Keep.ALL,
    max_bytes: BytesOption = "1GB",
    jobs: JobsOption = 1,
    dask: DaskOption = None,
    stall: StallOption = 600.0,
    as_json: JsonOption = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Run a head, or read logits, and keep a sample of the rows.

    The head runs on sets of every size. The misranked rows are counted whichever rows are kept. Run
    the same command again to continue an interrupted collection or to repair damaged and missing
    shards; a complete collection is left as it is. --jobs, --dask and --stall may differ: they
    change no byte.

    Example: calibrate collect --head max-retrieval --sizes 16..1024 --sets 512 --out runs/try
    """
    from calibrate.cli.collect_steps import collect_from_files, collect_from_head
    from calibrate.report.collection_record import CollectionRecord

    n, n_bytes, workers = parse_sizes(sizes), parse_bytes(max_bytes), Jobs(jobs, dask, stall)
    if logits is not None:
        refuse_with(context, "--logits", ("head", "sizes", "sets", "seed"))
        collection = collect_from_files(logits, out, n_bytes, keep.value, workers)
    else:
        collection = collect_from_head(
            head, n, sets, seed, folder=out, max_bytes=n_bytes, keep=keep.value, jobs=workers
        )
    show(CollectionRecord(collection), as_json)
