"""`calibrate fits`: look at published fits, compare, verify, alias and yank them."""

from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli.options import JsonOption, check_figure, print_json
from calibrate.errors import CoefficientsError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Published fits: list, show, compare and verify them, move aliases, yank versions.",
)

StoreOption = Annotated[
    Path | None,
    typer.Option(help="Store to look in first; then $CALIBRATE_FITS, ./fits, the package's fits."),
]
ReferenceArgument = Annotated[str, typer.Argument(help="NAME, NAME@3, NAME@ALIAS, or a file.")]
PinnedArgument = Annotated[str, typer.Argument(help="The version: NAME@3.")]


@app.command("list")
def list_fits(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Which fits there are, and where each comes from.

    Example: calibrate fits list
    """
    from calibrate.files.store import origins
    from calibrate.report import fit_views

    found = fit_views.list_names(origins(store))
    if as_json:
        print_json(found)
    else:
        fit_views.print_names(found)


@app.command()
def show(
    reference: ReferenceArgument,
    store: StoreOption = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw beta over entropy, or set size, into this .png.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """One fit: curve, quality, source, load line.

    Example: calibrate fits show max-retrieval
    """
    from calibrate.files.store import load
    from calibrate.report import fit_views

    check_figure(figure)
    coefficients = load(reference, store)
    if figure:
        from calibrate.report.fit_plots import save_beta_figure

        save_beta_figure(figure, coefficients)
    if as_json:
        print_json(fit_views.fit_record(coefficients, figure))
    else:
        fit_views.print_fit(coefficients, figure)


@app.command()
def diff(
    a: ReferenceArgument,
    b: ReferenceArgument,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """The largest change of beta between two fits.

    Over the domain of both, and anywhere; and which fields differ.

    Example: calibrate fits diff paper max-retrieval
    """
    from calibrate.files.fit_difference import compare
    from calibrate.files.store import load
    from calibrate.report import fit_views

    before, after = load(a, store), load(b, store)
    difference = compare(before, after)
    if as_json:
        print_json(fit_views.difference_record(before, after, difference))
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
    """Check digests, check pairs and logs; exit 1 on a failure.

    With --store and no reference, that store alone is checked.

    Example: calibrate fits verify
    """
    from calibrate.files.store import stores
    from calibrate.files.store_audit import audit_reference, audit_store
    from calibrate.report import audit_views, fit_views

    if reference:
        verdicts = audit_reference(reference, store)
    else:
        folders = fit_views.distinct(stores(store)[:1] if store else stores())
        verdicts = [verdict for folder in folders for verdict in audit_store(folder)]
        if not verdicts:
            raise CoefficientsError(f"{folders[0]} holds no fits; give a store, STORE/NAME/1.json")
    if as_json:
        print_json(audit_views.verdict_records(verdicts))
    else:
        audit_views.print_verdicts(verdicts)
    failed = [verdict for verdict in verdicts if verdict.error]
    if failed:
        raise CoefficientsError(f"{len(failed)} of {len(verdicts)} failed; see above for each")


@app.command()
def alias(
    reference: PinnedArgument,
    name: Annotated[str, typer.Argument(help="The alias, such as stable.")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make NAME@ALIAS lead to a version.

    Wherever it led before; the log keeps every move.

    Example: calibrate fits alias mine@3 stable
    """
    from calibrate.files import publishing
    from calibrate.report import fit_views

    held = publishing.alias(reference, name, store)
    if as_json:
        print_json(fit_views.name_record(held))
    else:
        print(f"{held.name}@{name} is {reference}, in {held.folder.parent}")


@app.command()
def yank(
    reference: PinnedArgument,
    store: StoreOption = None,
    undo: Annotated[bool, typer.Option("--undo", help="Take the yank back.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Withdraw a version, or take that back.

    The bare name skips it; its own number still loads, with a warning.

    Example: calibrate fits yank mine@3
    """
    from calibrate.files import publishing
    from calibrate.report import fit_views

    held = publishing.yank(reference, store, undo)
    if as_json:
        print_json(fit_views.name_record(held))
        return
    for line in fit_views.yank_in_words(held, reference, undo):
        print(line)
