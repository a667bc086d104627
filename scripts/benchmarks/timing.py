"""Timing for benchmarks: ratios to a named peer in the same process, by number of cores."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple


class Row(NamedTuple):
    """A comparison; `summarise` prints those of one name and peer in one line."""

    what: str
    peer: str
    of_peer: Callable[[], Any]
    ours: Callable[[], Any]


def medians(
    functions: dict[str, Callable[[], Any]], rounds: int, calls: int = 1
) -> dict[str, float]:
    """Seconds a call of each function, all called in every round; the first round is not timed."""
    took: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(-1, rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                function()
            if round_ >= 0:
                took[name].append((time.perf_counter() - start) / calls)
    return {name: median(seconds) for name, seconds in took.items()}


def answer_help(about: str | None) -> None:
    """Prints what a benchmark does, and ends, if it is asked with --help."""
    if "--help" in sys.argv:
        print(about)
        sys.exit()


def summarise(*sources: Callable[[], Iterator[Row]], rounds: int, calls: int = 1) -> None:
    """Prints a table of times relative to a peer, on one core, two and all.

    A line of several rows has their median, and all in brackets. Each source runs in a process of
    its own, as the threads of PyTorch and JAX would compete for the cores. With --here, the table
    has one column, for the devices that these processes find.

    Args:
      sources: each yields the rows of one library.
      rounds, calls: see `medians`.
    """
    if "--of" in sys.argv:
        source = next(x for x in sources if x.__name__ == sys.argv[-1])
        for what, peer, of_peer, ours in source():
            took = medians({"peer": of_peer, "ours": ours}, rounds, calls)
            print(json.dumps([what, peer, took["ours"] / took["peer"]]), flush=True)
        return
    cores = list(dict.fromkeys(["1", "2", str(os.cpu_count())]))
    columns = ["here"] if "--here" in sys.argv else cores
    print(f"| times as long as | peer | {' | '.join(f'cores: {n}' for n in columns)} |")
    print(f"| --- | --- |{' ---: |' * len(columns)}")
    for source in sources:
        lines: dict[tuple[str, str], list[list[float]]] = {}
        for number, n in enumerate(columns):
            for what, peer, ratio in _ratios_of(source.__name__, n):
                of_cores = lines.setdefault((what, peer), [[] for _ in columns])
                of_cores[number].append(ratio)
        for names, of_cores in lines.items():
            print(f"| {' | '.join([*names, *map(_cell, of_cores)])} |", flush=True)


def _cell(ratios: list[float]) -> str:
    each = f" ({', '.join(f'{ratio:.2f}' for ratio in ratios)})" if len(ratios) > 1 else ""
    return f"{median(ratios):.2f}{each}"


def _ratios_of(source: str, cores: str) -> list[list[Any]]:
    """Runs a source in a process that uses so many cores."""
    # XLA's thread pool and PyTorch's, both read when they start
    limits = {} if cores == "here" else {"NPROC": cores, "OMP_NUM_THREADS": cores}
    ended = subprocess.run(
        [sys.executable, sys.argv[0], "--of", source], env=os.environ | limits, check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return [json.loads(line) for line in ended.stdout.splitlines()]
