"""`calibrate fits`: list, show, compare and verify published fits, alias and yank versions."""

from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli.options import JsonOption, ReadStoreOption, check_figure
from calibrate.errors import CoefficientsError
from calibrate.report.terminal import show as show_record

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, show, compare and verify published fits; alias and yank.",
)

FigureOption = Annotated[
    Path | None,
    typer.Option(callback=check_figure, help="Draw beta over entropy or set size into this .png."),
]
ReferenceArgument = Annotated[str, typer.Argument(help="NAME, NAME@3, NAME@ALIAS, or a file.")]
PinnedArgument = Annotated[str, typer.Argument(help="The version: NAME@3.")]


@app.command("list")
def list_fits(store: ReadStoreOption = None, as_json: JsonOption = False) -> None:
    """List the published fits of every store.

    Example: calibrate fits list
    """
    from calibrate.report.store_records import list_stores

    show_record(list_stores(store), as_json)


@app.command()
def show(
    reference: ReferenceArgument,
    store: ReadStoreOption = None,
    figure: FigureOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one fit: curve, quality, source, load line.

    Example: calibrate fits show max-retrieval
    """
    from calibrate.report.published_fit_record import show_fit

    show_record(show_fit(reference, store, figure), as_json)


@app.command()
def diff(
    a: ReferenceArgument,
    b: ReferenceArgument,
    store: ReadStoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two fits: the largest change of beta, and fields.

    Beta is compared where either was fitted.

    Example: calibrate fits diff paper max-retrieval
    """
    from calibrate.report.difference_record import compare_fits

    show_record(compare_fits(a, b, store), as_json)


@app.command()
def verify(
    reference: Annotated[
        str | None,
        typer.Argument(help="NAME, NAME@3, NAME@ALIAS, or a file [default: every fit]"),
    ] = None,
    store: ReadStoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check digests, check pairs and states; exit 1 on a failure.

    With --store and no reference, only that store is checked.

    Example: calibrate fits verify
    """
    from calibrate.report.store_records import audit_fits

    record = audit_fits(reference, store)
    show_record(record, as_json)
    if failure := record.failure():
        raise CoefficientsError(failure)


@app.command()
def alias(
    reference: PinnedArgument,
    name: Annotated[str, typer.Argument(help="The alias, such as stable.")],
    store: ReadStoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Point NAME@ALIAS to a version.

    An alias that exists is moved.

    Example: calibrate fits alias mine@3 stable
    """
    from calibrate.report.store_records import move_alias

    show_record(move_alias(reference, name, store), as_json)


@app.command()
def yank(
    reference: PinnedArgument,
    store: ReadStoreOption = None,
    undo: Annotated[bool, typer.Option("--undo", help="Undo the yank.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Withdraw a version, or undo that.

    The bare name skips a yanked version; its number still loads, with a warning.

    Example: calibrate fits yank mine@3
    """
    from calibrate.report.store_records import yank_version

    show_record(yank_version(reference, store, undo), as_json)
