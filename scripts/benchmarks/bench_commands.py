"""Benchmark of commands: seconds, processor seconds and memory, by one process and by two.

python scripts/benchmarks/bench_commands.py [--sets N] [--heads N,N]    (0 and "" omit a table)

Commands: for the built-in head, with N inputs of each of nine sizes. The peer of two processes is
the same command with one.

Heads: the same for arrays of logits of N heads, 2,000 rows of 64 items each. Memory should not grow
with the number of heads. MiB are of the largest process. Linux only.
"""

import argparse
import contextlib
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

HEAD = "max-retrieval"
ROWS_PER_HEAD, HEADS_PER_LAYER, N_ITEMS = 2_000, 25, 64
SAMPLING_SECONDS = 0.05


class Cost(NamedTuple):
    seconds: float
    processor_seconds: float  # of all processes
    mebibytes: float  # of the largest process


def measure(folder: Path, *words: object) -> Cost:
    """Runs a command of `calibrate` in a folder."""
    command = [sys.executable, "-m", "calibrate", *map(str, words)]
    began, before, peak = time.perf_counter(), processor_seconds(), 0.0
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=folder, **quiet)
    while process.poll() is None:
        peak = max(peak, largest_process())
        time.sleep(SAMPLING_SECONDS)
    if process.returncode not in (0, 3):  # 3: the answer is no
        raise SystemExit(f"exit {process.returncode}: {' '.join(command)}")
    return Cost(time.perf_counter() - began, processor_seconds() - before, peak)


def processor_seconds() -> float:
    """Of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def largest_process() -> float:
    """Peak memory in MiB of the largest descendant of this process."""
    peak = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(FileNotFoundError):  # it has ended
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = max([peak, *(int(line.split()[1]) for line in status if "VmHWM" in line)])
    return peak / 1024


def show(name: str, costs: list[Cost]) -> None:
    """Prints a line of a table: costs by one process, then by two, if it was measured."""
    cells = [f"{c.seconds:.1f} | {c.processor_seconds:.1f} | {c.mebibytes:.0f}" for c in costs]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def commands_table(sets: int, folder: Path) -> None:
    print("| command | s | processor s | MiB | two processes: s | processor s | MiB |")
    print(f"| --- |{' ---: |' * 6}")
    show("run", [measure(folder, "run")])
    show("report", [measure(folder, "report", HEAD, "--out", "page.html")])
    collect = ("collect", "--head", HEAD, "--sizes", "16..4096", "--sets", sets, "--out")
    both = [("--jobs", jobs) for jobs in (1, 2)]
    show("collect", [measure(folder, *collect, f"rows{x[1]}", *x) for x in both])
    show("fit", [measure(folder, "fit", "rows1", "--name", f"fit{x[1]}", *x) for x in both])
    evaluate = ("evaluate", HEAD, "--sizes", "16..4096", "--sets", sets)
    show("evaluate", [measure(folder, *evaluate, *x) for x in both])


def write_logits(folder: Path, n_heads: int) -> None:
    """Writes a file of logits for each layer; every head gains from some sharpening."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    in_layer = min(n_heads, HEADS_PER_LAYER)
    for layer in range(n_heads // in_layer):
        rows = in_layer * ROWS_PER_HEAD
        spread = np.exp(rng.normal(0, 0.5, rows))
        logits = rng.standard_normal((rows, N_ITEMS)) * spread[:, None]
        target = rng.integers(0, N_ITEMS, rows)
        logits[np.arange(rows), target] += rng.normal(1.5, 1, rows) * spread
        np.savez(
            folder / f"layer{layer:03d}.npz",
            logits=logits.astype(np.float32),
            target=target.astype(np.int32),
            layer=np.full(rows, layer, np.int16),
            head=np.tile(np.arange(in_layer, dtype=np.int16), ROWS_PER_HEAD),
        )


def heads_table(counts: list[int], folder: Path) -> None:
    print(f"\n| command |{' s | processor s | MiB |' * len(counts)} heads: {counts}")
    for n in counts:
        write_logits(folder / str(n), n)
    for name, words in {
        "collect": "--logits {0} --out run{0} --max-bytes 10e9",
        "fit": "run{0} --name of{0}",
        "fit --jobs 2": "run{0} --name by2of{0} --jobs 2",
        "diagnose": "run{0}",
        "evaluate": "of{0} --logits {0}",
    }.items():
        show(name, [measure(folder, *f"{name} {words}".format(n).split()) for n in counts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=16_384)
    parser.add_argument("--heads", default=f"{HEADS_PER_LAYER},{4 * HEADS_PER_LAYER}")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.sets:
            commands_table(asked.sets, Path(folder))
        if asked.heads:
            heads_table([int(n) for n in asked.heads.split(",")], Path(folder))


if __name__ == "__main__":
    main()
