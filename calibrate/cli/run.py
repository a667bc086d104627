"""`calibrate run`: collect, fit, evaluate and report on one head."""

from typing import Annotated

import typer

from calibrate.cli.options import (
    BytesOption,
    HeadOption,
    JsonOption,
    SeedOption,
    SetsOption,
    SizesOption,
    StoreOption,
    parse_bytes,
    parse_sizes,
)
from calibrate.report.terminal import show

NameOption = Annotated[str, typer.Option(help="Name of the fit, and of its folder in runs/.")]


def run(
    head: HeadOption = "max-retrieval",
    sizes: SizesOption = "16..4096",
    sets: SetsOption = 4096,
    seed: SeedOption = 0,
    name: NameOption = "quickstart",
    max_bytes: BytesOption = "1GB",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Collect, fit, evaluate and report on one head.

    The head is scored before and after on fresh sets; the fit is published as NAME.

    Example: calibrate run
    """
    from calibrate.cli.run_steps import run_all

    n, n_bytes = parse_sizes(sizes), parse_bytes(max_bytes)
    record = run_all(head, n, sets, seed, name=name, max_bytes=n_bytes, store=store)
    show(record, as_json)
