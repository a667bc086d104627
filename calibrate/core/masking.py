"""Arrays of users: the numbers that mean masked, NumPy's masked arrays and PyTorch's tensors."""

from typing import Any

import numpy as np

from calibrate.errors import warn_user

LOWEST = -9_000.0  # the least z - max z of an item that is not masked
# Replaces -inf in z - max z: exp(beta times it) is 0 for every beta, and its square is finite.
NO_WEIGHT = -1e18

# Decorates public functions: NumPy's own handling of floating-point errors, whatever numpy.seterr
# says. So small weights underflow to 0.
default_errstate = np.errstate(divide="warn", over="warn", under="ignore", invalid="warn")


class MaskedArrayError(ValueError):
    """An array of numpy.ma with masked items, which NumPy's functions would read as real ones."""


def is_masked(shifted: Any) -> Any:
    """True for masked items, by z - max z: those more than 9,000 below the highest logit.

    LOWEST is the only threshold. Kernels that need speed compare with it themselves (real items:
    `>= LOWEST`), and there a NaN counts as masked. Libraries mask by -inf, by the least number of a
    dtype, by -1e9, or by -10,000 (-9,984 in bfloat16), and add these to logits of a few hundred at
    most. Such an item has no weight in softmax, and must not count as one of n either.

    Args:
      shifted: (..., n) z - max z in float32 or wider, of NumPy, JAX or PyTorch; the maximum is over
        the items that `where` or a mask leaves. So adding a constant to a row changes nothing, and
        a row of padding alone has no masked item.
    Returns:
      (..., n) bool; False for NaN.
    """
    return shifted < LOWEST


def mask_low_logits(logits: np.ndarray, where: np.ndarray | bool = True) -> tuple[np.ndarray, int]:
    """Logits (..., n) with -inf for masked items, and the number of these that were finite.

    Rows with +inf stay as they are: they are bad.

    Args:
      logits: float32 or wider.
      where: bool, broadcastable to logits, True for real items; others stay as they are, do not
        count, and may hold anything.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        # Few rows span 9,000 and may have masked items; only these are copied.
        is_wide = ~(logits.min(axis=-1) - logits.max(axis=-1) >= LOWEST)
        z = logits[is_wide]
        real = np.broadcast_to(where, logits.shape)[is_wide] & (z > -np.inf)
        highest = np.max(z, axis=-1, where=real, initial=-np.inf, keepdims=True)
        masked = real & is_masked(z - highest) & (highest < np.inf)
    n_masked = int(np.count_nonzero(masked))
    if n_masked:
        logits = logits.copy()
        logits[is_wide] = np.where(masked, logits.dtype.type(-np.inf), z)
    return logits, n_masked


def warn_of_masks(subject: str, n: int) -> None:
    """Warns of n finite logits that mean masked; the warning begins with `subject`."""
    if n:
        warn_user(
            f"{subject} {n:,} finite logits that count as masked, as they lie more than "
            f"{-LOWEST:,.0f} below the highest logit of their row; the fit, once loaded, treats "
            "them so too. Write -inf for masked items to say so yourself"
        )


def is_tensor(value: Any) -> bool:
    """True for a tensor of PyTorch, by its methods: PyTorch need not be loaded."""
    return hasattr(value, "detach") and hasattr(value, "cpu")


def on_cpu(value: Any, name: str) -> Any:
    """A tensor of PyTorch, or a list with tensors, as NumPy can read it; other values unchanged.

    Tensors come from any device, lose their gradients, and become float32 if their floats are
    narrower.

    Args:
      name: of the value, for messages.
    Raises:
      MaskedArrayError: a masked array of NumPy, or a list with one.
    """
    if isinstance(value, list | tuple) and any(map(_needs_conversion, value)):
        return [on_cpu(item, name) for item in value]
    if np.ma.is_masked(value):
        raise MaskedArrayError(
            f"{name} is a masked array of NumPy, whose mask would be lost; give plain arrays: for "
            "logits x.filled(-numpy.inf), or x.data and the mask ~numpy.ma.getmaskarray(x)"
        )
    if not is_tensor(value):
        return value
    value = value.detach().cpu()
    is_narrow = value.is_floating_point() and value.element_size() < 4
    return value.float() if is_narrow else value


def _needs_conversion(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ma.MaskedArray) or is_tensor(value)


def refuse_rows(bad: np.ndarray, message: str) -> None:
    """Raises ValueError if any row is bad; {} in the message is the index of the first."""
    if bad.any():
        raise ValueError(message.format(tuple(np.argwhere(bad)[0].tolist())))
