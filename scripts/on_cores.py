"""Runs a benchmark on one core of the CPU and on two, each in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable


def on_cores(measure: Callable[[], None]) -> None:
    """Measures here if the script was called with --here, else in a process for each count."""
    if "--here" in sys.argv:
        measure()
        return
    for cores in "12":
        print(f"\non {cores} of the CPU's cores", flush=True)
        environment = os.environ | {"NPROC": cores}  # XLA's thread pool; read when JAX starts
        subprocess.run([sys.executable, sys.argv[0], "--here"], env=environment, check=True)
