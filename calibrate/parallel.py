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
from collections.abc import Callable, Generator, Iterable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from operator import length_hint
from typing import Any, TypeVar

from calibrate.errors import CalibrateError, install

T = TypeVar("T")
Outcome = tuple[int, T, list[str]]  # (number of the task, its result, its warnings)

SECONDS_TO_CONNECT = 10.0  # to a Dask scheduler, and to its first worker


@dataclass(frozen=True)
class Jobs:
    """Number of processes, or a Dask cluster."""

    processes: int = 1
    dask: str | None = None  # address of a scheduler, whose workers take the place of processes
    threads: int | None = None  # of each process; None: together they fill the cores

    @property
    def uses_workers(self) -> bool:
        """True if tasks run in other processes."""
        return self.processes > 1 or self.dask is not None or self.threads is not None


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
      CalibrateError: a process died; what has been reported by then is done.
    """
    if not jobs.uses_workers:
        results = []
        for task in tasks:
            results.append(task())
            report(results[-1])
        return results
    by_number: dict[int, T] = {}
    try:
        with contextlib.closing(_outcomes(tasks, jobs)) as outcomes:
            for number, result, messages in outcomes:
                for message in messages:
                    warnings.warn(message, stacklevel=2)
                by_number[number] = result
                report(result)
    except BrokenProcessPool as failure:
        raise CalibrateError(
            "a worker process died (killed, or out of memory?); finished units are kept, and the "
            "same command resumes (fewer processes need less memory)"
        ) from failure
    return [by_number[number] for number in range(len(by_number))]


def _outcomes(tasks: Iterable[Callable[[], T]], jobs: Jobs) -> Generator[Outcome[T], None, None]:
    """The outcomes of tasks that run in workers, as they finish."""
    if jobs.dask is not None:
        yield from _on_cluster(tasks, jobs.dask)
        return
    from joblib import delayed

    parallel = _processes(jobs, length_hint(tasks, jobs.processes))
    with warnings.catch_warnings():
        # joblib replaces a worker that has grown by 300 MB; no task is lost.
        warnings.filterwarnings("ignore", "A worker stopped while some jobs were given")
        # After an interrupt or a failure, tasks are abandoned on purpose.
        warnings.filterwarnings("ignore", r"\d+ tasks (have been|which were)")
        yield from parallel(delayed(_call)(i, _serialise(task)) for i, task in enumerate(tasks))


def _processes(jobs: Jobs, n_tasks: int) -> Any:
    """joblib.Parallel of processes on this machine."""
    from joblib import Parallel, cpu_count

    at_once = max(1, min(jobs.processes, n_tasks))
    # With a single process joblib would run tasks in this one, with its number of threads.
    processes = max(2, at_once)
    threads = jobs.threads or max(1, cpu_count() // processes)
    return Parallel(
        n_jobs=processes,
        pre_dispatch="2 * n_jobs" if at_once > 1 else 1,  # then only one process has a task
        return_as="generator_unordered",
        batch_size=1,
        initializer=_begin_worker,
        initargs=(threads, jobs.threads is not None, os.getpid()),
    )


def _on_cluster(
    tasks: Iterable[Callable[[], T]], address: str
) -> Generator[Outcome[T], None, None]:
    """The outcomes of tasks that run on a Dask cluster, as they finish.

    All tasks are sent at once, since workers may join later. joblib's own backend for Dask waits
    forever for a task whose workers died.
    """
    try:
        from distributed import CancelledError, Client, KilledWorker, as_completed
    except ImportError:
        raise CalibrateError(f"dask= needs Dask: {install('dask')}", parameter="dask") from None
    try:
        client: Any = Client(  # type: ignore[no-untyped-call]
            address, timeout=SECONDS_TO_CONNECT, set_as_default=False
        )
        client.wait_for_workers(1, timeout=SECONDS_TO_CONNECT)
    except (OSError, TypeError, ValueError) as failure:  # TypeError: tls: without certificates
        raise CalibrateError(
            f"no Dask scheduler with a worker answers at {address!r} ({failure})", parameter="dask"
        ) from failure
    with client:
        futures = [
            client.submit(_call, number, _serialise(task), pure=False)
            for number, task in enumerate(tasks)
        ]
        for future in as_completed(futures, loop=client.loop):  # type: ignore[no-untyped-call]
            try:
                yield future.result()
            except (KilledWorker, CancelledError) as failure:
                raise CalibrateError(f"the cluster did not finish a task: {failure}") from failure


def _serialise(task: Callable[[], Any]) -> bytes:
    import cloudpickle

    return bytes(cloudpickle.dumps(task))


def _call(number: int, task_bytes: bytes) -> Outcome[Any]:
    """Runs a task in a worker."""
    task = pickle.loads(task_bytes)
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


class Progress:
    """Progress of a long task, which reports steps in the process that began it; shows nothing."""

    def begin(self, stage: str, total: int, work: float | None = None) -> None:
        """Begins a stage of `total` steps with so much work in total; None is 1 for each step."""

    def advance(self, work: float = 1.0, resumed: bool = False) -> None:
        """Counts a finished step; a resumed step was done earlier and took no time.

        If this call raises an exception, the work stops, and the step stays done.
        """


SILENT = Progress()
