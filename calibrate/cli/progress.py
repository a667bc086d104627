"""Progress on stderr: a bar on a terminal, otherwise a line now and then; silence is never long."""

import contextlib
import math
import signal
import threading
import time
from types import FrameType
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from calibrate.report.streams import stderr

SECONDS_BETWEEN_LINES = 10.0


class Steps:
    """Progress over a known number of steps; use as a context manager.

    An interrupt takes effect once the step is done. Raised at any point it might hit one of JAX's
    callbacks, where Python prints and forgets it. A second one is raised at once; so is the first
    where other processes do the work (`at_once`), and if it is forgotten, once the step is done.

    Steps may differ in `work`; rich estimates the time left from it. If `total` is the most that
    there may be (`at_most`), those not needed are counted as done, and so many more are expected.
    """

    def __init__(
        self,
        title: str,
        total: int,
        work: float | None = None,
        at_once: bool = False,
        at_most: bool = False,
    ):
        self._at_once = at_once
        self._of, self._about = ("of at most", "at most") if at_most else ("of", "about")
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn(f"{{task.fields[done]}} {self._of} {{task.fields[steps]}},"),
            TimeElapsedColumn(),
            TextColumn(f"so far, {self._about}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=stderr,
            transient=True,
            get_time=lambda: time.monotonic(),
            speed_estimate_period=math.inf,  # a step may take minutes
        )
        self._bar.add_task(title)
        self._task = self._bar.tasks[0]
        self.begin(title, total, work)
        self._interrupted = False
        self._handler: Any = None

    def begin(self, title: str, total: int, work: float | None = None) -> None:
        """Begins anew with other steps; they have a time of their own."""
        self.total, self.done = total, 0
        work = total if work is None else work
        self._bar.reset(self._task.id, description=title, total=work, done=0, steps=total)
        self._bar.advance(self._task.id, 0)  # the time from which rich measures speed

    def __enter__(self) -> "Steps":
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
        if stderr.is_terminal:
            self._bar.start()
        _under_way.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
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
        self._bar.update(self._task.id, done=self.done)
        if resumed:
            self._bar.update(self._task.id, total=(self._task.total or 0) - work)
            self._bar.advance(self._task.id, 0)
        else:
            self._bar.advance(self._task.id, work)
        if line is not None:
            stderr.print(line)
        elif not stderr.is_terminal and _silence() >= SECONDS_BETWEEN_LINES:
            self.tell()
        if self._interrupted:
            raise KeyboardInterrupt

    def tell(self) -> None:
        """Prints how many steps are done and the time left, or, before any is, the time so far."""
        left = self._task.time_remaining
        times = f"{in_words(self._task.elapsed or 0)} so far"
        if left is not None:
            times = f"{self._about} {in_words(left)} left"
        title = self._task.description
        stderr.print(f"{title}: {self.done} {self._of} {self.total} steps, {times}")


_under_way: list[Steps] = []  # the innermost last


def _silence() -> float:
    """The seconds since stderr was last printed on."""
    return time.monotonic() - stderr.printed_at


class Heartbeat:
    """Prints a line whenever stderr was silent for ten seconds; use as a context manager.

    Compiled code and imports may take that long without a step. Inside `Steps` the line says how
    far they are; a bar on a terminal moves by itself.
    """

    def __init__(self) -> None:
        self._stopped = threading.Event()
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
        if (left := SECONDS_BETWEEN_LINES - _silence()) > 0:
            return min(left, SECONDS_BETWEEN_LINES)
        if _under_way:
            _under_way[-1].tell()
        else:
            words = in_words(time.monotonic() - self._silent_since)
            stderr.print(f"  still at work after {words}")
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
