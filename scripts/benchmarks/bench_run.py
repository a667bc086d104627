"""Benchmark of `calibrate run`, step by step, against the head's bare forward passes.

Twice, each in a new process: without compiled programs from before, and with them.

python scripts/benchmarks/bench_run.py
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import answer_help

STEPS = {
    "collect": "calibrate.cli.run.collect_rows",
    "fit": "calibrate.cli.run.save_fit",
    "score": "calibrate.cli.row_scoring.score_fit_of_head",
    "report": "calibrate.cli.row_scoring.write_report",
}
FORWARD_SETS, SIZES = 1_024, [2**i for i in range(4, 13)]  # those of `calibrate run`, twice


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept = {"JAX_COMPILATION_CACHE_DIR": str(Path(folder) / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}  # fmt: skip
        for name in ("first", "second"):
            work = Path(folder) / name
            work.mkdir()
            print(f"{name} run", flush=True)
            here = [sys.executable, Path(__file__).absolute(), "--here"]
            subprocess.run(here, cwd=work, env=os.environ | kept, check=True)
    forward()


def measure() -> None:
    """Runs it in this process; steps print seconds, of the clock and of the processor."""
    begin = time.perf_counter()
    from importlib import import_module

    from jax import monitoring

    from calibrate.cli.main import app

    compiled = []
    monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: "backend_compile" in event and compiled.append(duration)
    )

    def show(name: str, start: float, processor: float, n_compiled: int) -> None:
        print(f"{name:>10}: {time.perf_counter() - start:6.1f} s, of the processor "
              f"{time.process_time() - processor:6.1f} s, {len(compiled) - n_compiled:3} programs",
              file=sys.stderr, flush=True)  # fmt: skip

    def timed(name: str, step):
        def call(*arguments, **options):
            start = time.perf_counter(), time.process_time(), len(compiled)
            try:
                return step(*arguments, **options)
            finally:
                show(name, *start)

        return call

    for name, place in STEPS.items():
        module, function = place.rsplit(".", 1)
        loaded = import_module(module)
        setattr(loaded, function, timed(name, getattr(loaded, function)))
    with open(os.devnull, "w") as nowhere:
        screen, sys.stdout = sys.stdout, nowhere
        app(["run"], standalone_mode=False)
        sys.stdout = screen
    show("all", begin, 0.0, 0)


def forward() -> None:
    """The peer: the same number of sets through the head, and nothing else."""
    import jax

    from calibrate.rows.heads import load_head
    from calibrate.rows.units import Unit, attended_pieces

    head = load_head("max-retrieval")
    for attempt in ("with compilation", "without"):
        start = time.perf_counter(), time.process_time()
        for size in SIZES:
            for number in range(2):
                for _, _, attended in attended_pieces(
                    head, "bench", 0, Unit(size, number, 0, FORWARD_SETS)
                ):
                    jax.block_until_ready(attended.logits)
        print(f"bare forward passes, {attempt}: {time.perf_counter() - start[0]:.1f} s, "
              f"of the processor {time.process_time() - start[1]:.1f} s")  # fmt: skip


if __name__ == "__main__":
    answer_help(__doc__)
    measure() if "--here" in sys.argv else main()
