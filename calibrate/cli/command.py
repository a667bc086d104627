"""A command: its help in panels, and errors that name its options."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from typer import Context
from typer.core import TyperCommand

from calibrate.errors import CalibrateError, as_option

# Parameters whose options have other names; the first that the command has is used.
OPTIONS: Mapping[str, Sequence[str]] = {"folder": ("out", "name")}


class Command(TyperCommand):
    """A command whose errors name its options, and whose help has the rare options in panels."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CalibrateError as error:
            options = {name for option in self.params for name in option.opts}
            error.args = (with_options(error, options),)
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes a section for each `rich_help_panel`, those without one first."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                is_argument = parameter.param_type_name == "argument"
                panel = getattr(parameter, "rich_help_panel", None) or "Options"
                sections.setdefault("Arguments" if is_argument else panel, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def given(ctx: Context) -> set[str]:
    """The names of the parameters that the command line gives."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def option_of(options: Collection[str], name: str) -> str:
    """The option of a command, such as "--max-kl", for a parameter."""
    names = [as_option(x, "") for x in OPTIONS.get(name, (name,))]
    return next((x for x in names if x in options), names[0])


def with_options(error: CalibrateError, options: Collection[str]) -> str:
    """The message of an error, with the options of a command in place of its parameters.

    An alternative at the end, ", or NAME=True", is left out if the command has no such option.
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
