"""Masking: which items of a row are masked, and which number has no weight."""

import warnings
from typing import Any

import numpy as np

LOWEST = -9_000.0  # of a real item, from the highest logit of its row
# From the highest logit: exp of any beta times it is 0, and its square does not overflow.
NO_WEIGHT = -1e18


def is_masked(shifted: Any) -> Any:
    """bool: the items that are masked, by z - max z: those more than 9,000 below the highest logit.

    The one definition of fits, evaluation and every softmax and attention here. The maximum is over
    the items that `where` or a mask leaves, in float32 or wider. It does not mind a shift of the
    row. Libraries mask by -inf, by the least number of a dtype, by -1e9, or by -10,000 (-9,984 in
    bfloat16), and add these to logits of a few hundred at most. An item so far below another has no
    weight in softmax, and yet would be one of n. Where no item is higher, as in a row of padding
    alone, none is masked.

    Arrays of NumPy, JAX or PyTorch; False for NaN.
    """
    return shifted < LOWEST


def as_masks(logits: np.ndarray, where: np.ndarray | bool = True) -> tuple[np.ndarray, int]:
    """Logits (..., n) with -inf for items that are masked; and how many of these were finite.

    Rows with +inf stay as they are: they are bad.

    Args:
      logits: float32 or wider.
      where: bool, broadcastable to logits, True for real items; others stay as they are, do not
        count, and may hold anything.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        # In most arrays no row is so wide, and to see that takes no copy.
        some = ~(logits.min(axis=-1) - logits.max(axis=-1) >= LOWEST)
        z, real = (
            logits[some],
            np.broadcast_to(where, logits.shape)[some] & (logits[some] > -np.inf),
        )
        highest = np.max(z, axis=-1, where=real, initial=-np.inf, keepdims=True)
        masked = real & is_masked(z - highest) & (highest < np.inf)
    n_masked = int(np.count_nonzero(masked))
    if n_masked:
        logits = logits.copy()
        logits[some] = np.where(masked, logits.dtype.type(-np.inf), z)
    return logits, n_masked


def warn_of_masks(subject: str, n: int) -> None:
    """Warns of n finite logits that mean masked; the warning begins with `subject`."""
    if n:
        warnings.warn(
            f"{subject} {n:,} finite logits that count as masked, as they lie more than "
            f"{-LOWEST:,.0f} below the highest logit of their row; the fit, once loaded, treats "
            "them so too. Write -inf for masked items to say so yourself",
            stacklevel=3,
        )
