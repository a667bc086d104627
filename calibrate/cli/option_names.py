"""Errors that reach the command line: the parameters that they name are its options."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from typer.core import TyperCommand

from calibrate.errors import CalibrateError, as_option

# Parameters whose options have other names: the first that the command has.
OPTIONS: Mapping[str, Sequence[str]] = {"folder": ("out", "name")}


def option_of(options: Collection[str], name: str) -> str:
    """The option of a command, as "--max-kl", for a parameter."""
    names = [as_option(x, "") for x in OPTIONS.get(name, (name,))]
    return next((x for x in names if x in options), names[0])


def with_options(error: CalibrateError, options: Collection[str]) -> str:
    """The message of an error, with the options of a command in place of its parameters.

    An alternative at the end, ", or NAME=True", that the command does not have is left out.
    """
    text = str(error)
    for name in error.parameters:
        option = option_of(options, name)
        if option not in options:
            text = re.sub(rf",? or {name}=[\w.+-]*$", "", text)
        text = re.sub(rf"\b{name}=True\b", option, text)
        text = re.sub(rf'\b{name}="?([\w.+-]*\w)"?', rf"{option} \1", text)
        text = re.sub(rf"\b{name}=", option, text)
    return text


class Command(TyperCommand):
    """A command whose errors name its options."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CalibrateError as error:
            options = {name for option in self.params for name in option.opts}
            error.args = (with_options(error, options),)
            raise
