"""Progress on stderr: a bar on a terminal, otherwise a line now and then."""

import math
import time
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console
from rich.progress import Progress, TextColumn

from calibrate.report.streams import stderr

SECONDS_BETWEEN_LINES = 10.0


class Steps:
    """Progress of work, stage by stage, on stderr; use as a context manager.

    Steps may differ in `work`; rich estimates the time left from it.
    """

    def __init__(self, screen: Console = stderr, clock: Callable[[], float] = time.monotonic):
        self.total = self.done = 0
        self._screen, self._clock = screen, clock
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            *Progress.get_default_columns()[1:],
            console=screen,
            transient=True,
            get_time=clock,
            speed_estimate_period=math.inf,  # a step may take minutes
        )
        self._bar.add_task("")
        self._task = self._bar.tasks[0]
        self._printed_at = clock()

    def begin(self, stage: str, total: int, work: float | None = None) -> None:
        """Begins a stage, whose time left is estimated from its own steps."""
        self.total, self.done = total, 0
        self._bar.reset(self._task.id, description=stage, total=total if work is None else work)
        self._bar.advance(self._task.id, 0)  # the time from which rich measures speed
        if self._screen.is_terminal:
            self._bar.start()
        else:
            self._print_line(f"{total:,} steps")

    def advance(self, work: float = 1.0, resumed: bool = False) -> None:
        """Counts one step. A resumed one took no time in this run."""
        self.done += 1
        if resumed:
            self._bar.update(self._task.id, total=(self._task.total or 0) - work)
        self._bar.advance(self._task.id, 0 if resumed else work)
        if self._screen.is_terminal:
            return
        if self.done == self.total:
            self._print_line(f"done in {_in_words(self._task.elapsed or 0)}")
        elif self._clock() - self._printed_at >= SECONDS_BETWEEN_LINES:
            left = self._task.time_remaining  # None before a step that took time
            estimate = "" if left is None else f", about {_in_words(left)} left"
            self._print_line(f"{self.done:,} of {self.total:,} steps{estimate}")

    def __enter__(self) -> "Steps":
        return self

    def __exit__(self, *failure: object) -> None:
        if self._screen.is_terminal:
            self._bar.stop()

    def _print_line(self, text: str) -> None:
        self._printed_at = self._clock()
        self._screen.print(f"{self._task.description}: {text}")


def _in_words(seconds: float) -> timedelta:
    return timedelta(seconds=max(round(seconds), 1))
