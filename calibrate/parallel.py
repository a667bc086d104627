"""Independent tasks, run in this process, in worker processes or on a Dask cluster, with progress.

joblib starts the workers. Results are returned in the order of the tasks, and a task computes the
same in any process, so that they do not depend on where tasks run.
"""

import contextlib
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import TimeoutError as Stalled  # raised by joblib, never by a task
from operator import length_hint
from typing import Any, Protocol, TypeVar

from calibrate.defaults import TIMEOUT
from calibrate.errors import CalibrateError, install

T = TypeVar("T")
Outcome = tuple[int, T, list[str]]  # (number of the task, its result, its warnings)

SECONDS_TO_CONNECT = 10.0  # to a Dask scheduler
# Of each worker: imports take 1.4 s of an Intel Xeon at 2.5 GHz, and compiled programs 1.5 s.
SECONDS_TO_START = 4.0


@dataclass(frozen=True)
class Jobs:
    """Number of processes, or a Dask cluster, and the time to wait for a task to finish."""

    processes: int = 1
    dask: str | None = None  # address of a scheduler, whose workers take the place of processes
    timeout: float = TIMEOUT  # seconds
    threads: int | None = None  # of each process; None: together they fill the cores

    @property
    def uses_workers(self) -> bool:
        """True if tasks run in other processes."""
        return self.processes > 1 or self.dask is not None or self.threads is not None

    def for_work(self, seconds: float) -> "Jobs":
        """This process alone, if workers would take longer to start than they save.

        Args:
          seconds: of the work in one process, about.
        """
        saved = seconds * (1 - 1 / self.processes)
        if self.dask is not None or self.threads is not None or saved > SECONDS_TO_START:
            return self
        return replace(self, processes=1)


ONE_PROCESS = Jobs()


def run(
    tasks: Iterable[Callable[[], T]],
    jobs: Jobs = ONE_PROCESS,
    report: Callable[[T], None] = lambda result: None,
) -> list[T]:
    """Calls every task, and returns their results in the order of the tasks.

    Args:
      tasks: independent of each other, and serialisable by cloudpickle; a generator is read step by
        step.
      jobs: processes or cluster. Warnings of a task are repeated in this process.
      report: called in this process with each result as it arrives.
    Raises:
      CalibrateError: a task cannot be serialised, a process died, or none finished for
        `jobs.timeout` seconds; what has been reported by then is done.
    """
    if not jobs.uses_workers:
        results = []
        for task in tasks:
            results.append(task())
            report(results[-1])
        return results
    by_number: dict[int, T] = {}
    with _clear_errors(jobs.timeout), contextlib.closing(_outcomes(tasks, jobs)) as outcomes:
        for number, result, messages in outcomes:
            for message in messages:
                warnings.warn(message, stacklevel=2)
            by_number[number] = result
            report(result)
    return [by_number[number] for number in range(len(by_number))]


def _outcomes(tasks: Iterable[Callable[[], T]], jobs: Jobs) -> Generator[Outcome[T], None, None]:
    """The outcomes of tasks that run in workers, as they finish."""
    from joblib import delayed

    calls: Iterable[Any] = (
        delayed(_call)(number, _serialise(task)) for number, task in enumerate(tasks)
    )
    with contextlib.ExitStack() as stack:
        if jobs.dask is None:
            parallel = _processes(jobs, length_hint(tasks, jobs.processes))
        else:
            parallel = stack.enter_context(_cluster(jobs.dask, jobs.timeout))
            calls = list(calls)  # joblib hides the error of a task that cannot be serialised
        stack.enter_context(warnings.catch_warnings())
        # joblib replaces a worker that has grown by 300 MB; no task is lost.
        warnings.filterwarnings("ignore", "A worker stopped while some jobs were given")
        # After an interrupt or a failure, tasks are abandoned on purpose.
        warnings.filterwarnings("ignore", r"\d+ tasks (have been|which were)")
        yield from parallel(calls)


def _processes(jobs: Jobs, n_tasks: int) -> Any:
    """joblib.Parallel of processes on this machine."""
    from joblib import Parallel, cpu_count

    at_once = max(1, min(jobs.processes, n_tasks))
    # With a single process joblib would run tasks in this one, where no timeout ends them.
    processes = max(2, at_once)
    threads = jobs.threads or max(1, cpu_count() // processes)
    return Parallel(
        n_jobs=processes,
        pre_dispatch="2 * n_jobs" if at_once > 1 else 1,  # then only one process has a task
        return_as="generator_unordered",
        batch_size=1,
        timeout=jobs.timeout,
        initializer=_begin_worker,
        initargs=(threads, jobs.threads is not None, os.getpid()),
    )


@contextlib.contextmanager
def _cluster(address: str, timeout: float) -> Iterator[Any]:
    """joblib.Parallel of the workers of a Dask cluster, connected until the block ends."""
    from joblib import Parallel, parallel_config

    try:
        from distributed import Client
        from distributed.comm.addressing import get_address_host_port
    except ImportError:
        raise CalibrateError(f"dask= needs Dask: {install('dask')}", parameter="dask") from None
    with contextlib.ExitStack() as stack:
        try:
            get_address_host_port(address)  # a client of an invalid address does not close
            client: Any = Client(  # type: ignore[no-untyped-call]
                address, timeout=SECONDS_TO_CONNECT, set_as_default=False
            )
            stack.enter_context(client)
            client.wait_for_workers(1, timeout=timeout)
        except (OSError, TypeError, ValueError) as failure:  # TypeError: tls: without certificates
            raise CalibrateError(
                f"no Dask scheduler with a worker answers at {address!r} ({failure}); start both, "
                "and give the address of the scheduler (tcp://HOST:PORT)"
            ) from failure
        with parallel_config("dask", client=client):
            # All tasks are sent at once, since workers may join later.
            parallel = Parallel(
                pre_dispatch="all", return_as="generator_unordered", batch_size=1, timeout=timeout
            )
        yield parallel


def _serialise(task: Callable[[], Any]) -> bytes:
    """The bytes of a task for `_call`; CalibrateError if it cannot be serialised."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(task))
    except Exception as failure:
        raise CalibrateError(
            f"the task cannot be sent to another process ({type(failure).__name__}: {failure}); "
            "load the head by its name (module:attribute), or use one process"
        ) from failure


def _call(number: int, task_bytes: bytes) -> Outcome[Any]:
    """Runs a task in a worker."""
    try:
        task = pickle.loads(task_bytes)
    except Exception as failure:
        raise CalibrateError(
            f"a worker cannot load its task ({type(failure).__name__}: {failure}); it needs this "
            "version of calibrate, and the head's modules and files under the same paths"
        ) from failure
    with warnings.catch_warnings(record=True) as caught:
        return number, task(), [str(warning.message) for warning in caught]


def _begin_worker(threads: int, exactly: bool, parent: int) -> None:
    """Initialises a worker process.

    Args:
      threads: of XLA, which reads NPROC when the process first uses it; joblib limits the threads
        of other libraries.
      exactly: replace a number that the user has set.
      parent: id of the parent process; the worker ends when it ends.
    """
    if exactly:
        os.environ["NPROC"] = str(threads)
    os.environ.setdefault("NPROC", str(threads))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """Ends this worker after its parent, which joblib would do five minutes after a kill."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


@contextlib.contextmanager
def _clear_errors(timeout: float) -> Iterator[None]:
    """Raises CalibrateError if a worker is killed or no task finishes in time."""
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


class Progress(Protocol):
    """Progress of a long task; the task reports steps in the process that began it."""

    def begin(self, stage: str, total: int, work: float | None = None) -> None:
        """Begins a stage of `total` steps with so much work in total; None is 1 for each step."""

    def advance(self, work: float = 1.0, resumed: bool = False) -> None:
        """Counts a finished step; a resumed step was done earlier and took no time.

        If this call raises an exception, the work stops, and the step stays done.
        """


class Silent:
    """Progress that is not shown."""

    def begin(self, stage: str, total: int, work: float | None = None) -> None:
        """Shows nothing."""

    def advance(self, work: float = 1.0, resumed: bool = False) -> None:
        """Shows nothing."""


SILENT = Silent()
