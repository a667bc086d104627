"""Commitment and susceptibility: two numbers of a row of logits that characterise a head."""

import numpy as np
from numpy.typing import ArrayLike

from calibrate.core.masking import NO_WEIGHT, is_masked
from calibrate.core.tensors import default_errors, on_cpu, refuse_rows


@default_errors
def commitment(logits: ArrayLike, where: ArrayLike | None = None) -> np.ndarray:
    """Commitment rho = log n - H(pi), pi = softmax(z) over the n unmasked items of each row.

    The Kullback-Leibler divergence of pi from the uniform distribution, in nats: 0 where all
    weights are equal, log n where one item has all the weight. A head whose rho grows like log n
    attends to a fixed number of items; one whose rho stays the same as n grows disperses.

        import numpy as np
        import calibrate

        logits = np.array([[0.0, 0.0, 0.0, 0.0], [50.0, 0.0, 0.0, 0.0]])
        print(calibrate.commitment(logits))  # 0 and log 4 = 1.386

    Args:
      logits: (..., n), finite or -inf (masked); so are items more than 9,000 below the highest.
        Computed in float64 if they are float64, otherwise in float32.
      where: bool, broadcastable to logits, True for real items; None means all.
    Returns:
      (...) array of that dtype, from 0 to log n.
    Raises:
      ValueError: a row without unmasked items, with NaN or with +inf; a mask of another shape.
    Reference: Fields 2026, "Why Softmax? A Hypothesis Testing Perspective on Attention Weights",
      https://peter-fields.github.io/why-softmax.
    """
    shifted, weights = _shifted_and_weights(logits, where)
    total = weights.sum(axis=-1)
    n = np.count_nonzero(~is_masked(shifted), axis=-1).astype(total.dtype)
    rho = np.vecdot(weights, shifted) / total - np.log(total / n)
    return np.asarray(np.clip(rho, 0, np.log(n)))  # rounding


@default_errors
def susceptibility(logits: ArrayLike, where: ArrayLike | None = None) -> np.ndarray:
    """Susceptibility d rho / d beta at beta = 1, which is the variance of z under softmax(z).

    The change of the commitment rho of softmax(beta z) per unit of the inverse temperature beta,
    in nats. It is near 0 where the weights are equal and where one item has all the weight: the
    row is stable. It is large where a few items compete.

        import numpy as np
        import calibrate

        logits = np.array([[1.0, 1.0, 1.0], [2.0, 0.0, 0.0], [50.0, 0.0, 0.0]])
        print(calibrate.susceptibility(logits))  # 0, 0.67 and 0

    Args:
      logits: (..., n), finite or -inf (masked); so are items more than 9,000 below the highest.
        Computed in float64 if they are float64, otherwise in float32.
      where: bool, broadcastable to logits, True for real items; None means all.
    Returns:
      (...) array of that dtype, 0 or more.
    Raises:
      ValueError: a row without unmasked items, with NaN or with +inf; a mask of another shape.
    Reference: Fields 2026, "Why Softmax? A Hypothesis Testing Perspective on Attention Weights",
      https://peter-fields.github.io/why-softmax.
    """
    shifted, weights = _shifted_and_weights(logits, where)
    total = weights.sum(axis=-1)
    mean = np.vecdot(weights, shifted) / total
    return np.asarray(np.vecdot(weights, (shifted - mean[..., None]) ** 2) / total)


def _shifted_and_weights(
    logits: ArrayLike, where: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray]:
    """(..., n) z - max z, finite where masked, and its exponential, which is 0 there."""
    z = np.asarray(on_cpu(logits, "logits"))
    if z.dtype != np.float64:
        z = z.astype(np.float32)
    if where is not None:
        real = np.broadcast_to(np.asarray(on_cpu(where, "where"), bool), z.shape)
        z = np.where(real, z, z.dtype.type(-np.inf))
    if z.ndim == 0:
        raise ValueError("logits are one number; give rows (..., n)")
    highest = z.max(axis=-1, initial=-np.inf, keepdims=True)  # NaN if any item is
    bad, empty = ~(highest < np.inf)[..., 0], (highest == -np.inf)[..., 0]
    refuse_rows(bad, "logits of row {} hold NaN or +inf; leave such rows out")
    refuse_rows(empty, "row {} has no unmasked item; leave such rows out")
    with np.errstate(over="ignore"):  # items that are masked
        shifted = z - highest
    np.maximum(shifted, NO_WEIGHT, out=shifted)  # 0 * -inf is NaN
    return shifted, np.exp(shifted)
