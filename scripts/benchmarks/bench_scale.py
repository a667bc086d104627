"""Benchmark of a million rows: is the time linear in rows, and the memory constant?

Sets: collects 10^4, 10^5 and 10^6 sets of 64 items from the head max-retrieval, by one process and
by two. Seconds are those of a second run of the command in one process, so without compilation. The
peer is the same command with 10^5 sets: seconds a set, and memory of the largest process, beside
that one's.

Rows: collects, fits, diagnoses and scores the logits of 25 heads and of 500, 2,000 rows of 64 items
each, all of which are kept; with the processor seconds of all processes for each head, start
included. The peer is the same command with 25 heads. Linux only.

    python scripts/benchmarks/bench_scale.py [--sets N,N,...] [--heads N,N,...]    ("" omits one)
"""

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

PROCESSES = {"1 process": 1, "2 processes": 2}
ROWS_PER_HEAD, HEADS_PER_LAYER, N_ITEMS = 2_000, 25, 64
SAMPLING_SECONDS = 0.05
# Warms up with other sets, then runs once, or up to five times if it does not take long.
TIMED = """
import json, sys, time
from calibrate.cli.main import app

def seconds(seed, name):
    began = time.perf_counter()
    app([*json.loads(sys.argv[1]), "--seed", seed, "--out", name], standalone_mode=False)
    return time.perf_counter() - began

seconds("1", "warm")
runs = [seconds("0", "0")]
while sum(runs) < 10 and len(runs) < 5:
    runs.append(seconds("0", str(len(runs))))
print(min(runs))
"""


def cpu_seconds() -> float:
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(*words: object, folder: Path) -> tuple[str, float, float]:
    """The last line that a command prints, MiB of the largest of its processes, CPU seconds."""
    command, began = [sys.executable, *map(str, words)], cpu_seconds()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL, cwd=folder)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, largest())
            time.sleep(SAMPLING_SECONDS)
        if process.returncode:
            raise SystemExit(f"exit {process.returncode}: {' '.join(command)}")
        output.seek(0)
        return (output.read().splitlines() or [""])[-1], peak, cpu_seconds() - began


def largest() -> float:
    """Peak memory in MiB of the largest descendant of this process."""
    peak = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(FileNotFoundError):  # it has ended
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = max([peak, *(int(line.split()[1]) for line in status if "VmHWM" in line)])
    return peak / 1024


def collected(sets: int, processes: int, parent: Path) -> tuple[float, float]:
    """Seconds to collect, and peak memory in MiB."""
    words = ["collect", "--head", "max-retrieval", "--sizes", N_ITEMS, "--sets", sets]
    words = json.dumps([*map(str, words), "--jobs", str(processes)])
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        seconds, peak, _ = measured("-c", TIMED, words, folder=Path(folder))
    return float(seconds), peak


def sets_table(counts: list[int], parent: Path) -> None:
    middle = counts[len(counts) // 2]
    print(f"{'':>16} {'sets':>10} {'seconds':>8} {'sets/s':>9} {'a set':>6} {'MiB':>6} {'':>6}")
    for workers, processes in PROCESSES.items():
        results = {n: collected(n, processes, parent) for n in counts}
        peer, peer_peak = results[middle]
        for n, (seconds, peak) in results.items():
            ratio = seconds / n / (peer / middle)
            print(f"{workers:>16} {n:>10,} {seconds:>8.2f} {n / seconds:>9,.0f} {ratio:>6.2f} "
                  f"{peak:>6.0f} {peak / peer_peak:>6.2f}", flush=True)  # fmt: skip


def write_logits(folder: Path, n_heads: int) -> None:
    """A file of logits for each layer; every head is better for some sharpening."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    of_layer = min(n_heads, HEADS_PER_LAYER)
    for layer in range(n_heads // of_layer):
        rows = of_layer * ROWS_PER_HEAD
        spread = np.exp(rng.normal(0, 0.5, rows))
        logits = rng.standard_normal((rows, N_ITEMS)) * spread[:, None]
        target = rng.integers(0, N_ITEMS, rows)
        logits[np.arange(rows), target] += rng.normal(1.5, 1, rows) * spread
        np.savez(
            folder / f"layer{layer:03d}.npz",
            logits=logits.astype(np.float32),
            target=target.astype(np.int32),
            layer=np.full(rows, layer, np.int16),
            head=np.tile(np.arange(of_layer, dtype=np.int16), ROWS_PER_HEAD),
        )


def rows_table(counts: list[int], parent: Path) -> None:
    commands: dict[str, Callable[[int], list[object]]] = {
        "collect": lambda n: ["--logits", n, "--out", f"run{n}", "--max-bytes", 10**10],
        "fit": lambda n: [f"run{n}", "--name", f"of{n}"],
        "diagnose": lambda n: [f"run{n}"],
        "evaluate": lambda n: ["--logits", n, "--fits", f"of{n}"],
    }
    for n in counts:
        write_logits(parent / str(n), n)
    print(f"\n{'':>16} {'heads':>6} {'rows kept':>10} {'CPU s':>8} {'a head':>7} {'MiB':>6}")
    for name, options in commands.items():
        peer = 0.0
        for n in counts:
            _, peak, seconds = measured("-m", "calibrate", name, *options(n), folder=parent)
            peer = peer or peak
            print(f"{name:>16} {n:>6} {n * ROWS_PER_HEAD:>10,} {seconds:>8.1f} "
                  f"{seconds / n:>7.3f} {peak:>6.0f} {peak / peer:>6.2f}", flush=True)  # fmt: skip


def main() -> None:
    def numbers(text: str) -> list[int]:
        return list(map(int, filter(None, text.split(","))))

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=numbers, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--heads", type=numbers, default=[HEADS_PER_LAYER, 20 * HEADS_PER_LAYER])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.sets:
            sets_table(asked.sets, Path(folder))
        if asked.heads:
            rows_table(asked.heads, Path(folder))


if __name__ == "__main__":
    main()
