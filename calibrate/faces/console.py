"""The two streams: results on stdout; progress, messages and warnings on stderr."""

from typing import Any

from rich.console import Console

# No markup: names and paths are printed as they are.
stdout = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
stderr = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def show_warning(message: Any, *where: Any, **also: Any) -> None:
    """A warning as one line, in place of `warnings.showwarning`."""
    stderr.print(f"calibrate: warning: {' '.join(str(message).split())}")
