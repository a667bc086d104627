"""Which numbers mean "masked"."""

from typing import Any

MASKED = -9_000.0


def is_masked(x: Any) -> Any:
    """x <= -9,000: where logits, or what is added to them, say that an item is masked.

    Libraries write masks as -inf, as the least number of some dtype, as -1e9, or as -10,000 (which
    bfloat16 rounds to -9,984), or add these to logits of a few hundred at most. An item that is so
    far below others has no weight in softmax, yet would count in n. No other number means masked:
    an item at -8,000 is one of the n.

    Args:
      x: an array of NumPy, or a tensor.
    Returns:
      Bools of the same shape; False for NaN.
    """
    return x <= MASKED
