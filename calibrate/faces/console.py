"""The two streams: results on stdout; progress and messages on stderr."""

import os

from rich.console import Console

# No markup: names and paths are printed as they are. On a terminal of no width rich prints nothing.
_width = 80 if os.environ.get("COLUMNS") == "0" else None
stdout = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=_width)
stderr = Console(
    stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True, width=_width
)
