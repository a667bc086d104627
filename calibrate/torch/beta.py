"""beta of rows in PyTorch: the numbers of a fit as tensors, in the dtype of the logits.

A fit per head has its heads along an axis of the logits.
"""

import numpy as np
import torch
from torch import Tensor

from calibrate.evaluate_rule import Features, beta_at, head_numbers
from calibrate.store import coefficients
from calibrate.store.coefficients import Coefficients


def beta_of_rows(x: Features, fit: Coefficients, head_axis: int) -> Tensor:
    """beta of x, with the heads of a fit per head along that axis."""
    beta: Tensor = beta_at(x, head_table(fit, x.either, head_axis), fit, torch)
    return beta


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, or float32 for narrower ones and for integers."""
    return dtype if dtype.is_floating_point and dtype.itemsize >= 4 else torch.float32


def head_table(fit: Coefficients, x: Tensor, head_axis: int) -> Tensor | None:
    """The numbers of each head along an axis of x, (numbers, heads, 1, ...); None if alike.

    A compiler takes all numbers for an input, and has one graph for many fits.
    """
    given = fit.numbers
    if given is None or not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        numbers = head_numbers(fit, x.shape, head_axis)
        if numbers is None:
            return None
        table = torch.tensor(numbers, dtype=wide(x.dtype), device=x.device)
    else:
        table = torch.as_tensor(given).to(x.device, wide(x.dtype), non_blocking=True)
        if table.ndim == 1:
            return table
        if x.ndim < -head_axis or x.shape[head_axis] < table.shape[1]:
            head_numbers(fit, x.shape, head_axis)  # refuses heads that there are not
        if (others := x.shape[head_axis] - table.shape[1]) != 0:
            table = torch.nn.functional.pad(table, (0, others))
    return table.reshape(*table.shape, *[1] * (-head_axis - 1))


def _hold(numbers: np.ndarray) -> Tensor:
    """A tensor of these numbers, for all modes: each call would take 30 us to make one."""
    with torch.inference_mode(False):
        return torch.from_numpy(numbers)


coefficients.hold = _hold
