"""The `calibrate` app: its commands, global options, and how it runs as a process."""

import contextlib
import io
import os
import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from calibrate.cli import (
    check_engine,
    collect,
    diagnose,
    evaluate,
    export,
    fit,
    fits,
    model_collect,
    model_evaluate,
    model_fit,
    report,
    run,
    solve,
)
from calibrate.cli.compiled_programs import keep_compiled_programs
from calibrate.cli.option_names import Command
from calibrate.errors import CalibrateError
from calibrate.exit_codes import ExitCode
from calibrate.report.streams import stderr
from calibrate.version import __version__


class Commands(TyperGroup):
    """The app's commands; a failure is one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default", UserWarning)
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except (BrokenPipeError, typer.Abort):
            raise
        except Exception as error:
            # What has an exit code and is not ours is Typer's own, a usage error for instance.
            ours = isinstance(error, CalibrateError)
            if ctx.params["debug"] or (hasattr(error, "exit_code") and not ours):
                raise
            _stop(_in_words(error), getattr(error, "exit_code", ExitCode.ERROR))


def _in_words(error: Exception) -> str:
    """Describes a failure in one line."""
    if isinstance(error, CalibrateError):
        return str(error)
    if isinstance(error, OSError):
        return (
            f"{error.filename or 'output'}: {error.strerror or error}; check the path and the disk"
        )
    return f"{type(error).__name__}: {error}; this is a bug; --debug shows the traceback"


def _show_warning(message: Any, *where: Any, **also: Any) -> None:
    stderr.print("calibrate: warning: " + " ".join(str(message).split()))


def _stop(message: str, exit_code: ExitCode) -> NoReturn:
    stderr.print("calibrate: " + " ".join(message.split()))
    sys.exit(exit_code)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Calibrate adaptive-temperature softmax for your own attention head or model: collect "
    "what it does, fit a versioned coefficient file, load it at inference.",
)
models = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Collect, fit and evaluate, by the answers of a language model.",
)

for command in (
    run.run,
    collect.collect,
    solve.solve,
    fit.fit,
    evaluate.evaluate,
    diagnose.diagnose,
    report.report,
    export.export,
    check_engine.check_engine,
):
    app.command(cls=Command)(command)
for of_model in (model_collect.collect, model_fit.fit, model_evaluate.evaluate):
    models.command(cls=Command)(of_model)
app.add_typer(models, name="model")
app.add_typer(fits.app, name="fits")


def run_app() -> Any:
    """Runs the app; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None if it is closed
            stream.reconfigure(errors="replace")  # for terminals that are not UTF-8
    keep_compiled_programs()
    code: Any = 0
    failure: OSError | None = None
    try:
        app()
    except SystemExit as end:
        code = end.code
    except OSError as of_help:  # or of --version: no command is under way
        failure = of_help
    failure = _flush(sys.stdout) or failure
    if failure and not code and not isinstance(failure, BrokenPipeError):
        with contextlib.suppress(OSError):  # stderr takes no more either
            stderr.print(f"calibrate: {_in_words(failure)}")
    failure = _flush(sys.stderr) or failure
    return code or (ExitCode.ERROR if failure else ExitCode.DONE)


def _flush(stream: Any) -> OSError | None:
    """Why a stream does not take its last text; it goes nowhere from then on."""
    try:
        if stream is not None:
            stream.flush()
    except OSError as failure:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return failure
    return None


def _print_version(wanted: bool) -> None:
    if wanted:
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
