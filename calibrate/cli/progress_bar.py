"""Progress of a long task: a bar with the time left on a terminal, and nothing elsewhere."""

import math
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from calibrate.report.terminal import stderr


class Steps:
    """A bar on stderr for a task that reports stages and steps; use as a context manager.

    Attributes:
      total: steps of this stage.
      done: steps of this stage that are finished.
    """

    def __init__(self, screen: Console = stderr, clock: Callable[[], float] = time.monotonic):
        self.total = self.done = 0
        self._bar = Progress(
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

    @property
    def seconds_left(self) -> float | None:
        """The estimate of the time left; None before the first step."""
        return self._bar.tasks[0].time_remaining

    def __enter__(self) -> "Steps":
        return self

    def __exit__(self, *failure: object) -> None:
        self._bar.stop()
