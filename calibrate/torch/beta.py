"""beta of rows in PyTorch: the numbers of a fit as tensors, in the dtype of the logits.

A fit per head has its heads along an axis of the logits.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from calibrate.evaluate_rule import Features, beta_at, head_numbers
from calibrate.store.fit import Fit


def beta_of_rows(x: Features, fit: Fit, head_axis: int) -> Tensor:
    """beta of x, with the heads of a fit per head along that axis."""
    beta: Tensor = beta_at(x, head_table(fit, x.either, head_axis), fit, torch)
    return beta


def constant_betas(fit: Fit, q: Tensor) -> Tensor:
    """(1, N, 1, 1) the beta of each head of queries (B, N, T, W), by a fit that is constant."""

    def make() -> Tensor:
        no_items = q.new_zeros((1, q.shape[1], 1), dtype=wide(q.dtype))
        return beta_of_rows(Features(no_items, no_items), fit, -2)[..., None]

    return _made_once(fit, ("betas", q.shape[1], q.dtype, q.device), make)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, or float32 for narrower ones and for integers."""
    return dtype if dtype.is_floating_point and dtype.itemsize >= 4 else torch.float32


def head_table(fit: Fit, x: Tensor, head_axis: int) -> Tensor | None:
    """The numbers of each head along an axis of x, (numbers, heads, 1, ...); None if alike.

    Under a compiler the array of all numbers is an input of the program: one graph for many fits.
    """
    numbers = fit.numbers
    if numbers is None or not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        if not fit.has_heads:
            fit.refuse_layers()
            return None
        n_heads = x.shape[head_axis] if x.ndim >= -head_axis else None
        key = ("table", n_heads, head_axis, x.dtype, x.device)
        return _made_once(fit, key, lambda: _eager_table(fit, x, head_axis))
    table = torch.as_tensor(numbers, device="cpu").to(x.device, wide(x.dtype), non_blocking=True)
    if table.ndim == 1:
        return table
    if x.ndim < -head_axis or x.shape[head_axis] < table.shape[1]:
        head_numbers(fit, x.shape, head_axis)  # refuses heads that there are not
    n_others = x.shape[head_axis] - table.shape[1]
    if n_others != 0:
        table = torch.nn.functional.pad(table, (0, n_others))
    return _along(table, head_axis)


def _eager_table(fit: Fit, x: Tensor, head_axis: int) -> Tensor:
    numbers = head_numbers(fit, x.shape, head_axis)
    return _along(torch.tensor(numbers, dtype=wide(x.dtype), device=x.device), head_axis)


def _along(table: Tensor, head_axis: int) -> Tensor:
    """A table (numbers, heads) whose heads lie along an axis of what it is used with."""
    return table.reshape(*table.shape, *[1] * (-head_axis - 1))


class _Kept(dict[Hashable, Tensor]):
    """Tensors of a fit; a copy of the fit, or the fit in another process, makes its own."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Kept, ()


def _made_once(fit: Fit, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """A tensor of a fit's numbers, which is kept with the fit: to make one takes 30 us and more.

    It is not kept under torch.compile, functorch transforms or dispatch modes.
    """
    if torch.compiler.is_compiling() or is_transforming() or n_modes() > 0:
        return make()
    kept: dict[Hashable, Tensor] = fit.__dict__.setdefault("_tensors", _Kept())
    if key not in kept:
        with torch.inference_mode(False):
            kept[key] = make()
    return kept[key]


# PyTorch has no public names for these. Without them, nothing is kept.
is_transforming = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
n_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
