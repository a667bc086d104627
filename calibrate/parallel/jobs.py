"""Jobs: where independent tasks run: in this process, in several, or on a Dask cluster."""

import contextlib
import logging
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import TimeoutError as Stalled  # what joblib raises, and no task of ours
from operator import length_hint
from typing import Any, TypeVar

from calibrate.errors import CalibrateError

T = TypeVar("T")
Finished = Generator[tuple[int, T], None, None]

LOCAL = "local"  # a Dask cluster of this machine's own
SECONDS_TO_CONNECT = 10.0
_IGNORE_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
_NO_COMMENT = "ignore:resource_tracker:UserWarning"


@dataclass(frozen=True)
class Jobs:
    """How many processes, or which Dask cluster, and how long to wait for a task to finish."""

    processes: int = 1
    dask: str | None = None  # address of a scheduler, or "local": one with `processes` workers
    stall: float = 600.0  # seconds

    @property
    def elsewhere(self) -> bool:
        """Whether tasks run in other processes than this one."""
        return self.processes > 1 or self.dask is not None


HERE = Jobs()


def run(
    tasks: Iterable[Callable[[], T]],
    jobs: Jobs = HERE,
    report: Callable[[T], None] = lambda result: None,
) -> list[T]:
    """What tasks give, in the order of the tasks, wherever they run.

    Args:
      tasks: each independent of the others, and something that cloudpickle takes; a generator is
        asked for them one by one.
      jobs: where they run. Threads of a process are capped, so that together they fill the cores.
      report: called in this process with each result, as soon as it is there.
    Raises:
      CalibrateError: a task cannot be sent, a process died, or none finished for `jobs.stall`
        seconds; what has been reported by then is done.
    """
    found: dict[int, T] = {}
    with contextlib.closing(
        _elsewhere(tasks, jobs) if jobs.elsewhere else _here(tasks)
    ) as finished:
        for place, result in finished:
            found[place] = result
            report(result)
    return [found[place] for place in range(len(found))]


def _here(tasks: Iterable[Callable[[], T]]) -> Finished[T]:
    for place, task in enumerate(tasks):
        yield place, task()


def _elsewhere(tasks: Iterable[Callable[[], T]], jobs: Jobs) -> Finished[T]:
    """(place of the task, what it gave), as they finish."""
    from joblib import Parallel, delayed

    # With a single process joblib would stay here, and nothing would end a task that hangs.
    processes = max(2, min(jobs.processes, length_hint(tasks, jobs.processes)))
    options = {"return_as": "generator_unordered", "batch_size": 1, "timeout": jobs.stall}
    # Bytes: what is sent is found out here, and Dask keeps no part of it on a single worker.
    sent = (delayed(_call)(place, _pickled(task)) for place, task in enumerate(tasks))
    with _remedies(jobs), _backend(jobs, processes) as backend:
        with _quiet_start():
            finished = Parallel(**options, **backend)(sent)
        try:
            for place, result, said in finished:
                for line in said:
                    warnings.warn(line, stacklevel=2)
                yield place, result
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of tasks that are given up: they are meant to be
                finished.close()


@contextlib.contextmanager
def _backend(jobs: Jobs, processes: int) -> Iterator[dict[str, Any]]:
    """What joblib.Parallel is to be told."""
    if jobs.dask is not None:
        with started(jobs) as there, _client(there) as client:
            from joblib._dask import DaskDistributedBackend

            class Cluster(DaskDistributedBackend):
                def effective_n_jobs(self, n_jobs: int) -> int:
                    return max(2, super().effective_n_jobs(n_jobs))  # with 1 joblib stays here

                def submit(self, func: Any, callback: Any = None) -> Any:
                    def fail(future: Any) -> None:
                        if future.exception():  # joblib would wait for ever
                            callback(_given_up(future.exception()))

                    future = super().submit(func, callback)
                    future.add_done_callback(fail)
                    return future

            # All at once: more workers may come later.
            yield {"backend": Cluster(client=client), "n_jobs": -1, "pre_dispatch": "all"}
        return
    from joblib import cpu_count

    # Of a worker that has grown by 300 MB and is exchanged for another: nothing is lost.
    warnings.filterwarnings("ignore", "A worker stopped while some jobs were given")
    threads = max(1, cpu_count() // processes)
    start = {"initializer": _begin_worker, "initargs": (threads, os.getpid())}
    yield {"backend": "loky", "n_jobs": processes, **start}


@contextlib.contextmanager
def started(jobs: Jobs) -> Iterator[Jobs]:
    """The same jobs, with their own Dask cluster running, for many calls of `run`, if asked for."""
    if jobs.dask != LOCAL:
        yield jobs
        return
    from joblib import cpu_count

    threads = os.environ.get("NPROC", str(max(1, cpu_count() // jobs.processes)))
    try:
        with _quiet_start():
            cluster = _distributed().LocalCluster(
                n_workers=jobs.processes,
                threads_per_worker=1,
                memory_limit=None,  # a model may need most of it
                dashboard_address="127.0.0.1:0",
                silence_logs=logging.CRITICAL,
                env={"NPROC": threads},
                preload=[_IGNORE_INTERRUPTS],
            )
    except RuntimeError as failure:
        raise CalibrateError(f"no Dask cluster could be started here: {failure}") from failure
    with cluster:
        yield replace(jobs, dask=cluster.scheduler_address)


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """What this thread starts meanwhile is deaf to Ctrl-C, and does not comment on our end.

    A worker that is still importing would answer Ctrl-C with a traceback. The helpers that remove
    the semaphores of a process that was interrupted or killed would warn of having done so.
    """
    if os.name != "posix":
        yield
        return
    from multiprocessing import resource_tracker

    sys.warnoptions.append(_NO_COMMENT)  # helpers are started with the same options
    try:
        resource_tracker.ensure_running()  # here, as its start would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    finally:
        sys.warnoptions.remove(_NO_COMMENT)


@contextlib.contextmanager
def _client(jobs: Jobs) -> Iterator[Any]:
    distributed = _distributed()
    try:
        # A client that fails later lingers.
        distributed.comm.get_address_host_port(jobs.dask)
        ours = distributed.Security().get_connection_args("client")
        if str(jobs.dask).startswith("tls:") and not ours.get("ssl_context"):
            raise ValueError("Dask's configuration names no certificates, distributed.comm.tls")
        client = distributed.Client(jobs.dask, timeout=SECONDS_TO_CONNECT, set_as_default=False)
    except (OSError, ValueError) as failure:
        raise CalibrateError(
            f"no Dask scheduler answers at {jobs.dask!r} ({failure}); give its address "
            "(tcp://HOST:PORT), or `local`"
        ) from failure
    with client:
        try:
            client.wait_for_workers(1, timeout=jobs.stall)
        except TimeoutError as failure:
            raise CalibrateError(
                f"the Dask cluster at {jobs.dask} had no worker for {jobs.stall:g} s; start some"
            ) from failure
        yield client


def _distributed() -> Any:
    try:
        import distributed
    except ImportError:
        raise CalibrateError(
            "--dask needs Dask, which is not installed; pip install 'calibrate[dask]'"
        ) from None
    return distributed


@contextlib.contextmanager
def _remedies(jobs: Jobs) -> Iterator[None]:
    """What the engines raise, in words."""
    try:
        yield
    except BrokenProcessPool as failure:
        raise CalibrateError(
            "a worker process died (killed, or out of memory?); what is finished is kept, and the "
            "same command carries on (fewer --jobs need less memory)"
        ) from failure
    except Stalled as failure:
        raise CalibrateError(
            f"no worker finished anything for {jobs.stall:g} s: did one die, or does a task take "
            "longer (--stall)? What is finished is kept, and the same command carries on"
        ) from failure


def _given_up(failure: BaseException) -> CalibrateError:
    what = f"{type(failure).__name__}: {failure}"
    return CalibrateError(
        f"the Dask cluster gave a task up ({what}); its workers need this version of calibrate and "
        "memory enough. What is finished is kept, and the same command carries on"
    )


def _pickled(task: Callable[[], Any]) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(task)
    except Exception as failure:
        raise CalibrateError(
            f"this cannot be sent to another process ({type(failure).__name__}: {failure}); load "
            "the head by a name (module:attribute), or use one process"
        ) from failure


def _call(place: int, sent: bytes) -> tuple[int, Any, list[str]]:
    """(place of the task, what it gives, what it warned of), in the process that does it."""
    try:
        task = pickle.loads(sent)
    except Exception as failure:
        raise CalibrateError(
            f"a worker cannot load its task ({type(failure).__name__}: {failure}); it needs this "
            "version of calibrate, and the head's modules and files at the same place"
        ) from failure
    with warnings.catch_warnings(record=True) as said:
        return place, task(), [str(warning.message) for warning in said]


def _begin_worker(threads: int, parent: int) -> None:
    # XLA reads the size of its thread pool from here when the process first uses it; joblib does
    # the same for other libraries. What the user has set stays.
    os.environ.setdefault("NPROC", str(threads))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """A worker whose parent was killed must not work on beside the next one's."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
