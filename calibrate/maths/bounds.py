"""Bounds on attention coefficients, and the set size at which a target's coefficient is too small.

The two bounds hold for every row and are loose; `dispersal_size` is an estimate, and close.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def coefficient_bounds(
    spread: ArrayLike, size: ArrayLike, beta: ArrayLike = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Lemma 2.1: every coefficient lies in [exp(-beta delta) / n, exp(beta delta) / n].

    Args:
      spread: delta, the largest logit less the smallest, of the row or a bound of it; any shape.
      size: n, the number of unmasked items; likewise.
      beta: inverse temperature; likewise.
    Returns:
      (lower, upper), float64, of the broadcast shape; upper is at most 1.
    Reference: Velickovic et al. 2024, Lemma 2.1.
    """
    exponent = np.multiply(beta, np.asarray(spread, float))
    log_n = np.log(np.asarray(size, float))
    return np.exp(-exponent - log_n), np.exp(np.minimum(exponent - log_n, 0))


def spread_bound(query_norm: Any, key_norm: Any, item_norm: Any) -> Any:
    """Proposition 3.1 for attention with biases: delta <= 2 |Q y + b| s_max(K) max |x|.

    A key bias adds the same to every logit of a row, and the scale 1/sqrt(d) is taken into the
    query: the bound is on what the softmax sees.

    Args:
      query_norm: (rows,) |Q y + b| / sqrt(d).
      key_norm: s_max(K), the largest singular value of the key matrix.
      item_norm: (rows,) the largest |x| of the row's items.
    Returns:
      (rows,) an upper bound of the largest logit less the smallest.
    Reference: Velickovic et al. 2024, Proposition 3.1 and appendix A.3.
    """
    return 2 * query_norm * key_norm * item_norm


def dispersal_size(logits: ArrayLike, target: ArrayLike, eps: float = 0.5) -> np.ndarray:
    """n* = 1 + (1 / eps - 1) / m: from there on the target's coefficient is below eps.

    m is the mean of exp(z_j - z_t) over the other items. With n items of the same kind the
    coefficient is 1 / (1 + (n - 1) m). For small eps that is exp(z_t - log mean_j exp z_j) / eps.
    For k targets it is their total mass,
    n* = k + (1 / eps - 1) sum_t exp(z_t) / mean_j exp(z_j): as many targets among ever more other
    items. Rows should be long, or hold few items that come near the target.

    Args:
      logits: (rows, n), -inf where masked.
      target: (rows,) int, an unmasked position; or (rows, n) bool, True at one unmasked position
        or more.
      eps: the coefficient in question, between 0 and 1.
    Returns:
      (rows,) n*, a number of items; inf where no other item has any weight.
    """
    z, wins = np.asarray(logits, float), np.asarray(target)
    real = np.isfinite(z)
    wins = real & (wins if wins.ndim > 1 else np.arange(z.shape[1]) == wins[:, None])
    best = np.max(z, axis=1, where=wins, initial=-np.inf, keepdims=True)
    with np.errstate(over="ignore"):  # targets far below another item: n* is their number
        weights = np.exp(z - best)
    n_targets = wins.sum(axis=1)
    n_others = np.maximum(real.sum(axis=1) - n_targets, 1)
    mass, rest = (weights.sum(axis=1, where=side) for side in (wins, ~wins))
    with np.errstate(divide="ignore"):  # targets far above the others
        return np.asarray(n_targets + (1 / eps - 1) * mass * n_others / rest)
