"""Progress on stderr: a bar on a terminal, otherwise a line now and then; silence is never long."""

import contextlib
import math
import threading
from datetime import timedelta

from rich.progress import Progress, TextColumn

from calibrate.errors import printable
from calibrate.report.streams import Messages, stderr

SECONDS_BETWEEN_LINES = 10.0


class Steps:
    """Progress of work, stage by stage, on stderr; use as a context manager.

    Steps may differ in `work`; rich estimates the time left from it.
    """

    def __init__(self, screen: Messages = stderr):
        self.total = self.done = 0
        self._screen = screen
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            *Progress.get_default_columns()[1:],
            console=screen,
            transient=True,
            get_time=screen.clock,
            speed_estimate_period=math.inf,  # a step may take minutes
        )
        self._bar.add_task("")
        self._task = self._bar.tasks[0]

    def begin(self, stage: str, total: int, work: float | None = None) -> None:
        """Begins a stage, whose time left is estimated from its own steps."""
        self.total, self.done = total, 0
        work = total if work is None else work
        self._bar.reset(self._task.id, description=printable(stage), total=work)
        self._bar.advance(self._task.id, 0)  # the time from which rich measures speed
        if self not in _under_way:
            _under_way.append(self)
        if self._screen.is_terminal:
            self._bar.start()

    def __enter__(self) -> "Steps":
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        if self in _under_way:
            _under_way.remove(self)
        if self._screen.is_terminal:
            self._bar.stop()

    def advance(self, work: float = 1.0, resumed: bool = False) -> None:
        """Counts one step. A resumed one took no time in this run."""
        self.done += 1
        if resumed:
            self._bar.update(self._task.id, total=(self._task.total or 0) - work)
        self._bar.advance(self._task.id, 0 if resumed else work)

    def __str__(self) -> str:
        """Counts the steps done, with the time left; before the first one, with the time so far."""
        times = f"{_in_words(self._task.elapsed or 0)} so far"
        if (left := self._task.time_remaining) is not None:
            times = f"about {_in_words(left)} left"
        return f"{self._task.description}: {self.done} of {self.total} steps, {times}"


_under_way: list[Steps] = []  # the innermost last


class Heartbeat:
    """Prints a line whenever stderr was silent for some seconds; use as a context manager.

    In a stage of `Steps` it says how far that is. A bar on a terminal moves by itself, and is no
    silence.
    """

    def __init__(self, screen: Messages = stderr, seconds: float = SECONDS_BETWEEN_LINES):
        self._screen, self._seconds = screen, seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._began = screen.clock()

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
        now = self._screen.clock()
        silent_since = max(self._screen.printed_at, self._began)
        if (left := silent_since + self._seconds - now) > 0:
            return left
        so_far = f"  still at work, {_in_words(now - self._began)} so far"
        self._screen.print(str(_under_way[-1]) if _under_way else so_far)
        return self._seconds


def _in_words(seconds: float) -> timedelta:
    return timedelta(seconds=max(round(seconds), 1))
