"""Timing for benchmarks: medians of calls in turns, on one core of the CPU and on two."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any


def medians(
    functions: dict[str, Callable[[], Any]],
    rounds: int,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds a call of each function, all called in every round; the first round is not timed."""
    took: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(-1, rounds):
        for name, function in functions.items():
            start = clock()
            for _ in range(calls):
                function()
            if round_ >= 0:
                took[name].append((clock() - start) / calls)
    return {name: median(seconds) for name, seconds in took.items()}


def answer_help(about: str | None) -> None:
    """Prints what a benchmark does, and ends, if it is asked with --help."""
    if "--help" in sys.argv:
        print(about)
        sys.exit()


def on_cores(*measures: Callable[[], None]) -> None:
    """Runs measures in this process if the script has --here, else each in its own process.

    PyTorch and JAX run in separate processes, as their threads would compete for the cores.
    """
    for measure in measures:
        if "--here" in sys.argv:
            if measure.__name__ in sys.argv or len(sys.argv) == 2:
                measure()
            continue
        for cores in "12":
            print(f"\non {cores} of the CPU's cores", flush=True)
            # XLA's thread pool and PyTorch's, both read when they start
            environment = os.environ | {"NPROC": cores, "OMP_NUM_THREADS": cores}
            command = [sys.executable, sys.argv[0], "--here", measure.__name__]
            subprocess.run(command, env=environment, check=True)
