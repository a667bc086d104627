"""The two streams: results on stdout; progress and messages on stderr."""

import os

from rich.console import Console
from rich.table import Table

# No markup: names and paths are printed as they are. On a terminal of no width rich prints nothing.
_width = 80 if os.environ.get("COLUMNS") == "0" else None
stdout = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=_width)
stderr = Console(
    stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True, width=_width
)


def print_whole(table: Table) -> None:
    """A table at its own width: a narrow terminal may wrap its lines, no cell is ever cut."""
    width = stdout.width
    stdout.width = 1_000
    try:
        stdout.print(table)
    finally:
        stdout.width = width
