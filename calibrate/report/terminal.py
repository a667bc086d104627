"""The terminal: results on stdout, progress and messages on stderr.

Text of coefficient files, models and servers may contain control characters, and addresses may
contain passwords: both consoles escape the former and mask the latter.
"""

import json
import math
import os
import textwrap
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text as RichText

from calibrate.errors import printable, without_login
from calibrate.parallel import Progress
from calibrate.report.blocks import BEST, Block, Code, CommandResult, Facts, Heading, Table, as_json

LABEL_WIDTH = 10
NOTE_WIDTH = 98  # letters of a line of a note
TABLE_WIDTH = 1_000  # columns of the console while a table is printed: wide enough for any


class Screen(Console):
    """A console that escapes control characters in every text; its own colours and bars stay."""

    def render(self, *arguments: Any) -> Iterable[Segment]:
        for segment in super().render(*arguments):
            if not segment.control:
                segment = segment._replace(text=without_login(printable(segment.text, "\n\t")))
            yield segment


# No markup, so that names and paths are printed as they are. Some terminals report a width of 0,
# at which rich prints nothing.
_options: Any = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
_options |= {"width": 80} if os.environ.get("COLUMNS") == "0" else {}
stdout = Screen(**_options)
stderr = Screen(stderr=True, **_options)


class Steps(Progress):
    """A bar on stderr for a task that reports stages and steps; use as a context manager.

    It has the time left. Where stderr is no terminal, nothing is shown.

    Attributes:
      total: steps of this stage.
      done: steps of this stage that are finished.
    """

    def __init__(self, screen: Console = stderr, clock: Callable[[], float] = time.monotonic):
        self.total = self.done = 0
        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=screen,
            transient=True,
            disable=not screen.is_terminal,
            get_time=clock,
            speed_estimate_period=math.inf,  # a step may take minutes
        )
        self._task = self._bar.add_task("", total=None)

    def begin(self, stage: str, total: int, work: float | None = None) -> None:
        """Begins a stage of `total` steps; `work` is the sum of theirs, if they differ."""
        self.total, self.done = total, 0
        self._bar.reset(self._task, total=total if work is None else work, description=stage)
        self._bar.advance(self._task, 0)  # rich measures speed from its first sample
        self._bar.start()

    def advance(self, work: float = 1.0, resumed: bool = False) -> None:
        """Counts one step. A step that an earlier run finished is taken from the total instead."""
        self.done += 1
        if resumed:
            self._bar.update(self._task, total=(self._bar.tasks[0].total or 0) - work)
        self._bar.advance(self._task, 0 if resumed else work)

    def __enter__(self) -> "Steps":
        return self

    def __exit__(self, *failure: object) -> None:
        self._bar.stop()


def show(result: CommandResult, as_json_text: bool = False) -> None:
    """Prints the result of a command as JSON, or its blocks.

    Raises the `failure` of a result that has one, after printing.
    """
    if as_json_text:
        print(json.dumps(as_json(result), indent=1).replace("\x7f", "\\u007f"))
    else:
        _print_blocks(result.blocks())
    if failure := getattr(result, "failure", None):
        raise failure


def _print_blocks(blocks: Iterable[Block]) -> None:
    blocks = list(blocks)
    labels = (label for block in blocks if isinstance(block, Facts) for label, _ in block.rows)
    label_width = max([LABEL_WIDTH, *map(len, labels)])
    for before, block in zip([None, *blocks], blocks, strict=False):
        if isinstance(before, Table) and isinstance(block, Facts):
            stdout.print()
        _print_block(block, label_width)


def _print_block(block: Block, label_width: int) -> None:
    """Prints one block; the values of facts are aligned at `label_width`."""
    if isinstance(block, Heading):
        stdout.print(f"\n{block.text}", style="bold")
    elif isinstance(block, Facts):
        for label, text in block.rows:
            stdout.print(printable(f"  {label:<{label_width}} {text}"))
    elif isinstance(block, Table):
        stdout.print(f"\n{block.title}" if block.title else "", style="bold")
        _print_table(block)
        if note := f"{block.note} {block.more}".strip():
            width = min(stdout.width, NOTE_WIDTH) - 2
            stdout.print(textwrap.indent(textwrap.fill(note, width), "  "))
    elif isinstance(block, Code):
        stdout.print(textwrap.indent(block.text, "  "))
    else:
        stdout.print(block.text)


def _print_table(block: Table) -> None:
    """Prints a table at its own width: a narrow terminal wraps its lines, and cuts no cell."""
    table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1))
    for heading in block.columns:
        side: Literal["left", "right"] = "left" if heading in block.left else "right"
        table.add_column(RichText(printable(heading, "\n")), justify=side, no_wrap=True)
    for row in block.rows:
        styles = ("bold" if cell.startswith(BEST) else "" for cell in row)
        table.add_row(*(RichText(printable(x, "\n"), y) for x, y in zip(row, styles, strict=True)))
    width, stdout.width = stdout.width, TABLE_WIDTH
    try:
        stdout.print(table)
    finally:
        stdout.width = width
