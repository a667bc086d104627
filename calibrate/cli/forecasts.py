"""What `collect --dry-run` says: as a table, and as a record for --json."""

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from calibrate.cli.progress import in_words
from calibrate.cli.steps import load
from calibrate.collecting.collect import source_of_arrays, source_of_head
from calibrate.collecting.forecast import Forecast, forecast
from calibrate.heads.logits_files import Arrays
from calibrate.parallel.jobs import Jobs
from calibrate.report.console import print_whole, stderr, stdout


def foresee(
    reference: str, logits: Path | None, sizes: list[int], sets: int, seed: int, max_bytes: int,
    keep: str, jobs: Jobs,
) -> Forecast:  # fmt: skip
    """What collecting from a head, or from arrays on disk, would hold and take."""
    if logits is not None:
        stderr.print(f"reading {logits}")
        source = source_of_arrays(Arrays(logits))
    else:
        source = source_of_head(load(reference), sizes, sets, seed)
    stderr.print("running a hundredth; nothing is written")
    return forecast(source, max_bytes, keep, jobs)


def forecast_record(expected: Forecast) -> dict[str, Any]:
    """All of it, for --json."""
    return {
        "sizes": [size._asdict() for size in expected.sizes],
        "rows": expected.rows,
        "bytes": expected.bytes,
        "seconds": expected.seconds,
    }


def print_forecast(expected: Forecast) -> None:
    """A line per set size, and the sums."""
    table = Table(box=box.SIMPLE_HEAD, title="What to expect", title_justify="left")
    for heading in ("n", "sets", "kept", "MB", "time"):
        table.add_column(heading, justify="right")
    for size in expected.sizes:
        table.add_row(
            f"{size.size:,}", f"{size.sets:,}", f"{size.rows:,}", f"{size.bytes / 1e6:,.1f}",
            in_words(size.seconds),
        )  # fmt: skip
    print_whole(table)
    stdout.print(
        f"{expected.rows:,} rows, {expected.bytes / 1e6:,.1f} MB, about "
        f"{in_words(expected.seconds)}; nothing was written"
    )
