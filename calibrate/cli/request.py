"""Requests: one frozen dataclass a command. Its fields are the options, with defaults and help."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer

from calibrate.errors import CalibrateError
from calibrate.report.blocks import Record
from calibrate.report.terminal import show


@dataclass(frozen=True, kw_only=True)
class Request:
    """What every command is asked for."""

    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False

    def show(self, record: Record) -> None:
        """Prints the result of the command; raises CalibrateError if that is a failed check."""
        show(record, self.as_json)
        if failure := getattr(record, "failure", lambda: None)():
            raise CalibrateError(failure)


R = TypeVar("R", bound=Request)


def add_command(app: typer.Typer, act: Callable[[R], Record], name: str | None = None) -> None:
    """Gives an app the command that makes a request of its options, acts on it, shows the result.

    The options are the fields of the request that `act` takes; its help is the docstring of `act`.
    """
    request: type[R] = act.__annotations__["request"]

    def command(**options: Any) -> None:
        asked = request(**options)
        asked.show(act(asked))

    functools.update_wrapper(command, request, updated=())  # Typer reads the request's signature
    app.command(name or act.__name__, help=inspect.getdoc(act))(command)
