"""A limit in time for what has none of its own: looking up a host, headers that drip."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a call, or its error; TimeoutError if that takes longer.

    The thread that still waits is left behind; it does not keep the process from ending.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as failure:
            future.set_exception(failure)

    Thread(target=run, daemon=True).start()
    return future.result(seconds)
