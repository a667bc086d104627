"""softmax(beta z) and its gradient in few passes over the logits.

With s = z - max z, w = exp(s), Z = sum w, mean = sum w s / Z and H = log Z - mean;
p = softmax(beta z), and g the gradient with respect to p:

    G = p (g - sum g p), the gradient with respect to beta z
    the gradient with respect to z = beta G + (sum G s) (d beta / dH) (w / Z) (mean - s)

The gradient keeps logits and result, which the caller has, and three numbers a row. The functions
equal `softmax.softmax_by_equation`. Comments give what each measure saves: the time without it, by
that with it (an EPYC, one core).
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from calibrate.core.masking import LOWEST, NO_WEIGHT
from calibrate.store.fit import Fit
from calibrate.store.inverse_temperature import beta_at, features_of, slope_at

FEW_ROWS = 1 << 14  # up to so many rows, NumPy computes the numbers of rows


class RowBlockSizes(NamedTuple):
    """How many items a CPU computes at a time, so that they stay in its cache; from how many on.

    In one block, a softmax of 8 million items takes 1.1 to 3.1 times as long, and with the gradient
    1.5 to 3.3 times (one core and two). Blocks gain nothing for a million items.
    """

    items: int = 1 << 18
    many: int = 1 << 21


ROW_BLOCKS = RowBlockSizes()


class SoftmaxOptions(NamedTuple):
    """The options that turn logits into probabilities."""

    fit: Fit
    dim: int
    entropy_gradient: bool
    table: Any  # of `head_table`, or the array of NumPy with its numbers


class RowNumbers(NamedTuple):
    """The numbers of each row that gradients need; axes are kept."""

    beta: Tensor
    mean: Tensor | None  # of z, under softmax(z)
    slope: Tensor | None  # d beta / dH, times exp(mean - log sum exp z)


def meet_constants() -> None:
    """Reads the constants of this module before they are read in an autograd function.

    torch.compile(dynamic=True) fails on floats of a module that it meets there first (PyTorch's
    issue 193194).
    """
    _ = -NO_WEIGHT, -LOWEST


def forward_pass(
    logits: Tensor, where: Tensor | None, options: SoftmaxOptions, for_gradient: bool
) -> tuple[Tensor, RowNumbers]:
    """softmax(beta z), of the logits' shape and dtype, and what its gradient needs."""
    blocks = _row_blocks(logits, options.dim)
    if len(blocks) == 1:
        return _forward(logits, where, options, for_gradient)
    probs, numbers = torch.empty_like(logits), []
    for block in blocks:
        part = _rows(logits, block)
        probs_of_part, rows = _forward(part, _rows(where, block), options, for_gradient)
        _rows(probs, block).copy_(probs_of_part)
        numbers.append([x if x is None else x.expand(*part.shape[:-1], 1) for x in rows])
    beta, mean, slope = (
        None if x[0] is None else torch.cat(x, -2) for x in zip(*numbers, strict=True)
    )
    assert beta is not None
    return probs, RowNumbers(beta, mean, slope)


def backward_pass(
    gradient: Tensor,
    logits: Tensor,
    where: Tensor | None,
    probs: Tensor,
    rows: RowNumbers,
    dim: int,
) -> Tensor:
    """The gradient with respect to the logits, in their dtype."""
    if torch.compiler.is_compiling():
        of_z = _backward_for_compilers(gradient, logits, where, probs, rows, dim)
        return restore_dtype_and_mask(of_z, logits, where)
    blocks = _row_blocks(logits, dim)
    if len(blocks) == 1:
        of_z = _backward_in_place(gradient, logits, where, probs, rows, dim)
        return restore_dtype_and_mask(of_z, logits, where)
    out = torch.empty_like(logits)
    for block in blocks:
        part, real = _rows(logits, block), _rows(where, block)
        numbers = RowNumbers(*(_rows(x, block) for x in rows))
        of_z = _backward_in_place(
            _rows(gradient, block), part, real, _rows(probs, block), numbers, dim
        )
        _rows(out, block).copy_(restore_dtype_and_mask(of_z, part, real))
    return out


def _row_blocks(logits: Tensor, dim: int) -> list[slice]:
    """Blocks of rows along the last axis but one; one for all if a CPU gains nothing."""
    whole = [slice(None)]
    if torch.compiler.is_compiling() or logits.numel() < ROW_BLOCKS.many or not logits.is_cpu:
        return whole
    n_rows = logits.shape[-2] if logits.ndim > 1 else 1
    if dim not in (-1, logits.ndim - 1) or n_rows == 1 or is_transforming() or is_batched(logits):
        return whole
    size = max(1, ROW_BLOCKS.items * n_rows // logits.numel())
    return [slice(first, first + size) for first in range(0, n_rows, size)]


def _rows(x: Any, block: slice) -> Any:
    """A block of rows of an array that broadcasts along the last axis but one; None stays None."""
    return x if x is None or x.ndim < 2 or x.shape[-2] == 1 else x[..., block, :]


def _forward(
    logits: Tensor, where: Tensor | None, options: SoftmaxOptions, for_gradient: bool
) -> tuple[Tensor, RowNumbers]:
    """`forward_pass` of one block."""
    fit, dim = options.fit, options.dim
    z = apply_mask(logits, where)
    if where is not None:
        z = _computed_once(z)  # otherwise each pass reads the mask again
    top = z.amax(dim, keepdim=True)
    shifted, log_n = _centre(z, top, logits, options)
    sums: tuple[Tensor, ...] = ()
    spare = None
    if fit.needs_entropy:
        spare = shifted.exp()
        sums = spare.sum(dim, keepdim=True), spare.mul_(shifted).sum(dim, keepdim=True)
    rows = _numbers_of_rows(top, sums, log_n, options, for_gradient)
    probs = _softmax_in_place(shifted.mul_(rows.beta), dim, spare)
    return restore_dtype_and_mask(probs, logits, where), rows


def _centre(
    z: Tensor, top: Tensor, logits: Tensor, options: SoftmaxOptions
) -> tuple[Tensor, Tensor | float | None]:
    """z - max z, at least NO_WEIGHT, as 0 * -inf is NaN; and log n if the fit goes by size.

    A CPU first looks whether any item is masked: a softmax by log n takes 1.3 times as long
    without that. If none is, log n may be one number for all rows.
    """
    fit, dim, compiling = options.fit, options.dim, torch.compiler.is_compiling()
    if not fit.needs_size:
        return _subtract(top, z, z if compiling else logits).clamp_min_(NO_WEIGHT), None
    if compiling or not z.is_cpu:
        # Compiled for a CPU, a count of z - max z in place of z takes half of all time.
        lowest = (top + LOWEST).clamp_min(torch.finfo(z.dtype).min)
        n = torch.ge(z, lowest).sum(dim, keepdim=True, dtype=z.dtype)
        shifted = _subtract(top, z, z if compiling else logits)
        return shifted.clamp_min_(NO_WEIGHT), n.clamp(min=1).log()
    shifted = _subtract(top, z, logits)
    if shifted.amin() >= LOWEST:
        log_of_all = math.log(shifted.shape[dim] if shifted.ndim else 1)
        one_number = fit.rule.by_entropy and not fit.has_heads
        return shifted, log_of_all if one_number else shifted.new_tensor(log_of_all)
    # As floats: a sum of bools takes a softmax of masked logits 1.15 times as long.
    real = torch.ge(shifted, LOWEST, out=torch.empty_like(shifted))
    log_n = real.sum(dim, keepdim=True).clamp(min=1).log()
    return shifted.clamp_min_(NO_WEIGHT), log_n


def _subtract(of_row: Tensor, z: Tensor, logits: Tensor) -> Tensor:
    """z - of_row, in the memory of z if that is a copy of the logits.

    In fresh memory a softmax in bfloat16 takes 1.2 times as long. Compilers get fresh memory, since
    PyTorch's fails on changes to a view of `_computed_once`.
    """
    return z - of_row if z is logits else z.sub_(of_row)


def is_for_numpy(of_rows: Tensor) -> bool:
    """True if NumPy computes numbers of rows, which nothing differentiates: of few on a CPU.

    Its calls take a third of the time of PyTorch's: with these a softmax of 64 rows of 64 takes 1.1
    to 1.4 times as long, and 1.5 times with the gradient.
    """
    return not torch.compiler.is_compiling() and of_rows.is_cpu and of_rows.numel() <= FEW_ROWS


def _numbers_of_rows(
    top: Tensor,
    sums: tuple[Tensor, ...],
    log_n: Any,
    options: SoftmaxOptions,
    for_gradient: bool,
) -> RowNumbers:
    """beta of each row, and what gradients need, from max z and `weighted_sums`."""
    if not is_for_numpy(top):
        beta, *others = _compute_numbers(top, sums, log_n, options, for_gradient, torch)
        # Otherwise compiled code evaluates the polynomial for every item of a row.
        return RowNumbers(_computed_once(beta), *others)
    highest = top.numpy() if for_gradient or not sums else None
    arrays = [x.numpy() for x in sums]
    log_n = log_n.numpy() if isinstance(log_n, Tensor) else log_n
    if options.table is not None:
        options = options._replace(table=options.table.numpy())
    numbers = _compute_numbers(highest, arrays, log_n, options, for_gradient, np)
    tensors: list[Any] = [x if x is None else torch.from_numpy(np.asarray(x)) for x in numbers]
    return RowNumbers(*tensors)


def _compute_numbers(
    top: Any, sums: Any, log_n: Any, options: SoftmaxOptions, for_gradient: bool, xp: Any
) -> tuple[Any, Any, Any]:
    """`_numbers_of_rows`, of arrays of NumPy or PyTorch."""
    fit, table, H = options.fit, options.table, None
    if sums:
        normaliser, total = sums
        mean = total / normaliser
        H = xp.log(normaliser) - mean
    x = features_of(fit, H, log_n, lambda: xp.zeros_like(top))
    beta = beta_at(x, table, fit, xp)
    if not (sums and for_gradient and options.entropy_gradient):
        return beta, None, None
    mean_of_z = top + mean
    # By the rounded mean, as the weights exp(z - mean_of_z) of the gradient are.
    slope = slope_at(x, beta, table, fit, xp) * xp.exp(mean_of_z - top) / normaliser
    return beta, mean_of_z, slope


def _computed_once(x: Tensor) -> Tensor:
    """x; for a compiler of CPUs a view that it does not compute again in each pass."""
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        return x.as_strided(x.shape, x.stride())
    return x


def _softmax_in_place(shifted: Tensor, dim: int, spare: Tensor | None) -> Tensor:
    """softmax of logits whose highest is 0; `spare` takes the result. Compilers fuse the rest."""
    if not torch.compiler.is_compiling():
        return torch.softmax(shifted, dim, out=spare)
    powers = shifted.exp_()
    return powers.mul_(powers.sum(dim, keepdim=True).reciprocal_())


def _backward_for_compilers(
    gradient: Tensor,
    logits: Tensor,
    where: Tensor | None,
    probs: Tensor,
    rows: RowNumbers,
    dim: int,
) -> Tensor:
    """The gradient with respect to z, for a compiler, which fuses the passes.

    All sums of a row are in one pass: 0.94 to 0.97 of the time of three passes, in bfloat16 on an
    AMD with AVX-512.
    """
    dtype = rows.beta.dtype
    gradient, probs = gradient.to(dtype), probs.to(dtype)
    product = gradient * probs
    level = product.sum(dim, keepdim=True)
    of_z = (product - level * probs) * rows.beta
    if rows.mean is None or rows.slope is None:
        return of_z
    centred = (apply_mask(logits, where) - rows.mean).clamp_min(NO_WEIGHT)
    of_beta = (product * centred).sum(dim, keepdim=True)
    of_beta = of_beta - level * (probs * centred).sum(dim, keepdim=True)
    return of_z - centred.exp() * centred * (of_beta * rows.slope)


def _backward_in_place(
    gradient: Tensor,
    logits: Tensor,
    where: Tensor | None,
    probs: Tensor,
    rows: RowNumbers,
    dim: int,
) -> Tensor:
    """The gradient with respect to z; overwrites its own arrays.

    By `_backward_for_compilers` a softmax and its gradient take 1.6 times as long, and 2.0 times in
    bfloat16. Without `grad_input` and `out`, they take 1.3 times as long in bfloat16.
    """
    dtype = rows.beta.dtype
    wide_probs, wide_gradient = probs.to(dtype), gradient.to(dtype)
    reuse = not (is_transforming() or is_batched(gradient))
    memory = {}
    if reuse and wide_gradient is not gradient and gradient.device.type == "cpu":
        memory = {"grad_input": wide_gradient}
    of_product = torch._softmax_backward_data(wide_gradient, wide_probs, dim, dtype, **memory)
    if rows.mean is None or rows.slope is None:
        return of_product.mul_(rows.beta)
    centred = _subtract(rows.mean, apply_mask(logits, where), logits).clamp_min_(NO_WEIGHT)
    spare = wide_probs if reuse and wide_probs is not probs else None
    products = torch.mul(of_product, centred, out=spare)
    of_beta = products.sum(dim, keepdim=True)
    weights = torch.exp(centred, out=products if reuse else None).mul_(centred)
    return of_product.mul_(rows.beta).addcmul_(weights, of_beta * -rows.slope)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, or float32 for narrower ones and for integers."""
    return dtype if dtype.is_floating_point and dtype.itemsize >= 4 else torch.float32


def apply_mask(logits: Tensor, where: Tensor | None) -> Tensor:
    """Logits in float32 or wider, -inf where they are masked."""
    dtype = wide(logits.dtype)
    z = logits if logits.dtype == dtype else logits.to(dtype)
    return z if where is None else torch.where(where, z, -torch.inf)


def weighted_sums(shifted: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """sum w and sum w s of s = z - max z and w = exp(s); axes kept."""
    weights = shifted.exp()
    return weights.sum(dim, keepdim=True), (weights * shifted).sum(dim, keepdim=True)


def log_n_unmasked(shifted: Tensor, dim: int = -1) -> Tensor:
    """log n of the n unmasked items, from z - max z; axes kept, 0 for a row without any."""
    n = (shifted >= LOWEST).sum(dim, keepdim=True)
    return n.clamp(min=1).to(shifted.dtype).log()


def restore_dtype_and_mask(x: Tensor, logits: Tensor, where: Tensor | None) -> Tensor:
    """x in the logits' dtype, and 0 where they are masked: rows without items are NaN before."""
    x = x if x.dtype == logits.dtype else x.to(logits.dtype)
    return x if where is None else torch.where(where, x, 0)


# PyTorch has no public names for these. Without them, the equation is computed by operations.
is_transforming = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
is_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda x: True)
