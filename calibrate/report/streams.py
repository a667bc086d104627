"""The two streams: results on stdout; progress and messages on stderr."""

import os
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
