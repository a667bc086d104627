"""Commitment and susceptibility of rows of logits, in NumPy; they characterise a head."""

import numpy as np
from numpy.typing import ArrayLike

from calibrate.core.masking import NO_WEIGHT, default_errstate, is_masked, on_cpu, refuse_rows


@default_errstate
def commitment(logits: ArrayLike, where: ArrayLike | None = None) -> np.ndarray:
    """Commitment rho = log n - H(pi), where pi = softmax(z) over the n unmasked items of each row.

    rho is the Kullback-Leibler divergence of pi from the uniform distribution: 0 if all weights are
    equal, log n if one item has all the weight. A head whose rho grows like log n attends to a
    fixed number of items; a head whose rho stays constant as n grows disperses.

        >>> import numpy as np
        >>> import calibrate
        >>> logits = np.array([[0.0, 0.0, 0.0, 0.0], [50.0, 0.0, 0.0, 0.0]])
        >>> calibrate.commitment(logits).round(3)  # 0 and log 4
        array([0.   , 1.386])

    Args:
      logits: (..., n), finite, or -inf for masked items; items more than 9,000 below the highest
        count as masked. The computation is in float64 if they are float64, otherwise in float32.
      where: bool, broadcastable to logits, True for real items; None means all.
    Returns:
      (...) array of that dtype, from 0 to log n, in nats.
    Raises:
      ValueError: a row without unmasked items, with NaN or with +inf; a mask of another shape.
    Reference: Fields 2026, "Why Softmax? A Hypothesis Testing Perspective on Attention Weights",
      https://peter-fields.github.io/why-softmax.
    """
    shifted, weights = _shifted_and_weights(logits, where)
    total = weights.sum(axis=-1)
    n = np.count_nonzero(~is_masked(shifted), axis=-1).astype(total.dtype)
    # log n - H, with H = log(total) - mean of shifted
    rho = np.vecdot(weights, shifted) / total - np.log(total / n)
    return np.asarray(np.clip(rho, 0, np.log(n)))  # rounding


@default_errstate
def susceptibility(logits: ArrayLike, where: ArrayLike | None = None) -> np.ndarray:
    """Susceptibility d rho / d beta at beta = 1, which is the variance of z under softmax(z).

    It is the change of the commitment rho of softmax(beta z) per unit of the inverse temperature
    beta, in nats: near 0 if all weights are equal or one item has all the weight, so that the row
    is stable; large if a few items compete.

        >>> import numpy as np
        >>> import calibrate
        >>> logits = np.array([[1.0, 1.0, 1.0], [2.0, 0.0, 0.0], [50.0, 0.0, 0.0]])
        >>> calibrate.susceptibility(logits).round(2)
        array([0.  , 0.67, 0.  ])

    Args, Raises, Reference: as of `commitment`.
    Returns:
      (...) array of the dtype of the computation, 0 or more.
    """
    shifted, weights = _shifted_and_weights(logits, where)
    total = weights.sum(axis=-1)
    mean = np.vecdot(weights, shifted) / total
    return np.asarray(np.vecdot(weights, (shifted - mean[..., None]) ** 2) / total)


def _shifted_and_weights(
    logits: ArrayLike, where: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray]:
    """(..., n) z - max z, with a finite number for masked items, and its exponential."""
    z = np.asarray(on_cpu(logits, "logits"))
    if z.dtype != np.float64:
        z = z.astype(np.float32)
    if where is not None:
        real = np.broadcast_to(np.asarray(on_cpu(where, "where"), bool), z.shape)
        z = np.where(real, z, z.dtype.type(-np.inf))
    if z.ndim == 0:
        raise ValueError("logits are one number; give rows (..., n)")
    highest = z.max(axis=-1, initial=-np.inf, keepdims=True)  # NaN if any item is
    is_bad, is_empty = ~(highest < np.inf)[..., 0], (highest == -np.inf)[..., 0]
    refuse_rows(is_bad, "logits of row {} hold NaN or +inf; leave such rows out")
    refuse_rows(is_empty, "row {} has no unmasked item; leave such rows out")
    with np.errstate(over="ignore"):  # of masked items
        shifted = z - highest
    np.maximum(shifted, NO_WEIGHT, out=shifted)  # since 0 * -inf is NaN
    return shifted, np.exp(shifted)
