"""Progress on stderr: a bar on a terminal, otherwise a line now and then; silence is never long."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from calibrate.report.streams import stderr

SECONDS_BETWEEN_LINES = 10.0


class Steps:
    """Progress over a known number of steps; use as a context manager.

    An interrupt takes effect once the step is done. Raised at any point it might hit one of JAX's
    callbacks, where Python prints and forgets it. A second one is raised at once; so is the first
    where other processes do the work (`at_once`), and if it is forgotten, once the step is done.

    Steps may differ in `work`; the time left is estimated from it. If `total` is the most that
    there may be (`at_most`), those not needed are counted as done, and so many more are expected.
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
        self._at_once, self._clock = at_once, clock
        self._of, self._about = ("of at most", "at most") if at_most else ("of", "about")
        self._printed_at = clock()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn(f"{{task.completed}} {self._of} {{task.total}},"),
            TimeElapsedColumn(),
            TextColumn(f"so far, {self._about}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=stderr,
            transient=True,
        )
        self._task = self._bar.add_task(title)
        self.begin(title, total, work)
        self._interrupted = False
        self._handler: Any = None

    def begin(self, title: str, total: int, work: float | None = None) -> None:
        """Begins anew with other steps; they have a time of their own."""
        self.title, self.total, self.done = title, total, 0
        self._work_left, self._worked = float(total if work is None else work), 0.0
        self._began = self._clock()
        self._bar.reset(self._task, description=title, total=total)

    def __enter__(self) -> "Steps":
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
        if stderr.is_terminal:
            self._bar.start()
        _under_way.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        _under_way.remove(self)
        if stderr.is_terminal:
            self._bar.stop()
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        if self._interrupted and kind is None:
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._at_once:
            raise KeyboardInterrupt
        stderr.print("stopping after this step; interrupt again to stop at once")

    def advance(self, line: str | None = None, work: float = 1.0, resumed: bool = False) -> None:
        """Counts one step, and prints `line` if given. A resumed step took no time in this run."""
        self.done += 1
        self._work_left -= work
        self._worked += 0.0 if resumed else work
        self._bar.advance(self._task)
        now = self._clock()
        overdue = now - self._printed_at >= SECONDS_BETWEEN_LINES
        if line is not None:
            self._printed_at = now
            stderr.print(line)
        elif overdue and not stderr.is_terminal:
            self.tell()
        if self._interrupted:
            raise KeyboardInterrupt

    def tell(self) -> None:
        """Prints how many steps are done and the time left, or, before any is, the time so far."""
        now = self._printed_at = self._clock()
        passed = now - self._began
        times = f"{in_words(passed)} so far"
        if self._worked:
            seconds = passed * max(self._work_left, 0) / self._worked
            times = f"{self._about} {in_words(seconds)} left"
        stderr.print(f"{self.title}: {self.done} {self._of} {self.total} steps, {times}")


_under_way: list[Steps] = []  # the innermost last


class Heartbeat:
    """Prints a line whenever stderr was silent for ten seconds; use as a context manager.

    Compiled code and imports may take that long without a step. Inside `Steps` the line says how
    far they are; a bar on a terminal moves by itself.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._stopped = clock, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._told_at = self._silent_since = stderr.printed_at

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # nobody reads stderr
            while not self._stopped.wait(self.beat()):
                pass

    def beat(self) -> float:
        """Prints the line if it is due; returns the seconds until it may be due again."""
        if stderr.printed_at != self._told_at:
            self._silent_since = stderr.printed_at
        now = self._clock()
        if (left := stderr.printed_at + SECONDS_BETWEEN_LINES - now) > 0:
            return min(left, SECONDS_BETWEEN_LINES)
        for steps in _under_way[-1:]:
            steps.tell()
        if not _under_way:
            stderr.print(f"  still at work after {in_words(now - self._silent_since)}")
        self._told_at = stderr.printed_at
        return SECONDS_BETWEEN_LINES


def in_words(seconds: float) -> str:
    """A duration: 5 s, 1:05 min, 2:03 h."""
    whole = max(round(seconds), 1)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3_600}:{whole % 3_600 // 60:02d} h"
