"""Errors for users: one line each, with the cause and the remedy.

A message names a parameter by `parameter`, and its readers see it as they write it: `max_kl=` in
Python, `--max-kl` on the command line.
"""

import re
import shlex
from collections.abc import Callable
from itertools import chain, zip_longest

from calibrate.exit_codes import ExitCode

_LONGEST = 2000
# Around a parameter: noncharacters of Unicode, which are escaped wherever else they stand.
_BEGIN = "\ufdd0"
_END = "\ufdd1"
_PARAMETER = re.compile(rf"{_BEGIN}([a-z_]+)=([A-Za-z0-9_.+-]*){_END}")
_FLAG = str(True)
_NUMBER = re.compile(r"-?([0-9]+(\.[0-9]+)?(e[+-][0-9]+)?|inf)")
# In an address, what stands before an @: user:password, or a token. A path has one slash for two,
# a password may hold a slash, and digits before a slash are a port.
_LOGIN = re.compile(
    r"(\b[A-Za-z][A-Za-z0-9+.-]+:/{1,2})(?:[^\s/?#]*@|[^\s/?#@:]*:(?!\d*/)[^\s@]*@)"
)


def install(extra: str) -> str:
    """The command that installs one of the extras; no index has this package."""
    return f"pip install -e '.[{extra}]' in a clone of calibrate"


def parameter(name: str, value: str | bool = "") -> str:
    """A parameter in the message of a CalibrateError, with the value to give if there is one."""
    return f"{_BEGIN}{name}={value}{_END}"


def command(words: str, **options: str | bool) -> str:
    """A command line to run, quoted for a shell; a value True is that of a flag."""
    given = (as_option(name, shlex.quote(str(value))) for name, value in options.items())
    return " ".join(["calibrate", *words.split(), *given])


def as_keyword(name: str, value: str) -> str:
    """A parameter as Python has it."""
    is_text = value not in ("", _FLAG) and not _NUMBER.fullmatch(value)
    return f'{name}="{value}"' if is_text else f"{name}={value}"


def as_option(name: str, value: str) -> str:
    """A parameter as a command line has it."""
    option = f"--{name.replace('_', '-')}"
    return f"{option} {value}" if value not in ("", _FLAG) else option


def spelled(marked: str, spell: Callable[[str, str], str]) -> str:
    """A text from `CalibrateError.marked` with each parameter as `spell(name, value)` has it."""
    return _PARAMETER.sub(lambda match: spell(match[1], match[2]), marked)


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
    addresses masked, and long messages cut in the middle. The text of the error has parameters as
    Python spells them.
    """

    exit_code = ExitCode.ERROR

    def __init__(self, message: str):
        line = without_login(" ".join(message.splitlines()))
        if len(line) > _LONGEST:
            line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
        texts = _PARAMETER.split(line)  # text, name, value, text, ...
        self._texts = [printable(text) for text in texts[::3]]
        self._parameters = list(zip(texts[1::3], texts[2::3], strict=True))
        super().__init__(self.spelled(as_keyword))

    def spelled(self, spell: Callable[[str, str], str]) -> str:
        """The message with each parameter as `spell(name, value)` has it; "" is no value."""
        words = [spell(name, value) for name, value in self._parameters]
        return "".join(chain.from_iterable(zip_longest(self._texts, words, fillvalue="")))

    @property
    def marked(self) -> str:
        """The message with its parameters as `parameter` has them, to be a part of another."""
        return self.spelled(parameter)


class DamagedError(CalibrateError):
    """A file that can be read, with invalid content."""


class CoefficientsError(CalibrateError):
    """An error of a coefficient file, a reference to one, or a store."""


class QualityError(CalibrateError):
    """The data or the fit is not good enough to go on."""

    exit_code = ExitCode.QUALITY
