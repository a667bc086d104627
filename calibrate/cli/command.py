"""A command: its help, and errors that name its options."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from typer import Context
from typer.core import TyperCommand

from calibrate.errors import CalibrateError, as_option

# Parameters whose options have other names; the first that the command has is used.
OPTIONS: Mapping[str, Sequence[str]] = {"folder": ("out", "name")}


class Command(TyperCommand):
    """A command whose errors name its options, and whose help ends with an example.

    The last paragraph of the docstring, "Example: calibrate ...", is the end of the help. Rare
    options have a section of their own, their `rich_help_panel`.
    """

    def __init__(self, *names: Any, **attributes: Any):
        super().__init__(*names, **attributes)
        text, title, example = (self.help or "").partition("Example: ")
        self.help, self.epilog = text.strip(), title + example.strip()

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CalibrateError as error:
            options = {name for option in self.params for name in option.opts}
            error.args = (with_options(error, options),)
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes a section for each `rich_help_panel`, and first one of options without."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            is_argument = parameter.param_type_name == "argument"
            panel = getattr(parameter, "rich_help_panel", None) or "Options"
            section = sections.setdefault("Arguments" if is_argument else panel, [])
            section += filter(None, [parameter.get_help_record(ctx)])
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
    """The message of an error, with the options of a command in place of its parameters."""

    def as_written(match: re.Match[str]) -> str:
        name, value = match.groups()
        option = option_of(options, name)
        return f"{option} {value}" if value not in ("", "True") else option

    names = "|".join(error.parameters) or "(?!)"  # matches nothing
    return re.sub(rf'\b({names})="?([\w.+-]*\w|)"?', as_written, str(error))
