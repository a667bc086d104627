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
from calibrate.report.blocks import Record
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from calibrate.files.resuming import Progress
    from calibrate.files.rows import RowCollection
    from calibrate.rows.heads import Head
    from calibrate.rows.logits_files import Arrays
    from calibrate.rows.work_units import Unit


@dataclass(frozen=True)
class CollectRequest(Request, Workers, HeadOrLogits):
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


def collect(request: CollectRequest) -> Record:
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

    parse_bytes(request.max_bytes)
    rows = load_head(request.head) if request.logits is None else read_logits(request.logits)
    return rows_result(collect_rows(request, rows))


def collect_rows(request: CollectRequest, source: "Head | Arrays") -> "RowCollection":
    """Collects rows of a head or of logits, with a line per set size."""
    from calibrate.rows.collect import collect, collect_arrays
    from calibrate.rows.logits_files import Arrays
    from calibrate.rows.work_units import plan_units

    n_bytes, jobs = parse_bytes(request.max_bytes), request.workers
    if isinstance(source, Arrays):
        folder = request.out or Path("runs") / source.name
        units = [unit for n in source.sizes for unit in plan_units(n, source.count(n))]
        with _into(folder, request, units) as report:
            return collect_arrays(source, folder, n_bytes, report, request.keep, jobs)
    folder = request.out or Path("runs") / Path(source.name).stem
    units = [unit for n in request.set_sizes for unit in plan_units(n, request.sets)]
    with _into(folder, request, units) as report:
        return collect(
            source, request.set_sizes, request.sets, request.seed, folder, max_bytes=n_bytes,
            report=report, keep=request.keep, jobs=jobs,
        )  # fmt: skip


@contextlib.contextmanager
def _into(
    folder: Path, request: CollectRequest, units: Sequence["Unit"]
) -> Iterator[Callable[["Progress"], None]]:
    """Empties the folder if asked to; the function to call after each unit prints a line a size."""
    from calibrate.files.resuming import discard_collection

    if request.fresh:
        discard_collection(folder)
    finished: dict[int, list[Progress]] = {unit.size: [] for unit in units}
    n_units = Counter(unit.size for unit in units)
    items = sum(unit.size * unit.sets for unit in units)
    with Steps("collecting", len(units), items, at_once=request.workers.uses_workers) as steps:

        def report(progress: "Progress") -> None:
            size = progress.entry["size"]
            finished[size].append(progress)
            line = _line(size, finished[size]) if len(finished[size]) == n_units[size] else None
            steps.advance(line, size * progress.entry["counts"]["rows"], progress.resumed)

        yield report
    if not steps.done:
        stderr.print(f"{folder} is already complete")


def _line(size: int, finished: Sequence["Progress"]) -> str:
    """The counts of one set size."""
    from calibrate.files.bad_rows import COUNTS, share_misranked

    counts = {key: sum(p.entry["counts"][key] for p in finished) for key in COUNTS}
    line = f"  n = {size:>6,}  {counts['rows']:,} sets  {share_misranked(counts):6.1%} misranked"
    already = "  (already collected)" if all(progress.resumed for progress in finished) else ""
    return line + already
