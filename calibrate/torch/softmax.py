"""A softmax that applies a fit at inference, in place of torch.softmax; its entropy and beta."""

from functools import partial

import torch
from torch import Tensor

from calibrate.core.masking import NO_WEIGHT
from calibrate.evaluate_rule import check_fit, check_given, features_of, require_last_axis
from calibrate.store.fit import Fit
from calibrate.torch.beta import beta_of_rows, head_table, wide
from calibrate.torch.softmax_autograd import SoftmaxOptions, real_logits, softmax_of, sums


def adaptive_softmax(
    logits: Tensor,
    coefficients: Fit,
    dim: int = -1,
    where: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    entropy_gradient: bool = True,
) -> Tensor:
    """softmax(beta(H) z), with H the entropy of softmax(z): torch.softmax, sharpened by a fit.

    Fits by size give softmax(beta(n) z) or softmax(beta(H, n) z), with n the number of unmasked
    items: those of `where` that lie within 9,000 of the row's highest logit, as in
    calibrate.adaptive_softmax. Padding of -inf, -1e9 or the least number of a dtype is not counted.

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
    require_last_axis(fit, "dim", dim, logits.ndim)
    _check(logits, where)
    if where is not None:
        logits = logits.expand(torch.broadcast_shapes(logits.shape, where.shape))
    table = head_table(fit, logits, -3)
    if logits.numel() == 0:
        return torch.softmax(logits, dim)
    return softmax_of(logits, where, SoftmaxOptions(fit, dim, entropy_gradient, table))


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
    _check(logits, where)
    z = real_logits(logits, where)
    if z.numel() == 0:
        return z.sum(dim)  # an axis without items has no uncertainty
    empty = None
    if where is not None:
        empty = ~torch.broadcast_to(where, z.shape).any(dim, keepdim=True)
        z = torch.where(empty, 0.0, z)
    shifted = (z - z.amax(dim, keepdim=True)).clamp_min_(NO_WEIGHT)
    normaliser, total = sums(shifted, dim, not torch.is_grad_enabled())
    H = normaliser.log() - total / normaliser
    return (H if empty is None else torch.where(empty, 0.0, H)).squeeze(dim)


def inverse_temperature(
    H: Tensor | float | None, coefficients: Fit, *, n: Tensor | int | None = None
) -> Tensor:
    """beta of a fit: a constant, beta(H), beta(n) or beta(H, n), as calibrate's function gives it.

    Args:
      H: entropy in nats, any shape; computed in float32 or wider. For a fit per head, as `entropy`
        gives it for logits (..., heads, queries, items): (..., heads, queries). A fit whose beta
        does not depend on H takes its shape alone, or None.
      coefficients: a fit, from `calibrate.load`.
      n: number of unmasked items, broadcastable to H; 0 counts as 1. For fits by set size.
    Returns:
      beta, of H's shape (n's if H is None, () if both are), dimensionless; 1 for heads without an
      entry.
    Raises:
      CoefficientsError: no fit was given, its heads are not those of H, or H or n is missing.
    Reference: Velickovic et al. 2024, section 3.
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


def check_not_nested(mask: str, *tensors: Tensor) -> None:
    """Raises TypeError for other arrays and nested tensors: `mask` masks padding instead."""
    if not all(isinstance(x, Tensor) and not x.is_nested for x in tensors):
        raise TypeError(f"give torch.Tensor; pad nested tensors, and give {mask} for the rest")


def _check(logits: Tensor, where: Tensor | None) -> None:
    check_not_nested("where=", logits)
    if not logits.is_floating_point():
        raise TypeError(f"logits are {logits.dtype}; give floating ones")
    if where is not None and where.dtype != torch.bool:
        raise TypeError(f"where is {where.dtype}; give bool, True for real items")
