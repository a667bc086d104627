"""The set size at which a target's attention coefficient is too small."""

import numpy as np
from numpy.typing import ArrayLike


def dispersal_size(logits: ArrayLike, target: ArrayLike, eps: float = 0.5) -> np.ndarray:
    """n* = 1 + (1 / eps - 1) / m: from there on the target's coefficient is below eps.

    m is the mean of exp(z_j - z_t) over the other items: with n items of the same kind the
    coefficient is 1 / (1 + (n - 1) m). For k targets it is their total mass,
    n* = k + (1 / eps - 1) sum_t exp(z_t) / mean_j exp(z_j): as many targets among ever more others.

    Args:
      logits: (rows, n), -inf where masked.
      target: (rows,) int, an unmasked position; or (rows, n) bool, True at one or more of them.
      eps: the coefficient in question, between 0 and 1.
    Returns:
      (rows,) n*, a number of items; inf where no other item has any weight.
    """
    z, wins = np.asarray(logits, float), np.asarray(target)
    real = np.isfinite(z)
    wins = real & (wins if wins.ndim > 1 else np.arange(z.shape[1]) == wins[:, None])
    best = np.max(z, axis=1, where=wins, initial=-np.inf, keepdims=True)
    n_targets = wins.sum(axis=1)
    n_others = np.maximum(real.sum(axis=1) - n_targets, 1)
    with np.errstate(over="ignore", divide="ignore"):  # targets far below or above the others
        weights = np.exp(z - best)
        mass, rest = (weights.sum(axis=1, where=side) for side in (wins, ~wins))
        return np.asarray(n_targets + (1 / eps - 1) * mass * n_others / rest)
