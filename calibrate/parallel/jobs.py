"""Jobs: runs independent tasks in this process, in worker processes, or on a Dask cluster."""

import contextlib
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import length_hint
from typing import Any, TypeVar

from calibrate.defaults import TIMEOUT
from calibrate.parallel import dask_cluster
from calibrate.parallel.workers import (
    Outcomes,
    begin_worker,
    call,
    clear_errors,
    quiet_start,
    serialise,
)

T = TypeVar("T")

LOCAL = "local"  # a Dask cluster on this machine


@dataclass(frozen=True)
class Jobs:
    """Number of processes, or a Dask cluster, and the time to wait for a task to finish."""

    processes: int = 1
    dask: str | None = None  # address of a scheduler, or "local": one with `processes` workers
    timeout: float = TIMEOUT  # seconds
    threads: int | None = None  # of each process; None: together they fill the cores

    @property
    def uses_workers(self) -> bool:
        """True if tasks run in other processes: this one may have other threads already."""
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
      CalibrateError: a task cannot be serialised, a process died, or none finished for
        `jobs.timeout` seconds; what has been reported by then is done.
    """
    by_number: dict[int, T] = {}
    with contextlib.closing(_results(tasks, jobs)) as results:
        for number, result in results:
            by_number[number] = result
            report(result)
    return [by_number[number] for number in range(len(by_number))]


@contextlib.contextmanager
def with_cluster(jobs: Jobs) -> Iterator[Jobs]:
    """The same jobs, with a local Dask cluster running for many calls of `run` if it is "local"."""
    if jobs.dask != LOCAL:
        yield jobs
        return
    with dask_cluster.local_cluster(jobs.processes, jobs.threads) as address:
        yield replace(jobs, dask=address)


def _results(tasks: Iterable[Callable[[], T]], jobs: Jobs) -> Generator[tuple[int, T], None, None]:
    """(number of the task, its result), as they finish."""
    if not jobs.uses_workers:
        for number, task in enumerate(tasks):
            yield number, task()
        return
    with clear_errors(jobs.timeout), with_cluster(jobs) as connected:
        if connected.dask is not None:
            outcomes = dask_cluster.outcomes(tasks, connected.dask, connected.timeout)
        else:
            outcomes = _in_processes(tasks, connected)
        with contextlib.closing(outcomes):
            for number, result, messages in outcomes:
                for message in messages:
                    warnings.warn(message, stacklevel=2)
                yield number, result


def _in_processes(tasks: Iterable[Callable[[], Any]], jobs: Jobs) -> Outcomes:
    from joblib import Parallel, cpu_count, delayed

    at_once = max(1, min(jobs.processes, length_hint(tasks, jobs.processes)))
    # With a single one joblib would work in this process, where nothing ends a task that hangs.
    processes = max(2, at_once)
    threads = jobs.threads or max(1, cpu_count() // processes)
    parallel = Parallel(
        n_jobs=processes,
        pre_dispatch="2 * n_jobs" if at_once > 1 else 1,  # then the second process has no task
        return_as="generator_unordered",
        batch_size=1,
        timeout=jobs.timeout,
        initializer=begin_worker,
        initargs=(threads, jobs.threads is not None, os.getpid()),
    )
    calls = (delayed(call)(number, serialise(task)) for number, task in enumerate(tasks))
    with warnings.catch_warnings():
        # A worker that has grown by 300 MB is replaced: no task is lost.
        warnings.filterwarnings("ignore", "A worker stopped while some jobs were given")
        # Tasks are given up after an interrupt or a failure, as they should be.
        warnings.filterwarnings("ignore", r"\d+ tasks (have been|which were)")
        with quiet_start():
            outcomes = parallel(calls)
        yield from outcomes
