"""The consoles: results on stdout; progress and messages on stderr.

Both escape control characters, which text of coefficient files, models and servers may contain, and
mask passwords in addresses.
"""

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from calibrate.errors import printable, without_login


class Screen(Console):
    """A console that renders every text printable; its own colours and bars stay as they are."""

    def render(self, *what: Any) -> Iterable[Segment]:
        for segment in super().render(*what):
            if not segment.control:
                segment = segment._replace(text=without_login(printable(segment.text, "\n\t")))
            yield segment


# No markup: names and paths are printed as they are. On a terminal of no width rich prints nothing.
_plain: Any = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
_plain |= {"width": 80} if os.environ.get("COLUMNS") == "0" else {}
stdout = Screen(**_plain)
stderr = Screen(stderr=True, **_plain)
