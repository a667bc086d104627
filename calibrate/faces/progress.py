"""Progress on stderr: a bar on a terminal, otherwise a line now and then."""

import time
from types import TracebackType

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from calibrate.faces.console import stderr

SECONDS_BETWEEN_LINES = 10.0


class Steps:
    """Progress over a known number of steps; use as a context manager."""

    def __init__(self, title: str, total: int):
        self.title, self.total, self.done = title, total, 0
        self._said_at = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            console=stderr,
            transient=True,
        )
        self._task = self._bar.add_task(title, total=total)

    def __enter__(self) -> "Steps":
        if stderr.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if stderr.is_terminal:
            self._bar.stop()

    def advance(self, line: str | None = None) -> None:
        """One step is done; `line` is said in any case."""
        self.done += 1
        self._bar.advance(self._task)
        overdue = time.monotonic() - self._said_at > SECONDS_BETWEEN_LINES
        if line is None and overdue and not stderr.is_terminal:
            line = f"{self.title}: {self.done} of {self.total} steps"
        if line is not None:
            stderr.print(line)
            self._said_at = time.monotonic()
