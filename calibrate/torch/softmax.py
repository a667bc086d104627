"""A softmax that applies a fit at inference, in place of torch.softmax."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calibrate.errors import CoefficientsError
from calibrate.files.coefficients import Coefficients, check_fit, check_given
from calibrate.maths.rule import LOG_SIZE, beta_of

_NO_WEIGHT = -1e18  # exp of any beta times it is 0, and its square does not overflow


def adaptive_softmax(
    logits: Tensor,
    coefficients: Coefficients,
    dim: int = -1,
    where: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    entropy_gradient: bool = True,
) -> Tensor:
    """softmax(beta(H) z), with H the entropy of softmax(z): torch.softmax, sharpened by a fit.

    A fit of kind "log-size" gives softmax(beta(n) z), with n the number of unmasked items: those
    of `where` whose logit is above -inf. Masks must be either. A large negative number as a mask
    leaves H as it is, and not n: such items have no weight, and are counted.

    Args:
      logits: any shape and floating dtype; entropy and beta are computed in float32 or wider. For a
        fit per head (..., heads, queries, items).
      coefficients: a fit, from `calibrate.load`.
      dim: the axis of the items; the last one for a fit per head.
      where: bool, broadcastable to logits, True for real items; None means all. Masked items get
        probability 0 and count neither in the entropy, n nor the normaliser.
      dtype: what logits are cast to first, as in torch.softmax.
      entropy_gradient: whether gradients flow through beta(H) too, as they do in the paper's code;
        beta(n) has none.
    Returns:
      Probabilities, of the logits' shape and dtype. A row whose unmasked items are all -inf is
      NaN, as in torch.softmax; a row that `where` masks throughout is 0.
    Raises:
      CoefficientsError: no fit was given, or it does not fit the heads of the logits.
      TypeError: nested tensors, logits that are not floating, or a mask that is not bool.
    Reference: Velickovic et al. 2024, section 3.
    """
    fit = check_fit(coefficients)
    if dtype is not None:
        logits = logits.to(dtype)
    if fit.has_heads and dim not in (-1, logits.ndim - 1):
        raise CoefficientsError(
            f"{fit.reference} has an entry per head, and dim is {dim!r}; "
            "give logits (..., heads, queries, items) and dim=-1"
        )
    z = _real_logits(logits, where)
    table = _head_table(fit, z, -3)
    if z.numel() == 0:
        return torch.softmax(z, dim).to(logits.dtype)
    compiling = torch.compiler.is_compiling()
    function = _AdaptiveSoftmax if compiling else _AdaptiveSoftmaxWithTangents
    apply: Callable[..., Tensor] = function.apply
    probs = apply(z, table, _Options(fit, dim, entropy_gradient))
    if where is not None:
        probs = torch.where(where, probs, 0)
    return probs.to(logits.dtype)


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
    """
    z = _real_logits(logits, where)
    if z.numel() == 0:
        return z.sum(dim)  # an axis without items has no uncertainty
    if where is None:
        return _entropy(_shifted(z, dim), dim)[0].squeeze(dim)
    empty = ~torch.broadcast_to(where, z.shape).any(dim, keepdim=True)
    H = _entropy(_shifted(torch.where(empty, 0.0, z), dim), dim)[0]
    return torch.where(empty, 0.0, H).squeeze(dim)


def inverse_temperature(
    H: Tensor | float | None, coefficients: Coefficients, *, n: Tensor | int | None = None
) -> Tensor:
    """beta of a fit: beta(H), or for a fit of kind "log-size" beta(n).

    beta(H) = clip(p(clip(H, lo, hi)), min_beta, max_beta), and 1 where the rule is off;
    beta(n) = clip(kappa log n + b, min_beta, max_beta); where kappa < 0, log n is first clipped to
    the sizes that it was fitted on, [lo, hi].

    Args:
      H: entropy in nats, any shape; computed in float32 or wider. For a fit per head, as `entropy`
        gives it for logits (..., heads, queries, items): (..., heads, queries). A log-size fit
        takes its shape alone, or None.
      coefficients: a fit, from `calibrate.load`.
      n: number of unmasked items, broadcastable to H; 0 counts as 1. A log-size fit needs it, and
        no other looks at it.
    Returns:
      beta, of H's shape (n's if H is None), dimensionless; 1 for heads that the fit does not name.
    Raises:
      CoefficientsError: no fit was given, it does not fit the heads of H, or H or n is missing.
    Reference: Velickovic et al. 2024, section 3.
    """
    fit = check_fit(coefficients)
    check_given(fit, H, n)
    if not fit.rule.by_size:
        x = torch.as_tensor(H)
        x = x.to(wide(x.dtype))
    else:
        like = None if H is None else torch.as_tensor(H)
        x = torch.as_tensor(n, device=None if like is None else like.device)
        x = x.to(wide(x.dtype)).clamp(min=1).log()
        x = x if like is None else x.expand(like.shape)
    return beta_of_rows(x, fit, -2)


def beta_of_rows(x: Tensor, fit: Coefficients, head_axis: int) -> Tensor:
    """beta of x, which is H or log n, with the heads of a fit per head along that axis."""
    return _beta(x, _head_table(fit, x, head_axis), fit)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, or float32 for narrower ones and for integers."""
    return dtype if dtype.is_floating_point and dtype.itemsize >= 4 else torch.float32


def refuse_nested(mask: str, *tensors: Tensor) -> None:
    """Raises TypeError that says which argument masks the padding instead."""
    if any(x.is_nested for x in tensors):
        raise TypeError(f"nested tensors are not supported; pad them, and give {mask} for the rest")


def _real_logits(logits: Tensor, where: Tensor | None) -> Tensor:
    """Logits in float32 or wider, -inf where they are masked."""
    refuse_nested("where=", logits)
    if not logits.is_floating_point():
        raise TypeError(f"logits are {logits.dtype}; give floating ones")
    z = logits.to(wide(logits.dtype))
    if where is None:
        return z
    if where.dtype != torch.bool:
        raise TypeError(f"where is {where.dtype}; give bool, True for real items")
    return torch.where(where, z, -torch.inf)


def _head_table(fit: Coefficients, x: Tensor, head_axis: int) -> Tensor | None:
    """The numbers of each head, (coefficients + 3, heads, 1, ...); None if all heads are alike."""
    if not fit.has_heads:
        fit.only  # noqa: B018 (refuses a fit per layer)
        return None
    if x.ndim < -head_axis:
        raise CoefficientsError(
            f"{fit.reference} has an entry per head, and a tensor of shape {tuple(x.shape)} has "
            "no axis of heads; give (..., heads, queries, items)"
        )
    table = torch.tensor(fit.by_head(x.shape[head_axis]), dtype=x.dtype, device=x.device)
    return table.reshape(*table.shape, *[1] * (-head_axis - 1))


def _beta(x: Tensor, table: Tensor | None, fit: Coefficients) -> Tensor:
    """beta of x, which is H or log n, as the fit's kind has it."""
    if table is None:
        entry = fit.only
        beta: Tensor = beta_of(x, x, entry.coefficients, entry.domain, fit.rule, torch)
        return beta
    *powers, lo, hi, calibrated = table
    beta = beta_of(x, x, powers, (lo, hi), fit.rule, torch)
    return torch.where(calibrated == 1, beta, 1.0)


def _shifted(z: Tensor, dim: int) -> Tensor:
    """z - max z; a finite number that has no weight where z is -inf: 0 times -inf is NaN."""
    return (z - z.amax(dim, keepdim=True)).clamp_min_(_NO_WEIGHT)


def _entropy(shifted: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """H, the weights' normaliser Z, and the mean of `shifted`; axes kept."""
    weights = shifted.exp()
    normaliser = weights.sum(dim, keepdim=True)
    # Fresh memory costs more than arithmetic: without gradients, the product takes the weights'.
    product = weights * shifted if torch.is_grad_enabled() else weights.mul_(shifted)
    mean = product.sum(dim, keepdim=True) / normaliser
    return normaliser.log() - mean, normaliser, mean


def _log_size(z: Tensor, dim: int) -> Tensor:
    """log n of n unmasked items, whose logit is above -inf; axes kept, 0 for a row without any."""
    return (z > -torch.inf).sum(dim, keepdim=True).clamp(min=1).to(z.dtype).log()


class _Options(NamedTuple):
    """What makes probabilities of logits, but for the numbers of each head."""

    fit: Coefficients
    dim: int
    entropy_gradient: bool


class _AdaptiveSoftmax(torch.autograd.Function):
    """softmax(beta z) along dim, of logits in float32 or wider. Keeps the logits for gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, table: Tensor | None, options: _Options) -> Tensor:
        fit, dim, _ = options
        shifted = _shifted(z, dim)
        x = _log_size(z, dim) if fit.rule.kind == LOG_SIZE else _entropy(shifted, dim)[0]
        beta = _beta(x, table, fit)
        if not torch.compiler.is_compiling():
            return torch.softmax(shifted.mul_(beta), dim)
        if z.device.type == "cpu":
            # Else its compiler works the polynomial out again for every item of a row.
            beta = beta.as_strided(beta.shape, beta.stride())
        powers = (shifted * beta).exp()  # one pass less than softmax: the highest is 0
        return powers * powers.sum(dim, keepdim=True).reciprocal()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        z, table, ctx.options = inputs
        ctx.save_for_backward(z, table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (z, table), (fit, dim, entropy_gradient) = ctx.saved_tensors, ctx.options
        shifted = _shifted(z, dim)
        if fit.rule.kind == LOG_SIZE:
            beta = _beta(_log_size(z, dim), table, fit)
            return _of_shifted(gradient, shifted, beta, dim)[0], None, None
        H, normaliser, mean = _entropy(shifted, dim)
        beta_with_slope: Any = torch.func.vjp(partial(_beta, table=table, fit=fit), H)
        beta, times_slope = beta_with_slope
        if not entropy_gradient:
            return _of_shifted(gradient, shifted, beta.detach(), dim)[0], None, None
        of_z, of_beta = _of_shifted(gradient, shifted, beta, dim)
        (of_entropy,) = times_slope(of_beta)
        # dH = -sum q (log q + H) dz, and log q + H = shifted - mean
        q = shifted.exp() / normaliser
        return of_z - of_entropy * q * (shifted - mean), None, None


class _AdaptiveSoftmaxWithTangents(_AdaptiveSoftmax):
    """With a forward-mode derivative too, which PyTorch's compiler refuses in such a function."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _AdaptiveSoftmax.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def jvp(ctx: Any, dz: Tensor, *_: None) -> Tensor:
        (z, table), (fit, dim, entropy_gradient) = ctx.saved_tensors, ctx.options
        shifted = _shifted(z, dim)
        if fit.rule.kind == LOG_SIZE:
            beta = _beta(_log_size(z, dim), table, fit)
            d_product = beta * dz
        else:
            H, normaliser, mean = _entropy(shifted, dim)
            beta_with_slope: Any = torch.func.vjp(partial(_beta, table=table, fit=fit), H)
            beta, times_slope = beta_with_slope
            d_product = beta * dz
            if entropy_gradient:
                weights = shifted.exp() / normaliser * (shifted - mean)
                (d_beta,) = times_slope(-(weights * dz).sum(dim, keepdim=True))
                d_product = d_product + shifted * d_beta
        probs = torch.softmax(beta * shifted, dim)
        return probs * (d_product - (probs * d_product).sum(dim, keepdim=True))


def _of_shifted(gradient: Tensor, shifted: Tensor, beta: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """What the gradient of softmax(beta z) is for z, and for beta."""
    probs = torch.softmax(beta * shifted, dim)
    of_product = probs * (gradient - (gradient * probs).sum(dim, keepdim=True))
    return beta * of_product, (of_product * shifted).sum(dim, keepdim=True)
