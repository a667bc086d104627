"""Peak memory for benchmarks, each measured in a process of its own. Linux only."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What is freed goes back to the system, so that resident memory is what is in use.
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "OMP_NUM_THREADS": "1",
    "NPROC": "1",
}
ASKED = "--memory"
Prepared = Callable[[], Callable[[], Any] | int]


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most resident memory during a call, over what there was before: its result included."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _kib("VmRSS")
    call()
    return 1024 * (_kib("VmHWM") - before)


def _kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def show_peaks(of: str, rows: dict[str, dict[str, Prepared]]) -> None:
    """Prints the peak of each entry of each row, in MB, and as multiples of the row's first.

    Args:
      of: what they are of, in words.
      rows: what is measured, by name and by row. Each, called in a process of its own, loads and
        compiles what is needed, and returns the call to be measured; or the bytes themselves.
    """
    if sys.argv[-1] != ASKED:
        row, name = sys.argv[-2:]
        prepared = rows[row][name]()
        print(prepared if isinstance(prepared, int) else peak_bytes(prepared))
        return
    print(f"the most memory during a call, its result included; {of}")
    for row, entries in rows.items():
        peaks = {name: _measured(row, name) / 1e6 for name in entries}
        (stock, unit), *others = peaks.items()
        words = (f"{name} {mb:,.1f} MB, {mb / unit:.2g} times" for name, mb in others)
        print(f"{row:>40}: {stock} {unit:,.1f} MB; {'; '.join(words)}", flush=True)


def _measured(row: str, name: str) -> int:
    command = [sys.executable, sys.argv[0], ASKED, row, name]
    environment = os.environ | _ENVIRONMENT
    ended = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return int(ended.stdout.splitlines()[-1])
