"""The two streams: results on stdout; progress, messages and warnings on stderr."""

import os
from typing import Any

from rich.console import Console

# No markup: names and paths are printed as they are. On a terminal of no width rich prints nothing.
_width = 80 if os.environ.get("COLUMNS") == "0" else None
stdout = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=_width)
stderr = Console(
    stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True, width=_width
)


def show_warning(message: Any, *where: Any, **also: Any) -> None:
    """A warning as one line, in place of `warnings.showwarning`."""
    stderr.print(f"calibrate: warning: {' '.join(str(message).split())}")
