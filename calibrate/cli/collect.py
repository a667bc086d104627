"""`calibrate collect`: keep a sample of the rows of a head, or of logits on disk."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from calibrate.cli.options import Fresh, HeadOrLogits, MaxBytes, Sets, Sizes, Workers, parse_bytes
from calibrate.cli.progress import Steps
from calibrate.cli.request import Request
from calibrate.report.blocks import Result
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from calibrate.files.collection import Progress
    from calibrate.files.rows import RowCollection
    from calibrate.rows.heads import Head
    from calibrate.rows.logits_files import Arrays
    from calibrate.rows.work_units import Unit


@dataclass(frozen=True)
class CollectRequest(Request, Workers, HeadOrLogits):
    """What `calibrate collect` is asked for."""

    out: Annotated[
        Path | None,
        Option(help="Folder of the collection [default: runs/NAME of the head or file]"),
    ] = None
    fresh: Fresh = False
    keep: Annotated[
        Literal["all", "misranked"], Option(help="Up to 2,048 rows of each size, or the misranked.")
    ] = "all"
    max_bytes: MaxBytes = "1GB"
    _: KW_ONLY
    sizes: Sizes = "16..16384"
    sets: Sets = 4096


def collect(request: CollectRequest) -> Result:
    """Collect rows of a head or of logits.

    The head runs on sets of every size. The misranked rows are counted whichever rows are kept. Run
    the same command again to continue an interrupted collection or to repair damaged and missing
    shards; a complete collection is left as it is. --jobs, --dask and --stall may differ: they
    change no byte.

    Example: calibrate collect --head max-retrieval --sizes 16..1024 --sets 512 --out runs/try

    Example: calibrate collect --logits mine.npz
    """
    from calibrate.cli.loading import load_head, read_logits
    from calibrate.report.collection_record import rows_result

    if request.logits is not None:
        return rows_result(collect_from_logits(request, read_logits(request.logits)))
    parse_bytes(request.max_bytes)
    return rows_result(collect_from_head(request, load_head(request.head)))


def collect_from_head(request: CollectRequest, head: "Head") -> "RowCollection":
    """Collects rows of a head, with a line per set size."""
    from calibrate.rows.collect import collect as collect_rows
    from calibrate.rows.work_units import plan_units

    folder = request.out or Path("runs") / Path(head.name).stem
    units = [unit for size in request.set_sizes for unit in plan_units(size, request.sets)]
    with _into(folder, request, units) as report:
        return collect_rows(
            head, request.set_sizes, request.sets, request.seed, folder,
            parse_bytes(request.max_bytes), report, request.keep, request.workers,
        )  # fmt: skip


def collect_from_logits(request: CollectRequest, arrays: "Arrays") -> "RowCollection":
    """Collects rows of logits on disk, with a line per set size."""
    from calibrate.rows.collect import collect_arrays
    from calibrate.rows.work_units import plan_units

    folder, n_bytes = request.out or Path("runs") / arrays.name, parse_bytes(request.max_bytes)
    units = [unit for size in arrays.sizes for unit in plan_units(size, arrays.count(size))]
    with _into(folder, request, units) as report:
        return collect_arrays(arrays, folder, n_bytes, report, request.keep, request.workers)


@contextlib.contextmanager
def _into(
    folder: Path, request: CollectRequest, units: Sequence["Unit"]
) -> Iterator[Callable[["Progress"], None]]:
    """Empties the folder if asked to; the function to call after each unit prints a line a size."""
    from calibrate.files.collection import discard_collection

    if request.fresh:
        discard_collection(folder)
    finished: dict[int, list[Progress]] = {unit.size: [] for unit in units}
    n_units = Counter(unit.size for unit in units)
    items = sum(unit.size * unit.sets for unit in units)
    with Steps("collecting", len(units), items, at_once=request.workers.uses_workers) as steps:

        def report(progress: "Progress") -> None:
            size = progress.entry["size"]
            finished[size].append(progress)
            line = None
            if len(finished[size]) == n_units[size]:
                line = _line(size, finished[size])
            steps.advance(line, size * progress.entry["counts"]["rows"], progress.resumed)

        yield report
    if not steps.done:
        stderr.print(f"{folder} is already complete")


def _line(size: int, finished: Sequence["Progress"]) -> str:
    """The counts of one set size."""
    from calibrate.files.rows import COUNTS, share_misranked

    counts = {key: sum(p.entry["counts"][key] for p in finished) for key in COUNTS}
    line = f"  n = {size:>6,}  {counts['rows']:,} sets  {share_misranked(counts):6.1%} misranked"
    already = "  (already collected)" if all(progress.resumed for progress in finished) else ""
    return line + already
