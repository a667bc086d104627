"""`calibrate collect`: keep a sample of the rows of a head, or of logits on disk."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from calibrate.cli.options import HeadOrLogits, Overwrite, Sets, Sizes, Workers
from calibrate.cli.progress_bar import Steps
from calibrate.cli.request import Request
from calibrate.defaults import SIZES
from calibrate.report.blocks import Record
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from calibrate.datasets.logits_files import Arrays
    from calibrate.datasets.row_collection import RowCollection
    from calibrate.rows.heads import Head


@dataclass(frozen=True)
class CollectRequest(Request, Workers, HeadOrLogits):
    out: Annotated[
        Path | None,
        Option(help="Folder of the collection [default: runs/NAME of the head or file]"),
    ] = None
    overwrite: Overwrite = False
    keep: Annotated[
        Literal["all", "misranked"],
        Option(help="Rows to keep: all (of a head up to 2,048 of each size), or misranked."),
    ] = "all"
    max_bytes: Annotated[float, Option(min=1, max=1e18, help="Size limit of the collection.")] = 1e9
    _: KW_ONLY
    sizes: Sizes = SIZES
    sets: Sets = 4096


def collect(request: CollectRequest) -> Record:
    """Collect rows of a head or of logits.

    The head runs on sets of every size. The misranked rows are counted whichever rows are kept. Run
    the same command again to continue an interrupted collection or to repair damaged and missing
    shards; a complete collection is left as it is. --jobs, --dask and --timeout may differ: they
    change no byte.

    Example: calibrate collect --head max-retrieval --sizes 16..1024 --sets 512 --out runs/try

    Example: calibrate collect --logits mine.npz
    """
    from calibrate.cli.loading import load_head, read_logits
    from calibrate.report.collection_record import rows_result

    rows = load_head(request.head) if request.logits is None else read_logits(request.logits)
    return rows_result(collect_rows(request, rows))


def collect_rows(request: CollectRequest, source: "Head | Arrays") -> "RowCollection":
    """Collects rows of a head or of logits."""
    from calibrate import pipeline
    from calibrate.datasets.logits_files import Arrays
    from calibrate.datasets.resume import discard_collection
    from calibrate.rows.collect import collect_arrays

    name = source.name if isinstance(source, Arrays) else Path(source.name).stem
    folder = request.out or Path("runs") / name
    if request.overwrite:
        discard_collection(folder)
    kept = int(request.max_bytes)
    with Steps() as steps:
        if isinstance(source, Arrays):
            found = collect_arrays(source, folder, kept, steps, request.keep, request.workers)
        else:
            found = pipeline.collect(
                source,
                request.set_sizes,
                request.sets,
                seed=request.seed,
                folder=folder,
                keep=request.keep,
                max_bytes=kept,
                jobs=request.workers,
                progress=steps,
            )
    if not steps.done:
        stderr.print(f"{folder} is already complete")
    return found
