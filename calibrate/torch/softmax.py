"""Adaptive softmax, entropy and inverse temperature in PyTorch.

    p = softmax(beta z),   beta = rule(H),   H = -sum q log q with q = softmax(z)

The paper's equation (Velickovic et al. 2024, section 3) is `softmax_by_equation`, in operations
that PyTorch differentiates and transforms; the rules are in core/rule.py. Other calls take the
passes of softmax_passes.py, which give the same in less time.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from calibrate.core.masking import NO_WEIGHT
from calibrate.store.fit import Fit
from calibrate.store.inverse_temperature import (
    Features,
    beta_at,
    check_fit,
    check_given,
    features_of,
    head_numbers,
    require_last_axis,
)
from calibrate.torch.softmax_passes import (
    RowNumbers,
    SoftmaxOptions,
    apply_mask,
    backward_pass,
    forward_pass,
    is_for_numpy,
    is_transforming,
    log_n_unmasked,
    meet_constants,
    restore_dtype_and_mask,
    weighted_sums,
    wide,
)


def softmax_by_equation(logits: Tensor, where: Tensor | None, options: SoftmaxOptions) -> Tensor:
    """softmax(beta(H) z) along dim, of the logits' shape and dtype; 0 where `where` is False."""
    fit, dim, entropy_gradient, table = options
    z = apply_mask(logits, where)
    highest = z.amax(dim, keepdim=True)
    shifted, H, log_n = z - highest, None, None
    if fit.needs_size:
        log_n = log_n_unmasked(shifted.detach(), dim)
    shifted = shifted.clamp_min(NO_WEIGHT)  # finite, since 0 * -inf is NaN
    if fit.needs_entropy:
        normaliser, total = weighted_sums(shifted, dim)
        H = normaliser.log() - total / normaliser
        H = H if entropy_gradient else H.detach()
    features = features_of(fit, H, log_n, partial(torch.zeros_like, highest))
    beta = beta_at(features, table, fit, torch)
    return restore_dtype_and_mask(torch.softmax(beta * shifted, dim), logits, where)


def adaptive_softmax(
    logits: Tensor,
    coefficients: Fit,
    dim: int = -1,
    where: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    entropy_gradient: bool = True,
) -> Tensor:
    """softmax(beta(H) z), with H the entropy of softmax(z): torch.softmax with a fit.

    Fits by size give softmax(beta(n) z) or softmax(beta(H, n) z), with n the number of unmasked
    items: those of `where` that lie within 9,000 of the row's highest logit, as in
    calibrate.adaptive_softmax. Padding of -inf, -1e9 or a dtype's lowest number is not counted.

    Args:
      logits: any shape and floating dtype; entropy and beta are computed in float32 or wider. For a
        fit per head (..., heads, queries, items).
      coefficients: a fit, from `calibrate.load`.
      dim: the axis of the items; the last one for a fit per head.
      where: bool, broadcastable to logits, True for real items; None means all. Masked items get
        probability 0 and count neither in the entropy, n nor the normaliser.
      dtype: logits are cast to it first, as in torch.softmax.
      entropy_gradient: whether gradients flow through H too, as they do in the paper's code; n has
        none.
    Returns:
      Probabilities, of the logits' shape and dtype. A row whose unmasked items are all -inf is
      NaN, as in torch.softmax; a row that `where` masks throughout is 0.
    Raises:
      CoefficientsError: no fit was given, or it does not fit the heads of the logits.
      TypeError: nested tensors, logits that are not floating, or a mask that is not bool.
    Reference: Velickovic et al. 2024, section 3.

    >>> import calibrate, torch
    >>> from calibrate.torch import adaptive_softmax
    >>> logits, fit = torch.linspace(0, 3, 50), calibrate.load("paper")
    >>> print(f"{torch.softmax(logits, -1)[-1]:.3f} {adaptive_softmax(logits, fit)[-1]:.3f}")
    0.062 0.133
    """
    fit = check_fit(coefficients)
    if dtype is not None:
        logits = logits.to(dtype)
    require_last_axis(fit, "dim", dim, logits.ndim)
    _check(logits, where)
    if where is not None:
        logits = logits.expand(torch.broadcast_shapes(logits.shape, where.shape))
    table = head_table(fit, logits, -3)
    if logits.numel() == 0:
        return torch.softmax(logits, dim)
    return _softmax(logits, where, SoftmaxOptions(fit, dim, entropy_gradient, table))


def _softmax(logits: Tensor, where: Tensor | None, options: SoftmaxOptions) -> Tensor:
    """`softmax_by_equation`, in few passes where nothing looks at single operations."""
    compiling = torch.compiler.is_compiling()
    if is_transforming() or (not compiling and _sees_operations(logits)):
        return softmax_by_equation(logits, where, options)
    if torch.is_grad_enabled() and logits.requires_grad:
        meet_constants()
        apply: Callable[..., Tensor] = _AdaptiveSoftmax.apply
        return apply(logits, where, options)
    return forward_pass(logits, where, options, False)[0]


class _AdaptiveSoftmax(torch.autograd.Function):
    """softmax(beta z). Keeps logits, mask, result and three numbers a row for the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, where: Tensor | None, options: SoftmaxOptions) -> Tensor:
        probs, rows = forward_pass(logits, where, options, True)
        ctx.options = options
        ctx.save_for_backward(logits, where, probs, *rows)
        return probs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, where, probs, *numbers = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # second derivatives
            again = softmax_by_equation(logits, where, ctx.options)
            return *torch.autograd.grad(again, logits, gradient, create_graph=True), None, None
        rows = RowNumbers(*numbers)
        return backward_pass(gradient, logits, where, probs, rows, ctx.options.dim), None, None


def is_differentiated(*tensors: Tensor) -> bool:
    """True if derivatives of any order or direction may be asked for, or operations are seen."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return True
    if torch.compiler.is_compiling():
        return False
    return is_transforming() or any(map(_sees_operations, tensors))


def _sees_operations(x: Tensor) -> bool:
    """True if a subclass, a dispatch mode, a tracer or a tangent sees the operations on x."""
    return (
        type(x) not in (Tensor, torch.nn.Parameter)
        or _n_modes() > 0
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or forward_ad.unpack_dual(x).tangent is not None
    )


def entropy(logits: Tensor, dim: int = -1, where: Tensor | None = None) -> Tensor:
    """Shannon entropy of softmax(logits), H = log Z - S / Z.

    With w = exp(z - max z): Z = sum w and S = sum w (z - max z).

    Args:
      logits: any shape and floating dtype; -inf counts as masked.
      dim: the axis of the items.
      where: bool, broadcastable to logits, True for real items; None means all.
    Returns:
      H in nats without that axis, float32 or wider; 0 where every item is masked by `where`, NaN
      where all unmasked items are -inf (there is no distribution).
    Raises:
      TypeError: nested tensors, logits that are not floating, or a mask that is not bool.
    Reference: Velickovic et al. 2024, section 3.

    >>> import torch
    >>> from calibrate.torch import entropy
    >>> print(f"{entropy(torch.zeros(8)):.4f}")
    2.0794
    """
    _check(logits, where)
    z = apply_mask(logits, where)
    if z.numel() == 0:
        return z.sum(dim)  # an axis without items has no uncertainty
    empty = None
    if where is not None:
        empty = ~torch.broadcast_to(where, z.shape).any(dim, keepdim=True)
        z = torch.where(empty, 0.0, z)
    shifted = (z - z.amax(dim, keepdim=True)).clamp_min_(NO_WEIGHT)
    normaliser, total = weighted_sums(shifted, dim)
    H = normaliser.log() - total / normaliser
    return (H if empty is None else torch.where(empty, 0.0, H)).squeeze(dim)


def inverse_temperature(
    H: Tensor | float | None, coefficients: Fit, *, n: Tensor | int | None = None
) -> Tensor:
    """beta of a fit: a constant, beta(H), beta(n) or beta(H, n), as calibrate.inverse_temperature.

    Args:
      H: entropy in nats, any shape; computed in float32 or wider. For a fit per head, as `entropy`
        gives it for logits (..., heads, queries, items): (..., heads, queries). If beta does not
        depend on H, only its shape is used, and None is allowed.
      coefficients: a fit, from `calibrate.load`.
      n: number of unmasked items, broadcastable to H; 0 counts as 1. For fits by set size.
    Returns:
      beta, of H's shape (n's if H is None, () if both are), dimensionless; 1 for heads without an
      entry.
    Raises:
      CoefficientsError: no fit was given, its heads are not those of H, or H or n is missing.
    Reference: Velickovic et al. 2024, section 3.

    >>> import calibrate
    >>> from calibrate.torch import inverse_temperature
    >>> print(f"{inverse_temperature(2.0, calibrate.load('paper')):.3f}")
    2.099
    """
    fit = check_fit(coefficients)
    check_given(fit, H, n)
    given = n if H is None else H
    if not isinstance(given, Tensor):
        given = torch.tensor(0.0 if given is None else given, dtype=wide(torch.get_default_dtype()))
    like, dtype = given, wide(given.dtype)
    entropy = like.to(dtype) if fit.rule.by_entropy else None
    log_n = None
    if fit.rule.by_size:
        items = torch.as_tensor(n, device=like.device)
        log_n = items.to(wide(items.dtype if entropy is None else entropy.dtype)).clamp(min=1).log()
        log_n = log_n.expand(like.shape)
    zeros = partial(torch.zeros, like.shape, dtype=dtype, device=like.device)
    return beta_of_rows(features_of(fit, entropy, log_n, zeros), fit, -2)


def beta_of_rows(x: Features, fit: Fit, head_axis: int) -> Tensor:
    """beta of each row, with the heads of a fit per head along an axis of x."""
    table = head_table(fit, x.either, head_axis)
    if is_differentiated(x.either) or not is_for_numpy(x.either):
        beta: Tensor = beta_at(x, table, fit, torch)
        return beta
    arrays = Features(*(given if given is None else given.detach().numpy() for given in x))
    numbers = None if table is None else table.numpy()
    return torch.from_numpy(np.asarray(beta_at(arrays, numbers, fit, np)))


def constant_betas(fit: Fit, q: Tensor) -> Tensor:
    """(1, N, 1, 1) the beta of each head of queries (B, N, T, W), by a fit that is constant."""

    def make() -> Tensor:
        one_row = q.new_zeros((1, q.shape[1], 1), dtype=wide(q.dtype))
        return beta_of_rows(Features(one_row, one_row), fit, -2)[..., None]

    return _cached_tensor(fit, ("betas", q.shape[1], q.dtype, q.device), make)


def head_table(fit: Fit, x: Tensor, head_axis: int) -> Tensor | None:
    """The numbers of each head along an axis of x, (numbers, heads, 1, ...).

    None if all heads have the same numbers. Under a compiler these too are a tensor, an input of
    the program, so that one graph serves many fits.
    """
    numbers = fit.numbers
    if numbers is None or not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        if not fit.has_heads:
            fit.refuse_layers()
            return None
        n_heads = x.shape[head_axis] if x.ndim >= -head_axis else None
        key = ("table", n_heads, head_axis, x.dtype, x.device)
        return _cached_tensor(fit, key, lambda: _table_of_heads(fit, x, head_axis))
    table = torch.as_tensor(numbers, device="cpu").to(x.device, wide(x.dtype), non_blocking=True)
    if table.ndim == 1:
        return table
    if x.ndim < -head_axis or x.shape[head_axis] < table.shape[1]:
        head_numbers(fit, x.shape, head_axis)  # raises: x lacks heads that the fit names
    n_others = x.shape[head_axis] - table.shape[1]
    if n_others != 0:
        table = torch.nn.functional.pad(table, (0, n_others))
    return table.reshape(*table.shape, *[1] * (-head_axis - 1))


def _table_of_heads(fit: Fit, x: Tensor, head_axis: int) -> Tensor:
    numbers = head_numbers(fit, x.shape, head_axis)
    table = torch.tensor(numbers, dtype=wide(x.dtype), device=x.device)
    return table.reshape(*table.shape, *[1] * (-head_axis - 1))


def _cached_tensor(fit: Fit, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """A tensor of a fit's numbers, which the fit caches.

    For eight heads, making one takes a third of a call on (64, 64). Nothing is cached under
    torch.compile, functorch transforms or dispatch modes.
    """
    if torch.compiler.is_compiling() or is_transforming() or _n_modes() > 0:
        return make()
    if key not in fit.cache:
        with torch.inference_mode(False):
            fit.cache[key] = make()
    tensor: Tensor = fit.cache[key]
    return tensor


def check_not_nested(mask: str, *tensors: Tensor) -> None:
    """Raises TypeError for other arrays and nested tensors: `mask` masks padding instead."""
    for x in tensors:
        if not isinstance(x, Tensor) or x.is_nested:
            raise TypeError(f"give torch.Tensor; pad nested tensors, and give {mask} for the rest")


def _check(logits: Tensor, where: Tensor | None) -> None:
    check_not_nested("where=", logits)
    if not logits.is_floating_point():
        raise TypeError(f"logits are {logits.dtype}; give floating ones")
    if where is not None and where.dtype != torch.bool:
        raise TypeError(f"where is {where.dtype}; give bool, True for real items")


# PyTorch has no public name for this. Without it nothing is cached, and calls take the equation's
# operations, which are slower.
_n_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
