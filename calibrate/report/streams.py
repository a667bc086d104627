"""The two streams: results on stdout; progress and messages on stderr."""

import contextlib
import os
import threading
import time
from typing import Any

from rich.console import Console


class Messages(Console):
    """A console that knows when it was last printed on."""

    printed_at = time.monotonic()

    def print(self, *objects: Any, **options: Any) -> None:
        self.printed_at = time.monotonic()
        super().print(*objects, **options)


# No markup: names and paths are printed as they are. On a terminal of no width rich prints nothing.
_plain: Any = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
_plain |= {"width": 80} if os.environ.get("COLUMNS") == "0" else {}
stdout, stderr = Console(**_plain), Messages(stderr=True, **_plain)


def spinner(text: str, wanted: bool) -> contextlib.AbstractContextManager[object]:
    """A spinner on stderr while library code is at work, if that is a terminal.

    In the main thread alone: a terminal has room for one.
    """
    if wanted and stderr.is_terminal and threading.current_thread() is threading.main_thread():
        return stderr.status(text)
    return contextlib.nullcontext()
