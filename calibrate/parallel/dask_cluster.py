"""Dask: a local cluster, the connection to a scheduler, and tasks that run on its workers."""

import contextlib
import logging
import os
import queue
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import TimeoutError as Stalled
from typing import Any

from calibrate.errors import CalibrateError, install
from calibrate.parallel.workers import Outcome, Outcomes, call, quiet_start, serialise

SECONDS_TO_CONNECT = 10.0
_IGNORE_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"


@contextlib.contextmanager
def local_cluster(processes: int, threads: int | None) -> Iterator[str]:
    """The address of a scheduler on this machine; see `Jobs` for the arguments."""
    from joblib import cpu_count

    nproc = os.environ.get("NPROC", max(1, cpu_count() // processes))
    try:
        with quiet_start():
            cluster = _distributed().LocalCluster(
                n_workers=processes,
                threads_per_worker=1,
                memory_limit=None,  # a model may need most of it
                dashboard_address="127.0.0.1:0",
                silence_logs=logging.CRITICAL,
                env={"NPROC": str(threads or nproc)},
                preload=[_IGNORE_INTERRUPTS],
            )
    except RuntimeError as failure:
        raise CalibrateError(f"cannot start a Dask cluster on this machine: {failure}") from failure
    with cluster:
        yield cluster.scheduler_address


def outcomes(tasks: Iterable[Callable[[], Any]], address: str, timeout: float) -> Outcomes:
    """The outcomes of tasks as they finish; raises Stalled if none does for `timeout` seconds."""
    finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with _connected(address, timeout) as client:
        # Serialised here, to refuse what cannot be. All are submitted: workers may join.
        futures = [
            client.submit(_capture, number, serialise(task), pure=False)
            for number, task in enumerate(tasks)
        ]
        for future in futures:
            future.add_done_callback(finished.put)
        for _ in futures:
            yield _outcome(finished, timeout)


def _capture(number: int, task_bytes: bytes) -> Outcome | Exception:
    """The outcome of a task, or its exception, so that what Dask raises is Dask's own."""
    try:
        return call(number, task_bytes)
    except Exception as failure:
        failure.add_note("In a worker: " + traceback.format_exc())
        return failure


def _outcome(finished: queue.SimpleQueue[Any], timeout: float) -> Outcome:
    try:
        outcome: Outcome | Exception = finished.get(timeout=timeout).result(timeout=timeout)
    except (queue.Empty, TimeoutError) as failure:
        raise Stalled from failure
    except Exception as failure:
        raise CalibrateError(
            f"a task failed on the Dask cluster ({type(failure).__name__}: {failure}); its workers "
            "need this version of calibrate and enough memory. Finished units are kept, and the "
            "same command resumes"
        ) from failure
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@contextlib.contextmanager
def _connected(address: str, timeout: float) -> Iterator[Any]:
    distributed = _distributed()
    try:
        # First: a client that fails later lingers.
        distributed.comm.get_address_host_port(address)
        tls = distributed.Security().get_connection_args("client")
        if address.startswith("tls:") and not tls.get("ssl_context"):
            raise ValueError("Dask's configuration names no certificates, distributed.comm.tls")
        client = distributed.Client(address, timeout=SECONDS_TO_CONNECT, set_as_default=False)
    except (OSError, ValueError) as failure:
        raise CalibrateError(
            f"no Dask scheduler answers at {address!r} ({failure}); give its address "
            "(tcp://HOST:PORT), or `local`"
        ) from failure
    with client:
        try:
            client.wait_for_workers(1, timeout=timeout)
        except TimeoutError as failure:
            raise CalibrateError(
                f"the Dask cluster at {address} had no worker for {timeout:g} s; start one"
            ) from failure
        yield client


def _distributed() -> Any:
    try:
        import distributed
    except ImportError:
        raise CalibrateError(f"dask= needs Dask: {install('dask')}", parameter="dask") from None
    return distributed
