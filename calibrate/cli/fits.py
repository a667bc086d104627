"""`calibrate fits`: list, show and verify published fits."""

from dataclasses import dataclass
from typing import Annotated

import typer
from typer import Argument

from calibrate.cli.options import ReadStore
from calibrate.cli.request import Request, add_command
from calibrate.report.blocks import Record

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, show and verify published fits.",
)

Reference = Annotated[str, Argument(help="NAME, NAME@3, a file, or an address.")]


@dataclass(frozen=True, kw_only=True)
class ListRequest(Request):
    store: ReadStore = None


def list_fits(request: ListRequest) -> Record:
    """List the published fits of every store.

    Example: calibrate fits list
    """
    from calibrate.report.store_records import list_stores

    return list_stores(request.store)


@dataclass(frozen=True)
class ShowRequest(ListRequest):
    reference: Reference


def show(request: ShowRequest) -> Record:
    """Show one fit: curve, quality, source, load line.

    Example: calibrate fits show max-retrieval
    """
    from calibrate.report.fit_record import show_fit

    return show_fit(request.reference, request.store)


@dataclass(frozen=True)
class VerifyRequest(ListRequest):
    reference: Annotated[str | None, Argument(help="A fit [default: every one]")] = None


def verify(request: VerifyRequest) -> Record:
    """Check digests and check pairs; exit 1 on a failure.

    With --store and no reference, only that store is checked.

    Example: calibrate fits verify
    """
    from calibrate.report.store_records import audit_fits

    return audit_fits(request.reference, request.store)


add_command(app, list_fits, "list")
for act in (show, verify):
    add_command(app, act)
