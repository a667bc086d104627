"""Masking: which numbers among logits mean that an item is masked, and which one has no weight."""

import warnings
from typing import Any

import numpy as np

MASKED = -9_000.0
# From the highest logit: exp of any beta times it is 0, and its square does not overflow.
NO_WEIGHT = -1e18


def is_masked(x: Any) -> Any:
    """x <= -9,000: the item is masked.

    Libraries mask by -inf, by the least number of a dtype, by -1e9, or by -10,000 (-9,984 in
    bfloat16), and add these to logits of a few hundred at most. An item so far below others has no
    weight in softmax, and yet would be one of n. No other number masks: at -8,000 an item is real.

    x are logits, or a mask that is added to them, of NumPy, JAX or PyTorch; False for NaN.
    """
    return x <= MASKED


def as_masks(logits: np.ndarray) -> np.ndarray:
    """The logits with -inf for those that mean masked."""
    masked = is_masked(logits)
    return np.where(masked, logits.dtype.type(-np.inf), logits) if masked.any() else logits


def finite_masks(logits: np.ndarray, where: np.ndarray | bool = True) -> int:
    """How many finite logits mean masked, of the items that `where` leaves."""
    return int(np.count_nonzero(is_masked(logits) & np.isfinite(logits) & where))


def warn_of_masks(subject: str, n: int) -> None:
    """Warns of n finite logits that mean masked; the warning begins with `subject`."""
    if n:
        warnings.warn(
            f"{subject} {n:,} finite logits that count as masked (all of {MASKED:,.0f} and less "
            "do); write -inf for masked items, or add a constant to the rows of real ones "
            "(softmax is unchanged)",
            stacklevel=3,
        )
