"""`calibrate fits`: list, show and verify saved fits."""

from typing import Annotated

from typer import Argument

from calibrate.cli.options import AsJson, ReadStore
from calibrate.report.terminal import show


def list_command(*, store: ReadStore = None, as_json: AsJson = False) -> None:
    """List the saved fits of every store.

    Example: calibrate fits list
    """
    from calibrate.report.store_records import list_stores

    show(list_stores(store), as_json)


def show_command(
    reference: Annotated[str, Argument(help="NAME, NAME@3, a file, or an address.")],
    *,
    store: ReadStore = None,
    as_json: AsJson = False,
) -> None:
    """Show a fit: its rule, evidence, source and line to load it.

    Example: calibrate fits show mine
    """
    from calibrate.report.fit_record import FitRecord
    from calibrate.store.loading import load

    show(FitRecord(load(reference, store), of_file=True), as_json)


def verify_command(
    reference: Annotated[
        str | None, Argument(help="NAME, NAME@3, a file, or an address [default: every fit]")
    ] = None,
    *,
    store: ReadStore = None,
    as_json: AsJson = False,
) -> None:
    """Verify the digests and check pairs of saved fits.

    With --store and no reference, only that store is verified.

    Example: calibrate fits verify
    """
    from calibrate.report.store_records import audit_fits

    show(audit_fits(reference, store), as_json)
