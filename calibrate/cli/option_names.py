"""Messages that reach the command line: the parameters that they name are its options."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from typer.core import TyperCommand

from calibrate.errors import CalibrateError, as_option

# Parameters whose options have other names: the first that the command has.
OPTIONS: Mapping[str, Sequence[str]] = {"folder": ("out", "name")}


def option_of(options: Collection[str], name: str, value: str) -> str:
    """The option for a parameter among those of a command, as "--max-kl", with its value."""
    names = OPTIONS.get(name, (name,))
    known = [x for x in names if as_option(x, "") in options]
    return as_option((known or names)[0], value)


def spell_options(error: CalibrateError, options: Collection[str]) -> None:
    """Gives an error the text that the user of a command with these options reads."""
    error.args = (error.spelled(partial(option_of, options)),)


class Command(TyperCommand):
    """A command whose errors name its options."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CalibrateError as error:
            spell_options(error, {name for option in self.params for name in option.opts})
            raise
