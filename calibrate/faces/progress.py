"""Progress on stderr: a bar on a terminal, otherwise a line now and then."""

import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from calibrate.faces.console import stderr

if TYPE_CHECKING:
    from calibrate.heads import training

SECONDS_BETWEEN_LINES = 10.0


class Steps:
    """Progress over a known number of steps; use as a context manager.

    An interrupt takes effect once the step is done. Raised at any point it might hit one of JAX's
    callbacks, where Python prints and forgets it. A second one is raised at once.
    """

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
        self._restore_handler()
        stderr.print("stopping after this step; interrupt again to stop at once")

    def _restore_handler(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None

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
        if self._interrupted:
            raise KeyboardInterrupt


def say_training(progress: "training.Progress") -> None:
    """A line on the training of one head."""
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    print(
        f"seed {progress.seed}  step {progress.step:,}/{progress.steps:,}  "
        f"loss {progress.loss:.4f}  accuracy {progress.accuracy:.2%}  "
        f"{progress.steps_per_second:.0f} steps/s  {minutes}:{seconds:02d} left",
        file=sys.stderr,
        flush=True,
    )
