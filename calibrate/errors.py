"""Errors for users, one line each with the cause and the remedy, and the exit codes."""

import re
import shlex
import sys
import warnings
from collections.abc import Iterable
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path

_MAX_LENGTH = 2000  # of a message
# Folders whose lines no warning names.
_LIBRARIES = (
    str(Path(__file__).parent),
    *(find_spec("numpy").submodule_search_locations or ()),  # type: ignore[union-attr]
)
# The login in an address: "user:password@" or "token@". Printed as a path, an address may have lost
# one of its two slashes. A password may hold a slash; digits before a slash are a port.
_LOGIN = re.compile(
    r"(\b[A-Za-z][A-Za-z0-9+.-]+:/{1,2})(?:[^\s/?#]*@|[^\s/?#@:]*:(?!\d*/)[^\s@]*@)"
)


class ExitCode(IntEnum):
    """The exit codes of the command line."""

    DONE = 0
    ERROR = 1
    USAGE = 2  # an unknown command or option, or a value of the wrong type: by Typer
    QUALITY = 3  # the answer is no: too few inputs, no gain, or a difference
    INTERRUPTED = 130


def install(extra: str) -> str:
    """The command that installs one of the extras; no index has this package."""
    return f"pip install -e '.[{extra}]' in a clone of calibrate"


def command(words: str, **options: str | bool) -> str:
    """A command line to run, quoted for a shell; a flag has the value True."""
    given = (as_option(name, shlex.quote(str(value))) for name, value in options.items())
    return " ".join(["calibrate", *words.split(), *given])


def as_option(name: str, value: str) -> str:
    """A parameter as an option of the command line; with no value or "True", as a flag."""
    option = f"--{name.replace('_', '-')}"
    return f"{option} {value}" if value not in ("", "True") else option


def printable(text: str, kept: str = "") -> str:
    """The text with control characters, direction marks and lone surrogates escaped.

    Characters in `kept` stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def without_login(text: str) -> str:
    """The text with "***" in place of user names and passwords in addresses."""
    return _LOGIN.sub(r"\1***@", text)


def warn_user(message: str) -> None:
    """Warns at the line of the user's code, outside of this package and of NumPy's decorators.

    Python 3.11 has no `skip_file_prefixes`; there it is the line that called the caller's caller.
    """
    if sys.version_info >= (3, 12):
        warnings.warn(message, skip_file_prefixes=_LIBRARIES)
    else:
        warnings.warn(message, stacklevel=4)


class CalibrateError(Exception):
    """An error that the user can correct; the command line prints it and exits with `exit_code`.

    Messages name untrusted paths and values: so unprintable characters are escaped, passwords in
    addresses are masked, and long messages are cut in the middle.

    Args:
      message: one line; parameters are spelled as in Python: `max_kl=`, `overwrite=True`.
      parameter: the names of these parameters; the command line replaces them by its options.
    """

    exit_code = ExitCode.ERROR

    def __init__(self, message: str, *, parameter: str | Iterable[str] = ()):
        line = without_login(" ".join(message.splitlines()))
        if len(line) > _MAX_LENGTH:
            line = f"{line[: _MAX_LENGTH // 2]} ... {line[-_MAX_LENGTH // 2 :]}"
        super().__init__(printable(line))
        self.parameters = (parameter,) if isinstance(parameter, str) else tuple(parameter)


class DamagedError(CalibrateError):
    """A readable file with invalid content."""


class CoefficientsError(CalibrateError):
    """An error of a coefficient file, a reference to one, or a store."""


class QualityError(CalibrateError):
    """The answer is no: the data or the fit is not good enough to go on."""

    exit_code = ExitCode.QUALITY
