"""Progress on stderr: a bar on a terminal, otherwise a line now and then."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from calibrate.report.streams import stderr

SECONDS_BETWEEN_LINES = 10.0


class Steps:
    """Progress over a known number of steps; use as a context manager.

    An interrupt takes effect once the step is done. Raised at any point it might hit one of JAX's
    callbacks, where Python prints and forgets it. A second one is raised at once; so is the first
    where other processes do the work (`at_once`), and if it is forgotten, once the step is done.

    Steps may differ in `work`; the time left is estimated from it. If `total` is the most that
    there may be (`at_most`), so is the time.
    """

    def __init__(
        self,
        title: str,
        total: int,
        work: float | None = None,
        at_once: bool = False,
        at_most: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.title, self.total, self.done = title, total, 0
        self._work_left, self._worked = float(total if work is None else work), 0.0
        self._at_once, self._clock = at_once, clock
        self._of, self._about = ("of at most", "at most") if at_most else ("of", "about")
        self._began = self._printed_at = clock()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn(f"{{task.completed}} {self._of} {{task.total}}, {self._about}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=stderr,
            transient=True,
        )
        self._task = self._bar.add_task(title, total=total)
        self._interrupted = False
        self._handler: Any = None

    def __enter__(self) -> "Steps":
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
        if stderr.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if stderr.is_terminal:
            self._bar.stop()
        self._restore_handler()
        if self._interrupted and kind is None:
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._at_once:
            raise KeyboardInterrupt
        stderr.print("stopping after this step; interrupt again to stop at once")

    def _restore_handler(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None

    def advance(self, line: str | None = None, work: float = 1.0, resumed: bool = False) -> None:
        """Counts one step, and prints `line` if given. A resumed step took no time in this run."""
        self.done += 1
        self._work_left -= work
        self._worked += 0.0 if resumed else work
        self._bar.advance(self._task)
        now = self._clock()
        overdue = now - self._printed_at >= SECONDS_BETWEEN_LINES
        if line is None and overdue and not stderr.is_terminal:
            line = f"{self.title}: {self.done} {self._of} {self.total} steps{self._left(now)}"
        if line is not None:
            stderr.print(line)
            self._printed_at = now
        if self._interrupted:
            raise KeyboardInterrupt

    def _left(self, now: float) -> str:
        """The time left, in words; "" before any step was worked on."""
        if not self._worked:
            return ""
        seconds = (now - self._began) * max(self._work_left, 0) / self._worked
        return f", {self._about} {in_words(seconds)} left"


def in_words(seconds: float) -> str:
    """A duration: 5 s, 1:05 min, 2:03 h."""
    whole = max(round(seconds), 1)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3_600}:{whole % 3_600 // 60:02d} h"
