"""The consoles: results on stdout; progress and messages on stderr.

Both escape control characters, which text of coefficient files, models and servers may contain, and
mask passwords in addresses.
"""

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from calibrate.errors import printable, without_login

_LAYOUT = "\n\t"


def _shown(text: str, kept: str = "") -> str:
    """A text as it is shown; see above."""
    return without_login(printable(text, kept))


class Screen(Console):
    """A console that renders every text printable; its own colours and bars stay as they are."""

    def render(self, *what: Any) -> Iterable[Segment]:
        for segment in super().render(*what):
            yield (
                segment if segment.control else segment._replace(text=_shown(segment.text, _LAYOUT))
            )


class Messages(Screen):
    """A console for messages of one line each, which knows when it was last printed on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, **options: Any):
        super().__init__(**options)
        self.clock = clock  # seconds
        self.printed_at = clock()

    def print(self, *objects: Any, **options: Any) -> None:
        self.printed_at = self.clock()
        lines = [_shown(x) if isinstance(x, str) else x for x in objects]
        super().print(*lines, **options)


# No markup: names and paths are printed as they are. On a terminal of no width rich prints nothing.
_plain: Any = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
_plain |= {"width": 80} if os.environ.get("COLUMNS") == "0" else {}
stdout = Screen(**_plain)
stderr = Messages(stderr=True, **_plain)
