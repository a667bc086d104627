"""Requests: one frozen dataclass a command, whose fields are its options, and the command of it.

Defaults, bounds and help stand in the fields; the command line is made from them.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args

from typer import Option, Typer
from typer.models import OptionInfo

from calibrate.cli.option_names import Command
from calibrate.report.blocks import Record
from calibrate.report.terminal import show

# In the order of use: what is read, what is written, and then how. Read as running text: a word a
# line would be fifty lines.
_ORDER = (
    "head", "logits", "model", "run", "fits", "out", "name", "overwrite", "form", "max_rank",
    "any_model", "check", "engine", "served_model_name", "prompts", "task", "retention_text",
    "no_retention_text", "lengths", "examples", "sizes", "sets", "keep", "max_bytes", "kind",
    "sharing", "heads_per_layer", "loss", "paper", "rows", "q", "min_entropy", "min_beta",
    "trained_up_to", "tolerance", "max_kl", "interpolation", "steps", "for_export", "seed",
    "allow_partial", "dtype", "device", "allow_unexpected", "jobs", "dask", "timeout", "store",
    "verbose", "as_json",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options that every command has."""

    as_json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False

    def show(self, record: Record) -> None:
        """Prints the result of the command; raises CalibrateError if that is a failed check."""
        show(record, self.as_json, getattr(self, "verbose", False))
        if failure := getattr(record, "failure", None):
            raise failure


R = TypeVar("R", bound=Request)


def add_command(app: Typer, act: Callable[[R], Record], name: str | None = None) -> None:
    """Gives an app the command that makes a request of its options, acts on it, shows the result.

    The options are the fields of the request that `act` takes; its help is the docstring of `act`.
    """
    request: type[R] = act.__annotations__["request"]

    def command(**options: Any) -> None:
        given = request(**options)
        given.show(act(given))

    functools.update_wrapper(command, request, updated=())
    command.__signature__ = _in_order(inspect.signature(request))  # type: ignore[attr-defined]
    app.command(name or act.__name__.replace("_", "-"), cls=Command, help=inspect.getdoc(act))(
        command
    )


def _in_order(signature: inspect.Signature) -> inspect.Signature:
    """The signature of a request with its arguments first, then its options as in `_ORDER`."""

    def place(parameter: inspect.Parameter) -> int:
        is_option = any(isinstance(x, OptionInfo) for x in get_args(parameter.annotation))
        return _ORDER.index(parameter.name) if is_option else -1

    parameters = sorted(signature.parameters.values(), key=place)
    keywords = [x.replace(kind=inspect.Parameter.KEYWORD_ONLY) for x in parameters]
    return signature.replace(parameters=keywords)
