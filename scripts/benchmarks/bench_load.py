"""Benchmark of verifying coefficient files against json.loads of the same bytes.

The loader parses strictly, checks every field, the check pairs and the id, and builds the fit;
both start from bytes in memory. And of imports against what they need: processor seconds.

    python scripts/benchmarks/bench_load.py
"""

import json
import random
import resource
import subprocess
import sys

from timing import answer_help, medians

import calibrate
from calibrate.core.rule import RuleForm
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit, dumps
from calibrate.store.loading import loads

ROUNDS = 15
# An import of ours, and the one that it cannot do without.
IMPORTS = {
    "import calibrate": "import numpy",
    "import calibrate; calibrate.load": "import numpy",
    "import calibrate; calibrate.adaptive_softmax": "import jax",
    "import calibrate; calibrate.fit": "import jax, scipy.special",
    "import calibrate; calibrate.SoftmaxCalibrator": "import jax, scipy.special, sklearn.base",
    "import calibrate.torch": "import torch",
    "import calibrate.transformers": "from transformers import PreTrainedModel",
}
IMPORTS_EACH = 3
CALLS = 1_000_000  # of a byte, a round


def many_heads(count: int) -> bytes:
    """The file of a fit with that many heads, of random polynomials."""
    rng = random.Random(0)
    entries = tuple(
        Entry(
            tuple(rng.gauss(0, 1) for _ in range(5)),
            (rng.random(), 5 + rng.random()),
            layer=i // 32,
            head=i % 32,
        )
        for i in range(count)
    )
    return dumps(Fit(RuleForm(), entries, name="many-heads")).encode()


def shipped(name: str) -> bytes:
    path = calibrate.load(name).path
    assert path is not None
    return path.read_bytes()


def import_seconds(statement: str) -> float:
    """Processor seconds of a new process that imports something."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports_table() -> None:
    print(f"\n{'':>45} {'CPU s':>6} {'peer':>6} {'more':>6}  least of {IMPORTS_EACH}")
    for ours, peer in IMPORTS.items():
        pairs = [[import_seconds(x) for x in (ours, peer)] for _ in range(IMPORTS_EACH)]
        seconds, of_peer = map(min, zip(*pairs, strict=True))
        print(f"{ours:>45} {seconds:>6.2f} {of_peer:>6.2f} {seconds - of_peer:>6.2f}", flush=True)


def main() -> None:
    files = {
        "paper": shipped("paper"),
        "max-retrieval": shipped("max-retrieval"),
        "32 heads": many_heads(32),
        "1,024 heads": many_heads(1_024),
    }
    print(f"{'file':>14} {'bytes':>9} {'json.loads':>11} {'ours':>9}  ratio of medians")
    for name, data in files.items():
        calls = max(1, CALLS // len(data))
        took = medians({"json": lambda d=data: json.loads(d), "ours": lambda d=data: loads(d)},
                       ROUNDS, calls)  # fmt: skip
        peer, loader = (1e6 * seconds for seconds in took.values())
        print(f"{name:>14} {len(data):>9,} {peer:>8.1f} us {loader:>6.1f} us  {loader / peer:.2f}")
    imports_table()


if __name__ == "__main__":
    answer_help(__doc__)
    main()
