"""`calibrate fits`: list, show, compare and verify published fits, alias and yank versions."""

from dataclasses import dataclass
from typing import Annotated

import typer
from typer import Argument, Option

from calibrate.cli.options import ReadStore
from calibrate.cli.request import Request, add_command
from calibrate.report.blocks import Record

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, show, compare and verify published fits; alias and yank.",
)

Reference = Annotated[str, Argument(help="NAME, NAME@3, NAME@ALIAS, a file, or an address.")]
Pinned = Annotated[str, Argument(help="The version: NAME@3.")]


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
class DiffRequest(ListRequest):
    a: Reference
    b: Reference


def diff(request: DiffRequest) -> Record:
    """Compare two fits: the largest change of beta, and fields.

    Beta is compared where either was fitted.

    Example: calibrate fits diff paper max-retrieval
    """
    from calibrate.report.store_records import compare_fits

    return compare_fits(request.a, request.b, request.store)


@dataclass(frozen=True)
class VerifyRequest(ListRequest):
    reference: Annotated[str | None, Argument(help="A fit [default: every one]")] = None


def verify(request: VerifyRequest) -> Record:
    """Check digests, check pairs and states; exit 1 on a failure.

    With --store and no reference, only that store is checked.

    Example: calibrate fits verify
    """
    from calibrate.report.store_records import audit_fits

    return audit_fits(request.reference, request.store)


@dataclass(frozen=True)
class AliasRequest(ListRequest):
    reference: Pinned
    name: Annotated[str, Argument(help="The alias, such as stable.")]


def alias(request: AliasRequest) -> Record:
    """Point NAME@ALIAS to a version.

    An alias that exists is moved.

    Example: calibrate fits alias mine@3 stable
    """
    from calibrate.report.store_records import move_alias

    return move_alias(request.reference, request.name, request.store)


@dataclass(frozen=True)
class YankRequest(ListRequest):
    reference: Pinned
    undo: Annotated[bool, Option("--undo", help="Undo the yank.")] = False


def yank(request: YankRequest) -> Record:
    """Withdraw a version, or undo that.

    The bare name skips a yanked version; its number still loads, with a warning.

    Example: calibrate fits yank mine@3
    """
    from calibrate.report.store_records import yank_version

    return yank_version(request.reference, request.store, request.undo)


add_command(app, list_fits, "list")
for act in (show, diff, verify, alias, yank):
    add_command(app, act)
