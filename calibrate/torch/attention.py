"""Attention that applies a fit, in place of torch.nn.functional's.

Logits are linear in the query, so that E[z] is scale * q . attention(q, k, v := k) and
H = log Z - E[z]: a stock fused kernel that returns log Z gives the entropies, and a second call
with queries times beta gives the result. What such a kernel does not do (bias, a soft-cap, sinks,
dropout), and few queries, for which it reads the keys too often, is computed in blocks of queries.

Letters for shapes: B batch, N query heads, K key heads, T queries, S keys, W width.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from calibrate.files.coefficients import Coefficients, check_fit
from calibrate.maths.rule import LOG_SIZE
from calibrate.torch.fused import Kernel, kernel
from calibrate.torch.softmax import adaptive_softmax, beta_of_rows, wide

BLOCK_LOGITS = 1 << 20
MIN_ROWS = 16
FEW_QUERIES = 32
TYPICAL_KEYS = 64


class _How(NamedTuple):
    """What determines the weights, but for logits and masks."""

    fit: Coefficients
    scale: float
    is_causal: bool
    soft_cap: float | None
    dropout_p: float
    entropy_gradient: bool


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    coefficients: Coefficients,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
    entropy_gradient: bool = True,
) -> Tensor:
    """softmax(beta(H) z) V with z = scale Q K^T + bias and H the entropy of softmax(z).

    With a fit of kind "log-size", beta(n) and n the number of keys that the query sees: those that
    mask and causality leave, and whose bias is above -inf.

    `functools.partial(scaled_dot_product_attention, coefficients=fit)` takes the place of
    torch.nn.functional.scaled_dot_product_attention: the same arguments and layout, and three more.

    Args:
      query: (..., N, T, W); or (T, W).
      key, value: (..., K, S, W), value of any width; K is N, or with `enable_gqa` divides it.
      attn_mask: broadcastable to (..., N, T, S); bool, True for real keys, or a bias that is added
        to the logits.
      dropout_p: of the weights, after the entropy; applied whatever the mode, as in the original.
      is_causal: query t sees keys 0 to t; with a mask, both apply.
      scale: of the logits; None means 1 / sqrt(W).
      enable_gqa: whether K may be less than N.
      coefficients: a fit, from `calibrate.load`; per head: along N.
      logits_soft_cap: c, for logits c tanh(z / c) before bias and masks.
      sinks: the logit of one more item, which has no value: (N,), or broadcastable to
        (..., N, T, 1). It is an item like any other to entropy, n and normaliser.
      entropy_gradient: whether gradients flow through beta(H) too.
    Returns:
      (..., N, T, value's width) of the query's dtype. Entropy, beta and sums are computed in
      float32 or wider; logits too, but for half precision on an accelerator's fused kernel. A query
      that sees no key gives 0.
    Raises:
      CoefficientsError: no fit was given, or it does not fit the heads.
      ValueError: shapes or dtypes that do not match.
      TypeError: a mask that is neither bool nor floating.
    Reference: Velickovic et al. 2024, section 3.
    """
    fit = check_fit(coefficients)
    if min(query.ndim, key.ndim, value.ndim) < 2:
        raise ValueError(f"query is {tuple(query.shape)}; give (..., heads, queries, width)")
    device = query.device.type
    if torch.is_autocast_enabled(device):  # it casts what comes in, as in the original, and no more
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return scaled_dot_product_attention(
                query.to(dtype), key.to(dtype), value.to(dtype), attn_mask, dropout_p, is_causal,
                scale, enable_gqa, coefficients=fit, logits_soft_cap=logits_soft_cap, sinks=sinks,
                entropy_gradient=entropy_gradient,
            )  # fmt: skip
    _check(query, key, value, enable_gqa)
    if logits_soft_cap is not None and logits_soft_cap <= 0:
        raise ValueError(f"logits_soft_cap is {logits_soft_cap}; give c > 0, or None")
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    q, k, v = (_four_axes(x, lead) for x in (query, key, value))
    mask, bias = _mask_or_bias(attn_mask, (*lead, q.shape[1], q.shape[2], k.shape[2]), lead)
    if is_causal and mask is not None:
        mask, is_causal = mask & _causal(q.shape[2], k.shape[2], mask.device), False
    if sinks is not None:
        sinks = sinks[:, None, None] if sinks.ndim == 1 else sinks
        sinks = _broadcastable("sinks", sinks, (*lead, *q.shape[1:3], 1), lead)
    if scale is None:
        scale = max(1, q.shape[-1]) ** -0.5
    how = _How(fit, scale, is_causal, logits_soft_cap, dropout_p, entropy_gradient)
    out = _attend(q, k, v, mask, bias, sinks, how).to(query.dtype)
    heads = query.shape[-3:-2]
    return out.reshape(*lead, *heads, *out.shape[-2:])


def _check(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    shapes = f"query is {tuple(q.shape)}, key {tuple(k.shape)} and value {tuple(v.shape)}"
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(f"{shapes}; give (..., N, T, W), (..., K, S, W) and (..., K, S, any)")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"query, key, value are {q.dtype}, {k.dtype}, {v.dtype}; give one float")
    N, *others = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v))
    if others[0] != others[1] or (others[0] != N and (not enable_gqa or N % max(1, others[0]))):
        remedy = "a multiple of their heads" if enable_gqa else "as many heads, or enable_gqa=True"
        raise ValueError(f"{shapes}; give {remedy}")


def _four_axes(x: Tensor, lead: torch.Size) -> Tensor:
    """(B, heads, ...) of (..., heads, ...), its leading axes broadcast to `lead`."""
    x = x.reshape((1,) * (len(lead) + 3 - x.ndim) + x.shape)
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])


def _broadcastable(name: str, x: Tensor, full: tuple[int, ...], lead: torch.Size) -> Tensor:
    """x with four axes, each possibly 1."""
    shape = (1,) * (len(full) - x.ndim) + x.shape
    if len(shape) > len(full) or any(a not in (1, b) for a, b in zip(shape, full, strict=True)):
        raise ValueError(f"{name} is {tuple(x.shape)}; give what broadcasts to {full}")
    if all(a == 1 for a in shape[:-3]):
        return x.reshape(1, *shape[-3:])
    return _four_axes(x, lead)


def _mask_or_bias(
    attn_mask: Tensor | None, full: tuple[int, ...], lead: torch.Size
) -> tuple[Tensor | None, Tensor | None]:
    """The mask as bool, or as what is added to the logits; four axes, each possibly 1."""
    if attn_mask is None:
        return None, None
    four = _broadcastable("attn_mask", attn_mask, full, lead)
    if attn_mask.dtype == torch.bool:
        return four, None
    if not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask is {attn_mask.dtype}; give bool, True for real keys, or floats")
    return None, four


def _causal(T: int, S: int, device: torch.device, first: int = 0) -> Tensor:
    """(T, S), True for the keys that each query sees; the first query stands at `first`."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril_(first)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None,
    sinks: Tensor | None, how: _How,
) -> Tensor:  # fmt: skip
    if 0 in (*q.shape, *k.shape, *v.shape):
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    plain = bias is None and sinks is None and how.soft_cap is None and how.dropout_p == 0
    if q.device.type == "cpu" or not plain:
        q, k, v = (x.to(wide(x.dtype)) for x in (q, k, v))
    if plain and q.shape[2] > FEW_QUERIES:
        stock = kernel(q, k, v, mask, how.is_causal, how.scale)
        if stock is not None:
            return _attend_in_two_calls(stock, q, k, v, mask, how)
    return _attend_in_blocks(q, k, v, mask, bias, sinks, how)


def _attend_in_two_calls(
    stock: Kernel, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: _How
) -> Tensor:
    if how.fit.rule.min_beta == how.fit.rule.max_beta == 1:
        return stock(q, k, v)[0]  # as in layers that a fit does not name
    # Softmax is the same for keys that are moved alike; E[z] and log Z are smaller, and exacter.
    k = k - _typical_key(k, mask)
    if how.fit.rule.kind == LOG_SIZE:
        x = _log_n_keys(q, k, mask, how.is_causal)
    else:
        with torch.set_grad_enabled(torch.is_grad_enabled() and how.entropy_gradient):
            x = _entropy(stock, q, k, how.scale)
    beta = beta_of_rows(x, how.fit, -2)
    return stock((q * beta[..., None]).to(q.dtype), k, v)[0]


def _typical_key(k: Tensor, mask: Tensor | None) -> Tensor:
    """(B, K, 1, W): the median of some keys, of those that some query sees.

    It is a constant to gradients, as it cancels. A mean would let one odd key, which most queries
    may not see, take their precision.
    """
    k, S = k.detach(), k.shape[2]
    share = torch.linspace(0, 1, min(S, TYPICAL_KEYS), device=k.device)
    if mask is None:
        return k[:, :, (share * (S - 1)).long()].nanmedian(-2, keepdim=True).values
    seen = mask.expand(*mask.shape[:-1], S).any(-2).any(1).cumsum(-1)  # so many up to each key
    rank = 1 + (share * (seen[:, -1:] - 1).clamp(min=0)).long()
    at = torch.searchsorted(seen, rank).clamp(max=S - 1)[:, None, :, None]
    at = at.expand(len(k), k.shape[1], -1, k.shape[3])
    return k.gather(2, at).nanmedian(-2, keepdim=True).values


def _entropy(stock: Kernel, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """H = log Z - E[z] of each query, (B, N, T).

    Its gradient is that of E[z] through the weights alone, dH = -sum z dp: what flows through z
    itself is E[dz] in both terms, and cancels.
    """
    # As a value, a key that is no number would reach queries that do not see it: 0 times NaN.
    values = k.detach().nan_to_num(0.0, 0.0, 0.0)
    mean_key, log_normaliser = stock(q, k, values)
    of_float = wide(q.dtype)
    mean = scale * (q.detach().to(of_float) * mean_key.to(of_float)).sum(-1)
    return (log_normaliser.detach().to(of_float) - mean).clamp(min=0)


def _log_n_keys(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """log n of the n keys that each query sees, (B, N, T); 0 for a query without any."""
    T, S = q.shape[2], k.shape[2]
    if mask is not None:
        n = mask.expand(*mask.shape[:-1], S).sum(-1)
    elif is_causal:
        n = torch.arange(1, T + 1, device=q.device).clamp(max=S)
    else:
        n = torch.full((), S, device=q.device)
    return n.clamp(min=1).to(wide(q.dtype)).log().expand(q.shape[:3])


def _attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None,
    sinks: Tensor | None, how: _How,
) -> Tensor:  # fmt: skip
    """A block of queries meets its keys at a time: the matrix of all logits never exists."""
    B, N, T, _ = q.shape
    S = k.shape[2]
    # A compiler unrolls the loop, for one length; it holds the matrix instead, for any.
    rows = T if torch.compiler.is_compiling() else max(MIN_ROWS, BLOCK_LOGITS // (B * N * S))
    if rows >= T:
        return _attend_block(q, k, v, mask, bias, sinks, 0, how)
    outs, grad = [], torch.is_grad_enabled()
    for first in range(0, T, rows):
        last = min(T, first + rows)
        seen = min(S, last) if how.is_causal else S
        block = partial(
            _attend_block, q[:, :, first:last], k[:, :, :seen], v[:, :, :seen],
            _part(mask, first, last, seen), _part(bias, first, last, seen), sinks, first, how,
        )  # fmt: skip
        # For gradients, each block is computed again.
        outs.append(checkpoint(block, use_reentrant=False) if grad else block())
    return torch.cat(outs, 2)


def _part(x: Tensor | None, first: int, last: int, seen: int) -> Tensor | None:
    """Of (B, N, T, S), each axis possibly 1, the block's queries and keys."""
    if x is None:
        return None
    x = x if x.shape[2] == 1 else x[:, :, first:last]
    return x if x.shape[3] == 1 else x[..., :seen]


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None,
    sinks: Tensor | None, first: int, how: _How,
) -> Tensor:  # fmt: skip
    """The queries (B, N, rows, W) from position `first` on."""
    B, N, rows, _ = q.shape
    z, mask = masked_logits(q, k, mask, bias, sinks, first, how.scale, how.is_causal, how.soft_cap)
    weights = adaptive_softmax(z, how.fit, where=mask, entropy_gradient=how.entropy_gradient)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = torch.nn.functional.dropout(weights, how.dropout_p)
    K, S = k.shape[1:3]
    return (weights.reshape(B, K, N // K * rows, S) @ v).reshape(B, N, rows, -1)


def masked_logits(
    q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    first: int, scale: float, is_causal: bool, soft_cap: float | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Logits of the queries (B, N, rows, W) from position `first` on, and which items are real.

    (B, N, rows, S), or S + 1 with a sink, last; the mask is None if all of them are.
    """
    B, N, rows, W = q.shape
    K, S = k.shape[1:3]
    together = (B, K, N // K * rows)  # queries of a group meet the same keys
    z = ((q * scale).reshape(*together, W) @ k.mT).reshape(B, N, rows, S)
    if soft_cap is not None:
        z = soft_cap * torch.tanh(z / soft_cap)
    if bias is not None:
        z = z + bias
        mask = _both(mask, z > -torch.inf)  # a query without keys gives 0, not NaN
    if is_causal:
        mask = _both(mask, _causal(rows, S, q.device, first))
    return (z, mask) if sinks is None else _with_sinks(z, mask, sinks, first)


def _both(mask: Tensor | None, other: Tensor) -> Tensor:
    return other if mask is None else mask & other


def _with_sinks(
    z: Tensor, mask: Tensor | None, sinks: Tensor, first: int
) -> tuple[Tensor, Tensor | None]:
    """Logits and mask of (B, N, rows, S + 1) items, the last of which is the sink."""
    B, N, rows, S = z.shape
    if sinks.shape[2] > 1:
        sinks = sinks[:, :, first : first + rows]
    z = torch.cat([z, sinks.to(z.dtype).expand(B, N, rows, 1)], -1)
    if mask is not None:
        mask = torch.nn.functional.pad(mask.expand(B, N, rows, S), (0, 1), value=True)
    return z, mask
