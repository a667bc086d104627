"""`calibrate collect`: keep a sample of the rows of a head, or of logits on disk."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli.model_options import OF_MODEL, ModelRequest, takes_model
from calibrate.cli.options import (
    BytesOption,
    DaskOption,
    FreshOption,
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
    typer.Option(help="Folder of the collection [default: runs/NAME of the head, file or model]"),
]
KeepOption = Annotated[
    Keep, typer.Option(help="Keep up to 2,048 rows of each size, or only misranked rows.")
]


OF_HEAD = ("head", "logits", "sizes", "sets", "keep", "max_bytes", "jobs", "dask", "stall")


@takes_model
def collect(
    out: OutOption = None,
    fresh: FreshOption = False,
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
    request: ModelRequest = ModelRequest(),  # noqa: B008 (immutable)
    as_json: JsonOption = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Collect rows of a head or of logits, or examples of a model.

    The head runs on sets of every size. The misranked rows are counted whichever rows are kept. Run
    the same command again to continue an interrupted collection or to repair damaged and missing
    shards; a complete collection is left as it is. --jobs, --dask and --stall may differ: they
    change no byte.

    With --model, what is kept are examples, prompts with their right answers, and the model's
    scores under plain softmax: give --prompts, --task and --text, or some of them.

    Example: calibrate collect --head max-retrieval --sizes 16..1024 --sets 512 --out runs/try

    Example: calibrate collect --model MODEL --task retrieval --text book.txt --out runs/model
    """
    if request.model is not None:
        from calibrate.cli.model_steps import collect_from_model
        from calibrate.report.collection_record import ExamplesRecord

        refuse_with(context, "--model", OF_HEAD)
        collection = collect_from_model(request.source(seed), out, fresh=fresh)
        show(ExamplesRecord(collection), as_json)
        return
    refuse_with(context, "a head or logits; they need --model", OF_MODEL)
    from calibrate.cli.collect_steps import collect_from_files, collect_from_head
    from calibrate.report.collection_record import CollectionRecord

    n, n_bytes, workers = parse_sizes(sizes), parse_bytes(max_bytes), Jobs(jobs, dask, stall)
    if logits is not None:
        refuse_with(context, "--logits", ("head", "sizes", "sets", "seed"))
        rows = collect_from_files(logits, out, n_bytes, keep.value, workers, fresh=fresh)
    else:
        rows = collect_from_head(
            head, n, sets, seed, folder=out, max_bytes=n_bytes, keep=keep.value, jobs=workers,
            fresh=fresh,
        )  # fmt: skip
    show(CollectionRecord(rows), as_json)
