"""`calibrate fits`: list, show and verify saved fits."""

from typing import Annotated

import typer
from typer import Argument

from calibrate.cli.option_names import Command
from calibrate.cli.options import AsJson, ReadStore
from calibrate.report.terminal import show as show_record

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, show and verify saved fits.",
)


@app.command("list", cls=Command)
def list_fits(*, store: ReadStore = None, as_json: AsJson = False) -> None:
    """List the saved fits of every store.

    Example: calibrate fits list
    """
    from calibrate.report.store_records import list_stores

    show_record(list_stores(store), as_json)


@app.command(cls=Command)
def show(
    reference: Annotated[str, Argument(help="NAME, NAME@3, a file, or an address.")],
    *,
    store: ReadStore = None,
    as_json: AsJson = False,
) -> None:
    """Show one fit: rule, evidence, source, load line.

    Example: calibrate fits show max-retrieval
    """
    from calibrate.report.fit_record import show_fit

    show_record(show_fit(reference, store), as_json)


@app.command(cls=Command)
def verify(
    reference: Annotated[str | None, Argument(help="A fit [default: every one]")] = None,
    *,
    store: ReadStore = None,
    as_json: AsJson = False,
) -> None:
    """Check digests and check pairs; exit 1 on a failure.

    With --store and no reference, only that store is checked.

    Example: calibrate fits verify
    """
    from calibrate.report.store_records import audit_fits

    show_record(audit_fits(reference, store), as_json)
