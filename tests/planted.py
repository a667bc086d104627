"""Rows whose targets are drawn from softmax at a planted beta: the truth that a fit should find."""

import numpy as np
from reference import entropy, softmax

from calibrate.rows.solve import SolvedInputs, concatenate_solved, solve_rows


def planted_rows(
    beta_of, sizes=(16, 64, 256), count=1_000, seed=0, scale=(0.3, 2.0)
) -> SolvedInputs:
    """Solved rows; beta_of(H, n) is the beta that targets are drawn at, (rows,)."""
    rng = np.random.default_rng(seed)
    parts = []
    for n in sizes:
        spread = rng.uniform(*scale, (count, 1))
        z = (spread * rng.standard_normal((count, n))).astype(np.float32)
        H = entropy(z)
        p = softmax(z, beta=np.broadcast_to(beta_of(H, n), H.shape)[:, None])
        target = (p.cumsum(axis=1) > rng.random((count, 1))).argmax(axis=1)
        parts.append(solve_rows(z, target.astype(np.int32), H, n))
    return concatenate_solved(parts)


def weighted_and_repeated(rows):
    """Rows of weight 1, 2 or 3, and the same rows written so often."""
    weight = 1 + np.arange(len(rows.beta)) % 3
    return rows._replace(weight=weight.astype(float)), rows.take(
        np.repeat(np.arange(len(weight)), weight)
    )
