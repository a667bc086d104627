"""Is the cost of collecting linear in the rows, and memory flat?

Collects 10^4, 10^5 and 10^6 sets of 64 items from the head max-retrieval, by one process, by two,
and by a local Dask cluster of two workers, and fits what the first collected. The peer is the same
command with 10^5 sets: seconds a row, and memory of its largest process, beside that one's. What
it costs to start (a command with 64 sets) is taken off the seconds.

    python scripts/bench_scale.py [SETS ...]
"""

import subprocess
import sys
import tempfile
from pathlib import Path

SETS = [10_000, 100_000, 1_000_000]
WAYS = {
    "1 process": ["--jobs", "1"],
    "2 processes": ["--jobs", "2"],
    "Dask, 2 workers": ["--jobs", "2", "--dask", "local"],
}
# Runs in a process of its own, as the largest child of all that a process had is told.
MEASURE = """
import resource, subprocess, sys, time
start = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, capture_output=True)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(time.perf_counter() - start, peak / 1024)
"""


def measured(*command: object) -> tuple[float, float]:
    """Seconds of a command of ours, and MiB of its largest process."""
    words = [sys.executable, "-c", MEASURE, "calibrate", *map(str, command)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    seconds, peak = map(float, done.stdout.split())
    return seconds, peak


def collect(folder: Path, sets: int, options: list[str]) -> tuple[float, float]:
    command = ("collect", "--head", "max-retrieval", "--sizes", 64, "--sets", sets)
    return measured(*command, "--out", folder, *options)


def main() -> None:
    counts = [int(word) for word in sys.argv[1:]] or SETS
    middle = counts[len(counts) // 2]
    print(f"{'':>16} {'sets':>10} {'seconds':>8} {'sets/s':>9} {'a set':>6} {'MiB':>6} {'':>6}")
    with tempfile.TemporaryDirectory() as parent:
        for way, options in WAYS.items():
            start, _ = collect(Path(parent) / f"{way}-start", 64, options)
            found = {n: collect(Path(parent) / f"{way}-{n}", n, options) for n in counts}
            of_peer, peer_peak = found[middle]
            peer = (of_peer - start) / middle
            for n, (seconds, peak) in found.items():
                each = (seconds - start) / n
                print(f"{way:>16} {n:>10,} {seconds:>8.1f} {1 / each:>9,.0f} {each / peer:>6.2f} "
                      f"{peak:>6.0f} {peak / peer_peak:>6.2f}", flush=True)  # fmt: skip
        folders = [Path(parent) / f"1 process-{n}" for n in counts]
        fits = [measured("fit", f, "--name", "n", "--store", f"{f}-fits") for f in folders]
        peer_peak = fits[len(counts) // 2][1]
        for n, (seconds, peak) in zip(counts, fits, strict=True):
            print(f"{'fit':>16} {n:>10,} {seconds:>8.1f} {'':>9} {'':>6} {peak:>6.0f} "
                  f"{peak / peer_peak:>6.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
