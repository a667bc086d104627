"""The `calibrate` app: its commands, global options, and how it runs as a process."""

import io
import os
import sys
from typing import Annotated

import typer

import calibrate
from calibrate.cli import fits, interrupts
from calibrate.cli.collect import collect
from calibrate.cli.compiled_programs import keep_compiled_programs
from calibrate.cli.diagnose import diagnose
from calibrate.cli.evaluate import evaluate
from calibrate.cli.exit_codes import Commands
from calibrate.cli.export import export
from calibrate.cli.fit import fit
from calibrate.cli.progress import Heartbeat
from calibrate.cli.report import report
from calibrate.cli.run import run

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Calibrate adaptive-temperature softmax for your own attention head or model: collect "
    "what it does, fit a versioned coefficient file, load it at inference.",
)

for command in (run, collect, fit, diagnose, evaluate, report, export):
    app.command()(command)
app.add_typer(fits.app, name="fits")


def main() -> None:
    """Runs the app, and never is silent for long."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for terminals that are not UTF-8
    keep_compiled_programs()
    try:
        with Heartbeat():
            app()
    except SystemExit as end:
        if end.code == interrupts.EXIT_CODE:
            # JAX may be at work in other threads still, and crashes in an orderly exit.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(interrupts.EXIT_CODE)
        raise


def _print_version(wanted: bool) -> None:
    if wanted:
        print(calibrate.__version__)
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
