"""Masking: which numbers among logits mean that an item is masked, and which one has no weight."""

from typing import Any, NamedTuple

import numpy as np

MASKED = -9_000.0
# From the highest logit: exp of any beta times it is 0, and its square does not overflow.
NO_WEIGHT = -1e18


def is_masked(x: Any) -> Any:
    """x <= -9,000: the item is masked.

    Libraries mask by -inf, by the least number of a dtype, by -1e9, or by -10,000 (-9,984 in
    bfloat16), and add these to logits of a few hundred at most. An item so far below others has no
    weight in softmax, and yet would be one of n. No other number masks: at -8,000 an item is real.

    Args:
      x: logits, or a mask that is added to them: an array of NumPy or JAX, or a tensor.
    Returns:
      Bools of the same shape; False for NaN.
    """
    return x <= MASKED


def as_masks(logits: np.ndarray) -> np.ndarray:
    """The logits with -inf for those that mean masked."""
    masked = is_masked(logits)
    return np.where(masked, logits.dtype.type(-np.inf), logits) if masked.any() else logits


class FiniteMasks(NamedTuple):
    """How many finite logits mean masked, and which numbers they are."""

    n: int
    least: float
    greatest: float

    def warning(self, subject: str) -> str:
        """The warning about them; it begins with `subject`."""
        return (
            f"{subject} {self.n:,} logits of {self.least:g} to {self.greatest:g}, which count "
            f"as masked (all of {MASKED:,.0f} and less do); write -inf for masked items, or add a "
            "constant to the rows of real ones (softmax is unchanged)"
        )


def finite_masks(logits: np.ndarray, where: np.ndarray | bool = True) -> FiniteMasks:
    """Counts the finite logits that mean masked, of the items that `where` leaves."""
    low = logits[is_masked(logits) & np.isfinite(logits) & where]
    ends = (low.min(), low.max()) if low.size else (np.inf, -np.inf)
    return FiniteMasks(low.size, *map(float, ends))
