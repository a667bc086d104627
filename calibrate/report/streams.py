"""The two streams: results on stdout; progress and messages on stderr.

Here text of files becomes text of the terminal: names and values may hold escape sequences, which
would command it. What is not printable is shown escaped, as in Python's texts; and passwords in
addresses, which were typed or which a server sent, are masked.
"""

import io
import os
import sys
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


class Escaped:
    """A stream of the process for what others print: loggers, tracebacks, usage errors."""

    def __init__(self, stream: Any):
        self.rich_proxied_file = stream  # consoles print on this one

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)

    def write(self, text: str) -> int:
        return int(self.rich_proxied_file.write(_shown(text, _LAYOUT)))

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))


def escape_streams() -> None:
    """Lets nothing that commands a terminal through this process's stdout and stderr."""
    for name in ("stdout", "stderr"):
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):  # not closed
            stream.reconfigure(errors="replace")  # for terminals that are not UTF-8
            setattr(sys, name, Escaped(stream))


# No markup: names and paths are printed as they are. On a terminal of no width rich prints nothing.
_plain: Any = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
_plain |= {"width": 80} if os.environ.get("COLUMNS") == "0" else {}
stdout = Screen(**_plain)
stderr = Messages(stderr=True, **_plain)
