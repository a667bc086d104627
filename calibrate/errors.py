"""Errors for users: one line each, with the cause and the remedy."""

import re
import shlex
from collections.abc import Iterable

from calibrate.exit_codes import ExitCode

_LONGEST = 2000
# In an address, what stands before an @: user:password, or a token. A path has one slash for two,
# a password may hold a slash, and digits before a slash are a port.
_LOGIN = re.compile(
    r"(\b[A-Za-z][A-Za-z0-9+.-]+:/{1,2})(?:[^\s/?#]*@|[^\s/?#@:]*:(?!\d*/)[^\s@]*@)"
)


def install(extra: str) -> str:
    """The command that installs one of the extras; no index has this package."""
    return f"pip install -e '.[{extra}]' in a clone of calibrate"


def command(words: str, **options: str | bool) -> str:
    """A command line to run, quoted for a shell; a value True is that of a flag."""
    given = (as_option(name, shlex.quote(str(value))) for name, value in options.items())
    return " ".join(["calibrate", *words.split(), *given])


def as_option(name: str, value: str) -> str:
    """A parameter as a command line has it; without a value, or with True, it is a flag."""
    option = f"--{name.replace('_', '-')}"
    return f"{option} {value}" if value not in ("", "True") else option


def printable(text: str, kept: str = "") -> str:
    """A text whose control characters, marks of direction and lone surrogates are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def without_login(text: str) -> str:
    """A text whose addresses have "***" for user names and passwords."""
    return _LOGIN.sub(r"\1***@", text)


class CalibrateError(Exception):
    """An error that the user can correct; the command line prints it and exits with `exit_code`.

    Messages name untrusted paths and values: unprintable characters are escaped, passwords of
    addresses masked, and long messages cut in the middle.

    Args:
      message: one line, with parameters as Python has them: `max_kl=`, `overwrite=True`.
      parameter: the names of these; the command line replaces them by its options.
    """

    exit_code = ExitCode.ERROR

    def __init__(self, message: str, *, parameter: str | Iterable[str] = ()):
        line = without_login(" ".join(message.splitlines()))
        if len(line) > _LONGEST:
            line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
        super().__init__(printable(line))
        self.parameters = (parameter,) if isinstance(parameter, str) else tuple(parameter)


class DamagedError(CalibrateError):
    """A file that can be read, with invalid content."""


class CoefficientsError(CalibrateError):
    """An error of a coefficient file, a reference to one, or a store."""


class QualityError(CalibrateError):
    """The data or the fit is not good enough to go on."""

    exit_code = ExitCode.QUALITY
