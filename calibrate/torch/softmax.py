"""A softmax that applies a fit at inference, in place of torch.softmax."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calibrate.errors import CoefficientsError
from calibrate.files.coefficients import Coefficients, check_fit
from calibrate.torch.beta import Inputs, beta_by_table, head_table, wide

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

    A fit of kind "log-size" gives softmax(beta(n) z), one of kind "entropy-and-size"
    softmax(beta(H, n) z), with n the number of unmasked items: those of `where` whose logit is
    above -inf. Masks must be either. A large negative number as a mask leaves H as it is, and not
    n: such items have no weight, and are counted.

    Args:
      logits: any shape and floating dtype; entropy and beta are computed in float32 or wider. For a
        fit per head (..., heads, queries, items).
      coefficients: a fit, from `calibrate.load`.
      dim: the axis of the items; the last one for a fit per head.
      where: bool, broadcastable to logits, True for real items; None means all. Masked items get
        probability 0 and count neither in the entropy, n nor the normaliser.
      dtype: what logits are cast to first, as in torch.softmax.
      entropy_gradient: whether gradients flow through H too, as they do in the paper's code; n has
        none.
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
    table = head_table(fit, z, -3)
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


def _shifted(z: Tensor, dim: int) -> Tensor:
    """z - max z; a finite number that has no weight where z is -inf: 0 times -inf is NaN."""
    return (z - z.amax(dim, keepdim=True)).clamp_min_(_NO_WEIGHT)


def _shifted_and_log_size(
    z: Tensor, fit: Coefficients, dim: int
) -> tuple[Tensor, Tensor | float | None]:
    """Logits as of `_shifted`; and if the fit goes by size log n, of n items above -inf.

    log n is 0 for a row without any; axes are kept. It may be one number where none is masked.
    """
    if not fit.rule.by_size:
        return _shifted(z, dim), None
    shifted = z - z.amax(dim, keepdim=True)
    all_have_weight = _all_have_weight(shifted)
    if all_have_weight:  # to see that took no longer than to clamp them
        log_n = math.log(z.shape[dim] if z.ndim else 1)
        one_number = fit.rule.by_entropy and not fit.has_heads
        return shifted, log_n if one_number else z.new_tensor(log_n)
    # On a CPU, bools are slow to make and to add up.
    out = None if all_have_weight is None else torch.empty_like(z)
    real = torch.gt(z, -torch.inf, out=out)
    n = real.sum(dim, keepdim=True, dtype=z.dtype)
    return shifted.clamp_min_(_NO_WEIGHT), n.clamp(min=1).log()


def _all_have_weight(shifted: Tensor) -> bool | None:
    """Whether there is nothing to clamp, and no item masked; None where looking is no gain."""
    if shifted.device.type != "cpu" or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    try:
        return bool(shifted.amin() > _NO_WEIGHT)
    except RuntimeError:  # under torch.func.vmap, which cannot tell
        return None


def _entropy(shifted: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """H, the weights' normaliser Z, and the mean of `shifted`; axes kept."""
    weights = shifted.exp()
    normaliser = weights.sum(dim, keepdim=True)
    # Fresh memory costs more than arithmetic: without gradients, the product takes the weights'.
    product = weights * shifted if torch.is_grad_enabled() else weights.mul_(shifted)
    mean = product.sum(dim, keepdim=True) / normaliser
    return normaliser.log() - mean, normaliser, mean


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
        shifted, log_n = _shifted_and_log_size(z, fit, dim)
        H = _entropy(shifted, dim)[0] if fit.rule.by_entropy else None
        beta = beta_by_table(Inputs(H, log_n), table, fit)
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
        (z, table), dim = ctx.saved_tensors, ctx.options.dim
        shifted, beta, slope = _beta_with_slope(z, table, ctx.options)
        of_z, of_beta = _of_shifted(gradient, shifted, beta, dim)
        if slope is None:
            return of_z, None, None
        (of_entropy,) = slope.of_entropy(of_beta)
        return of_z + of_entropy * slope.of_logits, None, None


class _AdaptiveSoftmaxWithTangents(_AdaptiveSoftmax):
    """With a forward-mode derivative too, which PyTorch's compiler refuses in such a function."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _AdaptiveSoftmax.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def jvp(ctx: Any, dz: Tensor, *_: None) -> Tensor:
        (z, table), dim = ctx.saved_tensors, ctx.options.dim
        shifted, beta, slope = _beta_with_slope(z, table, ctx.options)
        d_product = beta * dz
        if slope is not None:
            (d_beta,) = slope.of_entropy((slope.of_logits * dz).sum(dim, keepdim=True))
            d_product = d_product + shifted * d_beta
        probs = torch.softmax(beta * shifted, dim)
        return probs * (d_product - (probs * d_product).sum(dim, keepdim=True))


class _Slope(NamedTuple):
    """The derivative of beta by the logits, in two factors."""

    of_entropy: Any  # multiplies by d beta / dH
    of_logits: Tensor  # dH / dz


def _beta_with_slope(
    z: Tensor, table: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor, _Slope | None]:
    """z - max z, beta, and the slope of beta if gradients flow through it."""
    fit, dim, entropy_gradient = options
    shifted, log_n = _shifted_and_log_size(z, fit, dim)

    def beta_at(H: Tensor | None) -> Tensor:
        return beta_by_table(Inputs(H, log_n), table, fit)

    if not fit.rule.by_entropy:
        return shifted, beta_at(None), None
    H, normaliser, mean = _entropy(shifted, dim)
    if not entropy_gradient:
        return shifted, beta_at(H).detach(), None
    beta_and_product: Any = torch.func.vjp(beta_at, H)
    beta, of_entropy = beta_and_product
    # dH = -sum q (log q + H) dz, and log q + H = shifted - mean
    return shifted, beta, _Slope(of_entropy, shifted.exp() / normaliser * (mean - shifted))


def _of_shifted(gradient: Tensor, shifted: Tensor, beta: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """What the gradient of softmax(beta z) is for z, and for beta."""
    probs = torch.softmax(beta * shifted, dim)
    of_product = probs * (gradient - (gradient * probs).sum(dim, keepdim=True))
    return beta * of_product, (of_product * shifted).sum(dim, keepdim=True)
