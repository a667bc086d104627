"""softmax(beta z) and its gradient, in few passes over the logits.

With s = z - max z, w = exp(s), Z = sum w, mean = sum w s / Z and H = log Z - mean;
p = softmax(beta z), and g the gradient for p:

    G = p (g - sum g p), which is the gradient for beta z
    the gradient for z = beta G + (sum G s) (d beta / dH) (w / Z) (mean - s)

Nothing is kept for it but logits and result, which callers have, and three numbers a row. What
looks at single operations (second derivatives, torch.func, tracers) gets PyTorch's own instead.

`_forward` and `_backward` are these equations; what is faster on some device follows them, with its
gain, as far as it was measured alone.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from calibrate.core.masking import LOWEST, NO_WEIGHT
from calibrate.evaluate_rule import beta_at, features_of, slope_at
from calibrate.store.fit import Fit
from calibrate.torch.beta import is_transforming, n_modes, wide

FEW_ROWS = 1 << 14  # rows whose numbers NumPy computes


class RowBlockSizes(NamedTuple):
    """How many items a CPU computes at a time, so that they stay in its cache; from how many on.

    In one block a softmax of 8 million items takes 1.1 to 3.1 times as long, and with the gradient
    1.5 to 3.3 times (an EPYC, one core and two). Of a million, blocks gain nothing.
    """

    items: int = 1 << 18
    many: int = 1 << 21


SIZES = RowBlockSizes()


class SoftmaxOptions(NamedTuple):
    """The options that turn logits into probabilities."""

    fit: Fit
    dim: int
    entropy_gradient: bool
    table: Tensor | None  # of `head_table`


def softmax_of(logits: Tensor, where: Tensor | None, options: SoftmaxOptions) -> Tensor:
    """softmax(beta z) along dim, of the logits' shape and dtype; 0 where `where` is False."""
    if is_transforming() or (not torch.compiler.is_compiling() and _needs_plain_ops(logits)):
        return _by_operations(logits, where, options)
    if torch.is_grad_enabled() and logits.requires_grad:
        # Met here first, they are found in there too, with dynamic=True (PyTorch's issue 193194);
        # but only by the functions of this module.
        _ = -NO_WEIGHT, -LOWEST
        apply: Callable[..., Tensor] = _AdaptiveSoftmax.apply
        return apply(logits, where, options)
    return _forward_in_blocks(logits, where, options, False)[0]


class _RowNumbers(NamedTuple):
    """The numbers of each row that gradients need; axes are kept."""

    beta: Tensor
    mean: Tensor | None  # of z, under softmax(z)
    slope: Tensor | None  # d beta / dH, times exp(mean - log sum exp z)


class _AdaptiveSoftmax(torch.autograd.Function):
    """softmax(beta z) along dim. Keeps logits, mask, result and a few numbers a row."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, where: Tensor | None, options: SoftmaxOptions) -> Tensor:
        probs, rows = _forward_in_blocks(logits, where, options, True)
        ctx.options = options
        ctx.save_for_backward(logits, where, probs, *rows)
        return probs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (logits, where, probs, *numbers), dim = ctx.saved_tensors, ctx.options.dim
        compiling = torch.compiler.is_compiling()
        if torch.is_grad_enabled() and not compiling:  # for second derivatives
            again = _by_operations(logits, where, ctx.options)
            return *torch.autograd.grad(again, logits, gradient, create_graph=True), None, None
        rows = _RowNumbers(*numbers)
        if compiling:
            of_z = _backward(gradient, logits, where, probs, rows, dim)
            return _restore_dtype_and_mask(of_z, logits, where), None, None
        return _backward_in_blocks(gradient, logits, where, probs, rows, dim), None, None


def _forward_in_blocks(
    logits: Tensor, where: Tensor | None, options: SoftmaxOptions, for_gradient: bool
) -> tuple[Tensor, _RowNumbers]:
    """`_forward`, of many items in blocks of rows."""
    blocks = _blocks(logits, options.dim)
    if len(blocks) == 1:
        return _forward(logits, where, options, for_gradient)
    probs, found = torch.empty_like(logits), []
    for block in blocks:
        part = _rows(logits, block)
        of_part, rows = _forward(part, _rows(where, block), options, for_gradient)
        _rows(probs, block).copy_(of_part)
        found.append([x if x is None else x.expand(*part.shape[:-1], 1) for x in rows])
    beta, mean, slope = (
        None if x[0] is None else torch.cat(x, -2) for x in zip(*found, strict=True)
    )
    assert beta is not None
    return probs, _RowNumbers(beta, mean, slope)


def _backward_in_blocks(
    gradient: Tensor,
    logits: Tensor,
    where: Tensor | None,
    probs: Tensor,
    rows: _RowNumbers,
    dim: int,
) -> Tensor:
    """The gradient for the logits, in their dtype, of many items in blocks of rows."""
    blocks = _blocks(logits, dim)
    if len(blocks) == 1:
        of_z = _backward_in_place(gradient, logits, where, probs, rows, dim)
        return _restore_dtype_and_mask(of_z, logits, where)
    out = torch.empty_like(logits)
    for block in blocks:
        part, seen = _rows(logits, block), _rows(where, block)
        numbers = _RowNumbers(*(_rows(x, block) for x in rows))
        given = _rows(gradient, block), part, seen, _rows(probs, block), numbers, dim
        _rows(out, block).copy_(_restore_dtype_and_mask(_backward_in_place(*given), part, seen))
    return out


def _blocks(logits: Tensor, dim: int) -> list[slice]:
    """Rows of the last axis but one, in blocks that are computed one after the other."""
    n_rows = logits.shape[-2] if logits.ndim > 1 else 1
    whole = [slice(None)]
    if torch.compiler.is_compiling() or dim not in (-1, logits.ndim - 1) or n_rows == 1:
        return whole
    many = logits.device.type == "cpu" and logits.numel() >= SIZES.many
    if not many or is_transforming() or _is_batched(logits):
        return whole
    size = max(1, SIZES.items * n_rows // logits.numel())
    return [slice(first, first + size) for first in range(0, n_rows, size)]


def _rows(x: Any, block: slice) -> Any:
    """A block of rows of an array that broadcasts along the last axis but one; None as it is."""
    return x if x is None or x.ndim < 2 or x.shape[-2] == 1 else x[..., block, :]


def _forward(
    logits: Tensor, where: Tensor | None, options: SoftmaxOptions, for_gradient: bool
) -> tuple[Tensor, _RowNumbers]:
    """softmax(beta z), of the logits' shape and dtype, and what its gradient needs."""
    fit, dim = options.fit, options.dim
    z = real_logits(logits, where)
    compiling = torch.compiler.is_compiling()
    if where is not None:
        z = _computed_once(z)  # else each pass reads the mask again
    top = z.amax(dim, keepdim=True)
    shifted, log_n = _centre(z, top, z if compiling else logits, fit, dim, not compiling)
    of_entropy = sums(shifted, dim, True) if fit.needs_entropy else ()
    rows = _numbers_of_rows(top, of_entropy, log_n, options, for_gradient)
    # Else the polynomial is worked out again for every item of a row.
    rows = rows._replace(beta=_computed_once(rows.beta))
    probs = _softmax_in_place(shifted.mul_(rows.beta), dim)
    return _restore_dtype_and_mask(probs, logits, where), rows


def _backward(
    gradient: Tensor,
    logits: Tensor,
    where: Tensor | None,
    probs: Tensor,
    rows: _RowNumbers,
    dim: int,
) -> Tensor:
    """The gradient for z, given that for probs: a compiler joins its passes.

    All sums of a row are of one pass: 0.94 to 0.97 of the time of three passes, in bfloat16 on an
    AMD with AVX-512.
    """
    dtype = rows.beta.dtype
    gradient, probs = gradient.to(dtype), probs.to(dtype)
    product = gradient * probs
    level = product.sum(dim, keepdim=True)
    of_z = (product - level * probs) * rows.beta
    if rows.mean is None or rows.slope is None:
        return of_z
    centred = (real_logits(logits, where) - rows.mean).clamp_min(NO_WEIGHT)
    of_beta = (product * centred).sum(dim, keepdim=True)
    of_beta = of_beta - level * (probs * centred).sum(dim, keepdim=True)
    return of_z - centred.exp() * centred * (of_beta * rows.slope)


def _numbers_of_rows(
    top: Any, of_entropy: Any, log_n: Any, options: SoftmaxOptions, for_gradient: bool
) -> _RowNumbers:
    """beta of each row, and what gradients need, from max z and `sums`.

    Of few rows on a CPU NumPy computes them, whose calls take a third of the time of PyTorch's: by
    those a softmax of 64 rows of 64 takes 1.3 to 1.4 times as long.
    """
    fit, table = options.fit, options.table
    as_tensor = partial(torch.as_tensor, device=top.device)  # else PyTorch's default device
    xp: Any = torch
    on_cpu = top.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_cpu and top.numel() <= FEW_ROWS:
        xp = np
        top, table, log_n = _as_array(top), _as_array(table), _as_array(log_n)
        of_entropy = [x.numpy() for x in of_entropy]
    H = None
    if of_entropy:
        normaliser, total = of_entropy
        mean = total / normaliser
        H = xp.log(normaliser) - mean
    x = features_of(fit, H, log_n, partial(xp.zeros_like, top))
    beta = beta_at(x, table, fit, xp)
    if not (of_entropy and for_gradient and options.entropy_gradient):
        return _RowNumbers(as_tensor(beta), None, None)
    of_z = top + mean
    # As it was rounded, so that weights of z - of_z have this sum.
    slope = slope_at(x, beta, table, fit, xp) * xp.exp(of_z - top) / normaliser
    return _RowNumbers(as_tensor(beta), as_tensor(of_z), as_tensor(slope))


def _as_array(x: Any) -> Any:
    """A tensor as NumPy's array, of the same memory; all else as it is."""
    return x.numpy() if isinstance(x, Tensor) else x


def _by_operations(logits: Tensor, where: Tensor | None, options: SoftmaxOptions) -> Tensor:
    """`softmax_of` in operations that PyTorch can differentiate and transform."""
    fit, dim, entropy_gradient, table = options
    z = real_logits(logits, where)
    top = z.amax(dim, keepdim=True)
    shifted, log_n = _centre(z, top, z, fit, dim, False)
    H = None
    if fit.needs_entropy:
        normaliser, total = sums(shifted, dim, False)
        H = normaliser.log() - total / normaliser
        H = H if entropy_gradient else H.detach()
    x = features_of(fit, H, log_n, partial(torch.zeros_like, top))
    beta = beta_at(x, table, fit, torch)
    return _restore_dtype_and_mask(torch.softmax(beta * shifted, dim), logits, where)


def _restore_dtype_and_mask(x: Tensor, logits: Tensor, where: Tensor | None) -> Tensor:
    """x in the logits' dtype, 0 where they are masked: rows without items are NaN so far."""
    x = x if x.dtype == logits.dtype else x.to(logits.dtype)
    return x if where is None else torch.where(where, x, 0)


def _centre(
    z: Tensor, top: Tensor, logits: Tensor, fit: Fit, dim: int, look: bool
) -> tuple[Tensor, Tensor | float | None]:
    """z - max z, NO_WEIGHT where that is -inf; and if the fit goes by size log n, of n unmasked.

    log n is 0 for a row without any; axes are kept. With `look`, a CPU sees whether none is masked:
    it may be one number then.
    """
    if not fit.needs_size:
        return _subtract_max(z, top, logits).clamp_min_(NO_WEIGHT), None  # 0 times -inf is NaN
    if not look or z.device.type != "cpu":
        lowest = (top + LOWEST).clamp_min(torch.finfo(z.dtype).min)
        n = torch.ge(z, lowest).sum(dim, keepdim=True, dtype=z.dtype)
        # After n of z: compiled for CPUs, a count of z - max z takes half of all time.
        return _subtract_max(z, top, logits).clamp_min_(NO_WEIGHT), n.clamp(min=1).log()
    shifted = _subtract_max(z, top, logits)
    if shifted.amin() >= LOWEST:  # to see that took no longer than to clamp them
        of_all = math.log(shifted.shape[dim] if shifted.ndim else 1)
        one_number = fit.rule.by_entropy and not fit.has_heads
        return shifted, of_all if one_number else shifted.new_tensor(of_all)
    log_n = log_n_of(shifted, dim)
    return shifted.clamp_min_(NO_WEIGHT), log_n


def log_n_of(shifted: Tensor, dim: int = -1) -> Tensor:
    """log n of the n items that are not masked, given z - max z; axes kept, 0 for a row of none."""
    out = torch.empty_like(shifted)  # bools are slow to make and to add up: a tenth of a softmax
    return torch.ge(shifted, LOWEST, out=out).sum(dim, keepdim=True).clamp(min=1).log()


def _subtract_max(z: Tensor, of_row: Tensor, logits: Tensor) -> Tensor:
    """z - of_row, in the memory of z where it is a copy of the logits.

    Fresh memory takes time: with a mask up to a fifth of the softmax (512 rows of 1,024).
    """
    return z - of_row if z is logits else z.sub_(of_row)


def _computed_once(x: Tensor) -> Tensor:
    """x; for a compiler of CPUs a view that it does not compute anew in each pass that reads it."""
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        return x.as_strided(x.shape, x.stride())
    return x


def _softmax_in_place(shifted: Tensor, dim: int) -> Tensor:
    """softmax of logits whose highest is 0; in compiled code in operations that it can join.

    On CPUs, and without a compiler, these take as long as PyTorch's own, and with a mask 1.3 to 1.6
    times as long.
    """
    if not torch.compiler.is_compiling():
        return torch.softmax(shifted, dim)
    powers = shifted.exp_()
    return powers.mul_(powers.sum(dim, keepdim=True).reciprocal_())


def _backward_in_place(
    gradient: Tensor,
    logits: Tensor,
    where: Tensor | None,
    probs: Tensor,
    rows: _RowNumbers,
    dim: int,
) -> Tensor:
    """As `_backward`, without a compiler: it overwrites its own arrays.

    With `_backward` a softmax and its gradient take 1.6 to 3.0 times as long on a CPU. In fresh
    memory, without `grad_input` and `out`, they take up to 2.0 times as long in float32 and 1.5 in
    bfloat16 (an EPYC).
    """
    dtype = rows.beta.dtype
    wide_probs, wide_gradient = probs.to(dtype), gradient.to(dtype)
    reuse = not (is_transforming() or _is_batched(gradient))
    memory = {}
    if reuse and wide_gradient is not gradient and gradient.device.type == "cpu":
        memory = {"grad_input": wide_gradient}
    of_product = torch._softmax_backward_data(wide_gradient, wide_probs, dim, dtype, **memory)
    if rows.mean is None or rows.slope is None:
        return of_product.mul_(rows.beta)
    centred = _subtract_max(real_logits(logits, where), rows.mean, logits).clamp_min_(NO_WEIGHT)
    spare = wide_probs if reuse and wide_probs is not probs else None
    products = torch.mul(of_product, centred, out=spare)
    of_beta = products.sum(dim, keepdim=True)
    weights = torch.exp(centred, out=products if reuse else None).mul_(centred)
    return of_product.mul_(rows.beta).addcmul_(weights, of_beta * -rows.slope)


def real_logits(logits: Tensor, where: Tensor | None) -> Tensor:
    """Logits in float32 or wider, -inf where they are masked."""
    dtype = wide(logits.dtype)
    z = logits if logits.dtype == dtype else logits.to(dtype)
    return z if where is None else torch.where(where, z, -torch.inf)


def sums(shifted: Tensor, dim: int, in_place: bool) -> tuple[Tensor, Tensor]:
    """sum w and sum w s; axes kept. If not in place, a softmax takes up to 1.25 times as long."""
    weights = shifted.exp()
    normaliser = weights.sum(dim, keepdim=True)
    product = weights.mul_(shifted) if in_place else weights * shifted
    return normaliser, product.sum(dim, keepdim=True)


def is_differentiated(*tensors: Tensor) -> bool:
    """True if derivatives of any order or direction may be asked for, or operations are seen."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return True
    if torch.compiler.is_compiling():
        return False
    return is_transforming() or any(map(_needs_plain_ops, tensors))


def _needs_plain_ops(x: Tensor) -> bool:
    """True if a tangent, a tracer, a mode or a subclass sees the operations."""
    return (
        type(x) not in (Tensor, torch.nn.Parameter)
        or n_modes() > 0
        or _is_tracing()
        or forward_ad.unpack_dual(x).tangent is not None
    )


# PyTorch has no public names for these. Without them, all goes by its own operations: slower.
_is_tracing = getattr(torch._C, "_is_tracing", lambda: True)
_is_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda x: True)
