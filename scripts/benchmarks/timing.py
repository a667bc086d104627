"""Timing for benchmarks: medians of calls in turns, on one core of the CPU and on two."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
            _run_here(measure.__name__, cores)


SUMMARY = "--summary"
Row = tuple[str, str, Callable[[], Any], Callable[[], Any]]  # what, peer, calls of peer and ours


def summarise(*sources: Callable[[], Iterator[Row]], rounds: int = 15, calls: int = 3) -> None:
    """Prints a table of times relative to a peer, by number of cores; a process for each source.

    Args:
      sources: each yields the rows of one library.
      rounds, calls: see `medians`.
    """
    if "--here" in sys.argv:
        source = next(x for x in sources if x.__name__ in sys.argv)
        for what, peer, of_peer, ours in source():
            took = medians({"peer": of_peer, "ours": ours}, rounds, calls)
            print(json.dumps([what, peer, took["ours"] / took["peer"]]), flush=True)
        return
    cores = list(dict.fromkeys(["1", "2", str(os.cpu_count())]))
    print(f"| times as long as | peer | {' | '.join(f'cores: {n}' for n in cores)} |")
    print(f"| --- | --- |{' ---: |' * len(cores)}")
    for source in sources:
        ratios: dict[tuple[str, str], list[str]] = {}
        for n in cores:
            for line in _run_here(source.__name__, n, SUMMARY, stdout=subprocess.PIPE).splitlines():
                what, peer, ratio = json.loads(line)
                ratios.setdefault((what, peer), []).append(f"{ratio:.2f}")
        for names, of_cores in ratios.items():
            print(f"| {' | '.join([*names, *of_cores])} |", flush=True)


def _run_here(name: str, cores: str, *words: str, stdout: int | None = None) -> str:
    """Runs a measure in a process that uses so many cores; returns its output if it is piped."""
    # XLA's thread pool and PyTorch's, both read when they start
    environment = os.environ | {"NPROC": cores, "OMP_NUM_THREADS": cores}
    command = [sys.executable, sys.argv[0], "--here", name, *words]
    ended = subprocess.run(command, env=environment, check=True, stdout=stdout, text=True)
    return ended.stdout or ""
