"""Benchmark of optimal_beta against scipy.optimize.minimize_scalar, row by row, on one core.

The rows are misranked rows of the shipped head. The peer minimises -log p_t(beta) with Brent's
method, its default. Two objectives: with SciPy's own logsumexp, as one would write it, and the same
sums in NumPy at their leanest.

    python scripts/benchmarks/bench_theta.py
"""

import os

os.environ["NPROC"] = "1"  # XLA's thread pool; read when JAX starts
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp, softmax
from timing import answer_help, medians

import calibrate
from calibrate.rows.heads import load_head

ROWS = {64: 4_096, 1_024: 1_024, 16_384: 128}
PEER_ROWS = {64: 200, 1_024: 100, 16_384: 16}
REPEATS = 7


def misranked_rows(head, size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(logits, target) of misranked rows of the head."""
    logits, targets, seed = [], [], 0
    while sum(map(len, targets)) < count:
        batch = head.sample(seed, size, max(1, 2**15 // size))
        z = np.asarray(head.attend(batch).logits)
        chosen = z.max(axis=1) > np.take_along_axis(z, batch.target[:, None], axis=1)[:, 0]
        logits.append(z[chosen])
        targets.append(batch.target[chosen])
        seed += 1
    return np.concatenate(logits)[:count], np.concatenate(targets)[:count]


def with_logsumexp(z: np.ndarray, target: int) -> float:
    return float(minimize_scalar(lambda beta: logsumexp(beta * z) - beta * z[target]).x)


def with_lean_numpy(z: np.ndarray, target: int) -> float:
    u = z - z[target]

    def loss(beta: float) -> float:
        v = beta * u
        top = v.max()
        return top + np.log(np.exp(v - top).sum())

    return float(minimize_scalar(loss).x)


def main() -> None:
    head = load_head("max-retrieval")
    print("medians, microseconds a row; ratio = SciPy / ours")
    print(f"{'n':>7} {'ours':>8} {'logsumexp':>12} {'ratio':>7} {'lean NumPy':>11} {'ratio':>7}"
          "   |residual| / range, largest")  # fmt: skip
    for size, count in ROWS.items():
        logits, target = misranked_rows(head, size, count)
        few = [(z.astype(np.float64), t) for z, t in zip(logits, target, strict=True)]
        few = few[: PEER_ROWS[size]]
        took = medians(
            {
                "ours": lambda z=logits, t=target: calibrate.optimal_beta(z, t),
                "scipy": lambda rows=few: [with_logsumexp(*row) for row in rows],
                "lean": lambda rows=few: [with_lean_numpy(*row) for row in rows],
            },
            REPEATS,
        )
        solver = took["ours"] * 1e6 / count
        scipy, lean = (took[name] * 1e6 / len(few) for name in ("scipy", "lean"))
        beta = calibrate.optimal_beta(logits, target).beta
        residual = max(
            abs(softmax(float(b) * z) @ (z - z[t])) / np.ptp(z)
            for b, (z, t) in zip(beta, few, strict=False)
        )
        print(f"{size:>7,} {solver:>8.2f} {scipy:>12.0f} {scipy / solver:>6.0f}x {lean:>11.0f} "
              f"{lean / solver:>6.0f}x   {residual:.1e}")  # fmt: skip


if __name__ == "__main__":
    answer_help(__doc__)
    main()
