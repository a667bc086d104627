"""Tensors of PyTorch, where NumPy's arrays are wanted; PyTorch is not loaded for it."""

from typing import Any


def is_tensor(value: Any) -> bool:
    """True if it is a tensor of PyTorch, by its methods."""
    return hasattr(value, "detach") and hasattr(value, "cpu")


def on_cpu(value: Any) -> Any:
    """A tensor as NumPy can read it, or a list with such tensors; anything else as it is.

    From any device, without gradients, in float32 if its floats have fewer bits.
    """
    if isinstance(value, list | tuple) and any(map(is_tensor, value)):
        return [on_cpu(item) for item in value]
    if not is_tensor(value):
        return value
    value = value.detach().cpu()
    narrow = value.is_floating_point() and value.element_size() < 4
    return value.float() if narrow else value
