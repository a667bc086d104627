"""Worker processes: start and end, threads, serialised tasks, and errors where one dies."""

import contextlib
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import TimeoutError as Stalled  # raised by joblib, never by a task
from typing import Any

from calibrate.errors import CalibrateError

Outcome = tuple[int, Any, list[str]]  # (number of the task, its result, its warnings)
Outcomes = Generator[Outcome, None, None]  # as they finish

_NO_COMMENT = "ignore:resource_tracker:UserWarning"


def serialise(task: Callable[[], Any]) -> bytes:
    """The bytes of a task for `call`; a CalibrateError if it cannot be serialised."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(task))
    except Exception as failure:
        raise CalibrateError(
            f"the task cannot be sent to another process ({type(failure).__name__}: {failure}); "
            "load the head by its name (module:attribute), or use one process"
        ) from failure


def call(number: int, task_bytes: bytes) -> Outcome:
    """Runs a task in the process that it was sent to."""
    try:
        task = pickle.loads(task_bytes)
    except Exception as failure:
        raise CalibrateError(
            f"a worker cannot load its task ({type(failure).__name__}: {failure}); it needs this "
            "version of calibrate, and the head's modules and files under the same paths"
        ) from failure
    with warnings.catch_warnings(record=True) as caught:
        return number, task(), [str(warning.message) for warning in caught]


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Processes that are started within ignore Ctrl-C, and print nothing when this one is killed.

    A worker that is still importing would answer Ctrl-C with a traceback. The resource trackers,
    which remove the semaphores of a process that was interrupted or killed, would warn of that.
    """
    if os.name != "posix":
        yield
        return
    from multiprocessing import resource_tracker

    filters = os.environ.get("PYTHONWARNINGS", "")  # inherited by what is started
    os.environ["PYTHONWARNINGS"] = f"{filters},{_NO_COMMENT}" if filters else _NO_COMMENT
    resource_tracker.ensure_running()  # now, as its start would unblock the signal
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ["PYTHONWARNINGS"] = filters


def begin_worker(threads: int, exactly: bool, parent: int) -> None:
    """Initialises a worker process.

    Args:
      threads: of XLA, which reads their number here when the process first uses it; joblib does the
        same for other libraries. A number that the user has set stays, unless `exactly`.
      parent: process id; when that process ends, so does this one.
    """
    if exactly:
        os.environ["NPROC"] = str(threads)
    os.environ.setdefault("NPROC", str(threads))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """Ends this worker when its parent has ended: a later run starts its own workers."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


@contextlib.contextmanager
def clear_errors(timeout: float) -> Iterator[None]:
    """Raises CalibrateError if a worker is killed, or no task comes back in time."""
    try:
        yield
    except BrokenProcessPool as failure:
        raise CalibrateError(
            "a worker process died (killed, or out of memory?); finished units are kept, and the "
            "same command resumes (fewer processes need less memory)"
        ) from failure
    except Stalled as failure:
        raise CalibrateError(
            f"no worker finished a task for {timeout:g} s: did one die, or does a task take "
            "longer (timeout=)? Finished units are kept, and the same command resumes",
            parameter="timeout",
        ) from failure
