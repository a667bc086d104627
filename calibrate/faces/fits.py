"""`calibrate fits`: look at published fits, compare, verify, alias and yank them."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from calibrate.errors import CoefficientsError
from calibrate.faces.options import check_figure

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Published fits: list, show, compare and verify them, move aliases, yank versions.",
)

StoreOption = Annotated[
    Path | None,
    typer.Option(help="Store to look in first; then $CALIBRATE_FITS, ./fits, the package's fits."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ReferenceArgument = Annotated[str, typer.Argument(help="NAME, NAME@3, NAME@ALIAS, or a file.")]
PinnedArgument = Annotated[str, typer.Argument(help="The version: NAME@3.")]


@app.command("list")
def list_fits(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Which fits there are, their versions and aliases, and the store that each comes from.

    Example: calibrate fits list
    """
    from calibrate.faces import fit_views
    from calibrate.files.store import origins

    found = fit_views.list_names(origins(store))
    if as_json:
        _print_json(found)
    else:
        fit_views.print_names(found)


@app.command()
def show(
    reference: ReferenceArgument,
    store: StoreOption = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw beta over entropy into this .png file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """One fit: its polynomial, guards, quality and source, and the line that loads it.

    Example: calibrate fits show max-retrieval
    """
    from calibrate.faces import fit_views
    from calibrate.files.store import load

    check_figure(figure)
    coefficients = load(reference, store)
    if figure:
        from calibrate.faces.plots import save_beta_figure

        save_beta_figure(figure, coefficients)
    if as_json:
        _print_json(fit_views.fit_record(coefficients, figure))
    else:
        fit_views.print_fit(coefficients, figure)


@app.command()
def diff(
    a: ReferenceArgument,
    b: ReferenceArgument,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """How much two fits differ: the largest change of beta over the common domain, and the fields.

    Example: calibrate fits diff paper max-retrieval
    """
    from calibrate.faces import fit_views
    from calibrate.files.difference import compare
    from calibrate.files.store import load

    before, after = load(a, store), load(b, store)
    difference = compare(before, after)
    if as_json:
        _print_json(fit_views.difference_record(before, after, difference))
    else:
        fit_views.print_difference(before, after, difference)


@app.command()
def verify(
    reference: Annotated[
        str | None, typer.Argument(help="NAME, NAME@3, NAME@ALIAS, or a file; all if left out.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Checks the digests, check pairs, places and logs of a fit, or of every store.

    With --store and no reference, of that store alone. Exit code 1 if anything fails.

    Example: calibrate fits verify
    """
    from calibrate.faces import fit_views
    from calibrate.files.audit import audit_reference, audit_store
    from calibrate.files.store import stores

    if reference:
        verdicts = audit_reference(reference, store)
    elif store and not store.is_dir():
        raise CoefficientsError(f"{store} is no folder; give a store of fits")
    else:
        folders = fit_views.distinct([store] if store else stores())
        verdicts = [verdict for folder in folders for verdict in audit_store(folder)]
    if as_json:
        _print_json(fit_views.verdict_records(verdicts))
    else:
        fit_views.print_verdicts(verdicts)
    failed = [verdict for verdict in verdicts if verdict.error]
    if failed:
        raise CoefficientsError(
            f"{len(failed)} of {len(verdicts)} failed, the first: {failed[0].error}"
        )


@app.command()
def alias(
    reference: PinnedArgument,
    name: Annotated[str, typer.Argument(help="The alias, such as stable.")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Makes NAME@ALIAS lead to a version, wherever it led before; the log keeps every move.

    Example: calibrate fits alias mine@3 stable
    """
    from calibrate.faces import fit_views
    from calibrate.files import store as fits_store

    held = fits_store.alias(reference, name, store)
    if as_json:
        _print_json(fit_views.name_record(held))
    else:
        print(f"{held.name}@{name} is {reference}")


@app.command()
def yank(
    reference: PinnedArgument,
    store: StoreOption = None,
    undo: Annotated[bool, typer.Option("--undo", help="Take the yank back.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Withdraws a version: the bare name skips it; its own number still loads, with a warning.

    Example: calibrate fits yank mine@3
    """
    from calibrate.faces import fit_views
    from calibrate.files import store as fits_store

    held = fits_store.yank(reference, store, undo)
    if as_json:
        _print_json(fit_views.name_record(held))
        return
    print(fit_views.yank_in_words(held, reference, undo))


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))
