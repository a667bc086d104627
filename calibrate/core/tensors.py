"""Arrays as NumPy can read them: tensors of PyTorch, which is not loaded, and no masked ones."""

from typing import Any

import numpy as np

# Decorates public functions: weights underflow to 0 by design, whatever numpy.seterr was set to.
default_errors = np.errstate(divide="warn", over="warn", under="ignore", invalid="warn")


class MaskedArrayError(ValueError):
    """An array of numpy.ma with masked items, which NumPy's functions would read as real ones."""


def is_tensor(value: Any) -> bool:
    """True if it is a tensor of PyTorch, by its methods."""
    return hasattr(value, "detach") and hasattr(value, "cpu")


def on_cpu(value: Any, name: str) -> Any:
    """A tensor as NumPy can read it, or a list with such tensors; anything else as it is.

    From any device, without gradients, in float32 if its floats have fewer bits.

    Args:
      name: of the value, for messages.
    Raises:
      MaskedArrayError: a masked array of NumPy, or a list with one.
    """
    if isinstance(value, list | tuple) and any(map(_is_read_apart, value)):
        return [on_cpu(item, name) for item in value]
    if np.ma.is_masked(value):
        raise MaskedArrayError(
            f"{name} is a masked array of NumPy, whose mask would be lost; give plain arrays: for "
            "logits x.filled(-numpy.inf), or x.data and the mask ~numpy.ma.getmaskarray(x)"
        )
    if not is_tensor(value):
        return value
    value = value.detach().cpu()
    narrow = value.is_floating_point() and value.element_size() < 4
    return value.float() if narrow else value


def refuse_rows(bad: np.ndarray, message: str) -> None:
    """Raises ValueError, if any row is bad, with the place of the first in the message."""
    if bad.any():
        raise ValueError(message.format(tuple(np.argwhere(bad)[0].tolist())))


def _is_read_apart(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ma.MaskedArray) or is_tensor(value)
