"""Collecting with progress on stderr, from a head or from logits on disk."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from calibrate.cli.loading import load_head
from calibrate.cli.progress import Steps
from calibrate.files.collection import Progress, discard_collection
from calibrate.files.rows import COUNTS, RowCollection, share_misranked
from calibrate.parallel.jobs import ONE_PROCESS, Jobs
from calibrate.report.streams import stderr
from calibrate.rows.collect import collect, collect_arrays
from calibrate.rows.heads import Head
from calibrate.rows.logits_files import Arrays
from calibrate.rows.work_units import Unit, plan_units


def collect_from_head(
    head: str | Head,
    sizes: list[int],
    sets: int,
    seed: int,
    *,
    folder: Path | None,
    max_bytes: int,
    keep: str = "all",
    jobs: Jobs = ONE_PROCESS,
    fresh: bool = False,
) -> RowCollection:
    """Collects from a head, with a line per set size; the folder's default is runs/NAME."""
    loaded = load_head(head) if isinstance(head, str) else head
    folder = folder or Path("runs") / Path(loaded.name).stem
    units = [unit for size in sizes for unit in plan_units(size, sets)]
    if fresh:
        discard_collection(folder)
    with _progress(units, folder, jobs) as report:
        return collect(loaded, sizes, sets, seed, folder, max_bytes, report, keep, jobs)


def collect_from_files(
    path: Path, folder: Path | None, max_bytes: int, keep: str, jobs: Jobs, *, fresh: bool
) -> RowCollection:
    """Collects from logits on disk, with a line per set size; the default folder is runs/NAME."""
    stderr.print(f"reading {path}")
    arrays = Arrays(path)
    folder = folder or Path("runs") / arrays.name
    return collect_from_arrays(arrays, folder, max_bytes, keep, jobs, fresh=fresh)


def collect_from_arrays(
    arrays: Arrays,
    folder: Path,
    max_bytes: int,
    keep: str = "all",
    jobs: Jobs = ONE_PROCESS,
    *,
    fresh: bool,
) -> RowCollection:
    """Collects from logits that were read, with a line per set size."""
    units = [unit for size in arrays.sizes for unit in plan_units(size, arrays.count(size))]
    if fresh:
        discard_collection(folder)
    with _progress(units, folder, jobs) as report:
        return collect_arrays(arrays, folder, max_bytes, report, keep, jobs)


@contextlib.contextmanager
def _progress(
    units: Sequence[Unit], folder: Path, jobs: Jobs
) -> Iterator[Callable[[Progress], None]]:
    """The function to call after each unit; it prints a line per set size."""
    finished: dict[int, list[Progress]] = {unit.size: [] for unit in units}
    n_units = Counter(unit.size for unit in units)
    items = sum(unit.size * unit.sets for unit in units)
    with Steps("collecting", len(units), items, at_once=jobs.uses_workers) as steps:

        def report(progress: Progress) -> None:
            size = progress.entry["size"]
            finished[size].append(progress)
            line = None
            if len(finished[size]) == n_units[size]:
                line = _line(size, finished[size])
            steps.advance(line, size * progress.entry["counts"]["rows"], progress.resumed)

        yield report
    if not steps.done:
        stderr.print(f"{folder} is already complete")


def _line(size: int, finished: Sequence[Progress]) -> str:
    """The counts of one set size."""
    counts = {key: sum(p.entry["counts"][key] for p in finished) for key in COUNTS}
    line = f"  n = {size:>6,}  {counts['rows']:,} sets  {share_misranked(counts):6.1%} misranked"
    return line + "  (already collected)" * all(progress.resumed for progress in finished)
