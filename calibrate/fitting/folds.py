"""Folds of whole groups, dealt in an order that depends on the inputs' content alone."""

import numpy as np

from calibrate.solver.solved_rows import Rows

N_FOLDS = 5


def deal_folds(rows: Rows, seed: int = 0) -> np.ndarray:
    """(rows,) fold of each row, from 0 to N_FOLDS - 1.

    Groups are sorted by their largest n, mean entropy and mean log p at beta = 1. Each N_FOLDS
    groups in this order go to different folds at random, so that folds are alike, and so that a
    permutation of the rows, or rows written twice at half the weight, change nothing.
    """
    group = rows.group_index()
    n_groups = group.max(initial=-1) + 1
    largest = np.zeros(n_groups)
    np.maximum.at(largest, group, rows.items)
    total = np.bincount(group, rows.weight, n_groups)
    total = np.where(total > 0, total, 1)
    entropy, log_p = (
        np.bincount(group, rows.weight * values, n_groups) / total
        for values in (rows.entropy, rows.log_p(1.0))
    )
    order = np.lexsort([log_p, entropy, largest])
    rng = np.random.default_rng(seed)
    n_deals = -(-n_groups // N_FOLDS)
    deals = rng.permuted(np.tile(np.arange(N_FOLDS), (n_deals, 1)), axis=1).ravel()
    fold = np.empty(n_groups, int)
    fold[order] = deals[:n_groups]
    return np.asarray(fold[group])
