"""The `calibrate` app: its commands and global options."""

from typing import Annotated

import typer

from calibrate.cli.check_engine import check_engine_command
from calibrate.cli.check_softmax import check_softmax_command
from calibrate.cli.collect import collect_command
from calibrate.cli.command import Command
from calibrate.cli.diagnose import diagnose_command
from calibrate.cli.evaluate import evaluate_command
from calibrate.cli.exit_code import Commands
from calibrate.cli.export import export_command
from calibrate.cli.fit import fit_command
from calibrate.cli.fits import list_command, show_command, verify_command
from calibrate.cli.model_collect import model_collect_command
from calibrate.cli.model_evaluate import model_evaluate_command
from calibrate.cli.model_fit import model_fit_command
from calibrate.cli.report import report_command
from calibrate.cli.run import run_command
from calibrate.cli.solve import solve_command
from calibrate.version import __version__

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Calibrate adaptive-temperature softmax for your own attention head or model: collect "
    "its inputs, fit a versioned coefficient file, load it at inference.",
    epilog="Example: calibrate run --logits mine.npz",
)
model_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Calibrate a language model by its answers.",
)
fits_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List, show and verify saved fits."
)

app.command("run", cls=Command)(run_command)
app.command("collect", cls=Command)(collect_command)
app.command("solve", cls=Command)(solve_command)
app.command("fit", cls=Command)(fit_command)
app.command("evaluate", cls=Command)(evaluate_command)
app.command("diagnose", cls=Command)(diagnose_command)
app.command("report", cls=Command)(report_command)
app.command("export", cls=Command)(export_command)
app.command("check-engine", cls=Command)(check_engine_command)
app.command("check-softmax", cls=Command)(check_softmax_command)
model_app.command("collect", cls=Command)(model_collect_command)
model_app.command("fit", cls=Command)(model_fit_command)
model_app.command("evaluate", cls=Command)(model_evaluate_command)
fits_app.command("list", cls=Command)(list_command)
fits_app.command("show", cls=Command)(show_command)
fits_app.command("verify", cls=Command)(verify_command)
app.add_typer(model_app, name="model")
app.add_typer(fits_app, name="fits")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass
