"""Rows whose targets are drawn from softmax at a planted beta: the truth that a fit should find."""

import numpy as np
from reference import entropy, softmax

from calibrate.core.rule_kinds import KINDS
from calibrate.fitting.groups import deal_into_blocks
from calibrate.fitting.maximum_likelihood import Regression
from calibrate.fitting.pooled_rows import pool_rows
from calibrate.solver.solved_rows import Rows, concatenate_rows, solve_rows

NO_GAIN = r"constant [+-]\d\.\d{4} \("  # a refusal of all kinds: it lists their gains


def regression_of(rows, kind, options):
    """The regression that a likelihood solves for a kind of rule, by its name."""
    pool = pool_rows(deal_into_blocks(rows), options, options.q or 0.0)
    return Regression.of(KINDS[kind], pool, options)


def planted_rows(
    beta_of, sizes=(16, 64, 256), count=1_000, seed=0, scale=(0.3, 2.0), min_beta=1.0
) -> Rows:
    """Solved rows; beta_of(H, n) is the beta that targets are drawn at, (rows,)."""
    rng = np.random.default_rng(seed)
    parts = []
    for n in sizes:
        spread = rng.uniform(*scale, (count, 1))
        z = (spread * rng.standard_normal((count, n))).astype(np.float32)
        H = entropy(z)
        p = softmax(z, beta=np.broadcast_to(beta_of(H, n), H.shape)[:, None])
        target = (p.cumsum(axis=1) > rng.random((count, 1))).argmax(axis=1)
        parts.append(solve_rows(z, target.astype(np.int32), H, n, min_beta))
    return concatenate_rows(parts)


def grouped_nulls(seed, sizes=(16, 64), groups=8, count=100, spread=0.3, gap=0.0) -> Rows:
    """Solved rows of calibrated heads, whose rows of one group are nearly alike.

    Args:
      groups: prompts, with rows of every size.
      count: rows of each size and group.
      gap: by how much the highest logit is raised.
      spread: how much the luck of a group's targets differs; 1 is not at all dependent.
    """
    rng, parts = np.random.default_rng(seed), []
    luck, scale = rng.random((groups, 1)), rng.uniform(0.3, 2, (groups, 1, 1))
    for n in sizes:
        z = scale * rng.standard_normal((groups, count, n))
        z = -np.sort(-z, axis=2)
        z[..., 0] += gap
        z = z.reshape(-1, n).astype(np.float32)
        quantile = ((luck + spread * rng.random((groups, count))) % 1).reshape(-1, 1)
        target = (softmax(z).cumsum(axis=1) > quantile).argmax(axis=1)
        rows = solve_rows(z, target.astype(np.int32), entropy(z), n)
        parts.append(rows._replace(group=np.repeat(np.arange(groups), count)))
    return concatenate_rows(parts)
