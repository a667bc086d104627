"""The exit code of the command line: how a command ends, and the one line that says why.

`ExitCode` lists the codes. Errors of the package carry theirs; Typer's own are usage errors.
"""

import contextlib
import io
import os
import sys
import warnings
from typing import Any

import typer
from typer.core import TyperGroup

from calibrate.errors import CalibrateError, ExitCode
from calibrate.report.terminal import stderr


class Commands(TyperGroup):
    """The commands of the app. A failure is one line on stderr, and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default", UserWarning)
                warnings.showwarning = _print_warning
                return super().invoke(ctx)
        except (BrokenPipeError, typer.Abort):
            raise
        except Exception as error:
            is_of_typer = hasattr(error, "exit_code") and not isinstance(error, CalibrateError)
            if ctx.params["debug"] or is_of_typer:
                raise
            stderr.print("calibrate: " + " ".join(_describe(error).split()))
            sys.exit(getattr(error, "exit_code", ExitCode.ERROR))


def run_app(app: typer.Typer) -> Any:
    """Runs the app as a process; returns its exit code.

    Output that cannot be written, because the disk is full for instance, is a failure. A closed
    pipe is one, too, but without a message.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None if it is closed
            stream.reconfigure(errors="replace")  # for terminals that are not UTF-8
    code: Any = ExitCode.DONE
    failure: OSError | None = None
    try:
        app()
    except SystemExit as end:
        code = end.code or ExitCode.DONE
    except OSError as error:  # of --help or --version, which no command prints
        failure = error
    failure = _flush(sys.stdout) or failure
    if failure and not code and not isinstance(failure, BrokenPipeError):
        with contextlib.suppress(OSError):  # stderr may fail as well
            stderr.print(f"calibrate: {_describe(failure)}")
    failure = _flush(sys.stderr) or failure
    return code or (ExitCode.ERROR if failure else ExitCode.DONE)


def _describe(error: Exception) -> str:
    """Describes a failure in one line."""
    if isinstance(error, CalibrateError):
        return str(error)
    if isinstance(error, OSError):
        path = error.filename or "output"
        return f"{path}: {error.strerror or error}; check the path and the disk"
    return f"{type(error).__name__}: {error}; --debug shows the traceback"


def _print_warning(message: Any, *_: Any, **__: Any) -> None:
    stderr.print("calibrate: warning: " + " ".join(str(message).split()))


def _flush(stream: Any) -> OSError | None:
    """Flushes a stream; on failure returns the error, and sends later output nowhere."""
    try:
        if stream is not None:
            stream.flush()
    except OSError as failure:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return failure
    return None
