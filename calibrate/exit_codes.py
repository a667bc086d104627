"""The exit codes of the command line."""

from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended."""

    DONE = 0
    ERROR = 1
    USAGE = 2  # an unknown command or option, or a value of the wrong type: by Typer
    QUALITY = 3  # the data or the fit is not good enough
    INTERRUPTED = 130
