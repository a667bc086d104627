"""Attention in PyTorch that applies a fit, in place of torch.nn.functional's.

Logits are linear in the query, so stock attention of queries times beta gives the result. A rule of
the entropy first calls a stock fused kernel with the keys as values, which returns the mean key and
log Z: then E[z] = scale q . (mean key), and H = log Z - E[z]. Blocks of queries (query_blocks.py)
compute what such a kernel does not do: a bias, a soft-cap, sinks, dropout, and few queries, for
which it reads the keys too often.

Letters for shapes: B batch, N query heads, K key heads, T queries, S keys, W width.
"""

import math

import torch
from torch import Tensor

from calibrate.store.fit import Fit
from calibrate.store.inverse_temperature import Features, check_fit
from calibrate.torch import query_blocks
from calibrate.torch.fused import Kernel, kernel
from calibrate.torch.query_blocks import Call, attend_in_blocks, causal_mask
from calibrate.torch.softmax import (
    beta_of_rows,
    check_not_nested,
    constant_betas,
    is_differentiated,
)
from calibrate.torch.softmax_passes import wide

TYPICAL_KEYS = 64
# Evaluated once, since compilers before PyTorch 2.13 do not know the function.
WITH_AUTOCAST = frozenset(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps", "xpu")))


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
    coefficients: Fit,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
    entropy_gradient: bool = True,
) -> Tensor:
    """softmax(beta(H) z) V with z = scale Q K^T + bias and H the entropy of softmax(z).

    Fits by size have beta(n) or beta(H, n): n counts the keys that mask and causality leave; of
    these, where logits are computed (with a bias, a soft-cap, a sink, or few queries and a mask or
    a rule of the entropy), those whose logit lies within 9,000 of the row's highest, so that a bias
    of -inf, -1e9 or the lowest number of a dtype masks.

    `functools.partial(scaled_dot_product_attention, coefficients=fit)` takes the place of
    torch.nn.functional's: the same arguments and layout, and three more.

    Args:
      query: (..., N, T, W); or (T, W).
      key, value: (..., K, S, W), value of any width; K is N, or with `enable_gqa` divides it.
      attn_mask: broadcastable to (..., N, T, S); bool, True for real keys, or a bias that is added
        to the logits, no wider than they are.
      dropout_p: of the weights, after the entropy; applied whatever the mode, as in the original.
      is_causal: query t sees keys 0 to t; with a mask, both apply.
      scale: of the logits; None means 1 / sqrt(W).
      enable_gqa: whether K may be less than N.
      coefficients: a fit, from `calibrate.load`; per head: along N.
      logits_soft_cap: c, for logits c tanh(z / c) before bias and masks.
      sinks: the logit of one more item, which has no value: (N,), or broadcastable to
        (..., N, T, 1). It is an item like any other to entropy, n and normaliser.
      entropy_gradient: whether gradients flow through H too; n has none.
    Returns:
      (..., N, T, value's width) of the query's dtype. Entropy, beta and sums are computed in
      float32 or wider; logits too, but for half precision on an accelerator's fused kernel. A query
      that sees no key gives 0.

      Keys that a query does not see may hold anything, even NaN: they change neither its result
      nor the gradients of the keys and values that it sees. If they are NaN or inf, its own
      gradient may be NaN (0 times NaN). In a compiled call with a mask this holds for keys that no
      query sees. Values must be finite, as in the original. Second and forward-mode derivatives of
      more than 32 queries need sdpa_kernel(SDPBackend.MATH), as in the original.
    Raises:
      CoefficientsError: no fit was given, or it does not fit the heads.
      ValueError: shapes or dtypes that do not match.
      TypeError: a mask that is neither bool nor floating; nested tensors.
    Reference: Velickovic et al. 2024, section 3.

    >>> import calibrate, torch
    >>> from calibrate.torch import scaled_dot_product_attention
    >>> query, key, value = torch.randn(3, 2, 4, 11, 8)
    >>> fit = calibrate.load("paper")
    >>> out = scaled_dot_product_attention(query, key, value, is_causal=True, coefficients=fit)
    >>> out.shape
    torch.Size([2, 4, 11, 8])
    """
    fit = check_fit(coefficients)
    check_not_nested("attn_mask", query, key, value)
    if min(query.ndim, key.ndim, value.ndim) < 2:
        raise ValueError(f"query is {tuple(query.shape)}; give (..., heads, queries, width)")
    scale = max(1, query.shape[-1]) ** -0.5 if scale is None else scale
    call = Call(
        query,
        key,
        value,
        mask=attn_mask,
        sinks=sinks,
        fit=fit,
        scale=scale,
        is_causal=is_causal,
        soft_cap=logits_soft_cap,
        dropout_p=dropout_p,
        entropy_gradient=entropy_gradient,
    )
    device = query.device.type
    if not (_has_autocast(device) and torch.is_autocast_enabled(device)):
        return _attend_any_axes(call, enable_gqa)
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):  # casts inputs, as in the original, not logits
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (call.q, call.k, call.v))
        return _attend_any_axes(call._replace(q=q, k=k, v=v), enable_gqa)


def _has_autocast(device: str) -> bool:
    return device in WITH_AUTOCAST or torch.amp.is_autocast_available(device)


def _attend_any_axes(call: Call, enable_gqa: bool) -> Tensor:
    """Checks the inputs, and reshapes them to one batch axis."""
    _check(call, enable_gqa)
    query, mask, sinks = call.q, call.mask, call.sinks
    q, k, v = call.q, call.k, call.v
    lead = q.shape[:-3]
    if not q.ndim == k.ndim == v.ndim == 4 or not lead == k.shape[:1] == v.shape[:1]:
        lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
        q, k, v = (_four_axes(x, lead) for x in (q, k, v))
    full = (*lead, q.shape[1], q.shape[2], k.shape[2])
    if mask is not None:
        mask = _broadcastable("attn_mask", mask, full, lead)
        if call.is_causal and mask.dtype == torch.bool:
            mask = mask & causal_mask(full[-2], full[-1], mask.device)
            call = call._replace(is_causal=False)
    if sinks is not None:
        sinks = sinks[:, None, None] if sinks.ndim == 1 else sinks
        sinks = _broadcastable("sinks", sinks, (*full[:-1], 1), lead)
    out = _attend(call.with_inputs(q, k, v, mask, sinks))
    out = out if out.dtype == query.dtype else out.to(query.dtype)
    return out if query.ndim == 4 else out.reshape(*lead, *query.shape[-3:-2], *out.shape[-2:])


def _check(call: Call, enable_gqa: bool) -> None:
    q, k, v = call.q, call.k, call.v
    N, K, of_value = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v))
    divides = N == K or (enable_gqa and K > 0 and N % K == 0)
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2] or of_value != K or not divides:
        raise ValueError(
            f"query is {tuple(q.shape)}, key {tuple(k.shape)} and value {tuple(v.shape)}; give "
            "(..., N, T, W), (..., K, S, W) and (..., K, S, any), K = N or with enable_gqa=True a "
            "divisor of N"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"query, key, value are {q.dtype}, {k.dtype}, {v.dtype}; give one float")
    if call.soft_cap is not None and call.soft_cap <= 0:
        raise ValueError(f"logits_soft_cap is {call.soft_cap}; give c > 0, or None")
    mask = call.mask
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attn_mask is {mask.dtype}; give bool, True for real keys, or floats")
    if mask is not None and mask.dtype.itemsize > wide(q.dtype).itemsize:
        raise ValueError(
            f"attn_mask is {mask.dtype} and query is {q.dtype}; give bool, or a mask of that dtype"
        )


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


def _attend(call: Call) -> Tensor:
    q, k, v, mask = call.q, call.k, call.v, call.mask
    symbolic = _has_symbolic_size(q.shape[2], k.shape[2])
    if call.is_causal and not symbolic:
        n_seen = min(q.shape[2], k.shape[2])
        k, v = (_first(x, n_seen, 2) for x in (k, v))
        mask = mask if mask is None or mask.shape[3] == 1 else _first(mask, n_seen, 3)
    linear = mask is None or mask.dtype == torch.bool
    linear = linear and call.sinks is None and call.soft_cap is None and call.dropout_p == 0
    linear = linear and call.scale > 0  # kernels scale masked logits: -inf times -1 is inf
    dtype = wide(q.dtype)
    if q.dtype != dtype and (q.device.type == "cpu" or not linear):
        q, k, v = (x.to(dtype) for x in (q, k, v))
    call = call.with_inputs(q, k, v, mask, call.sinks)
    is_long = symbolic or q.shape[2] > query_blocks.QUERY_BLOCKS.few_queries
    if not linear or 0 in (*q.shape, *k.shape, *v.shape):
        return attend_in_blocks(call)
    sees_all = mask is None and not (call.is_causal and q.shape[2] > 1)
    if sees_all and not call.fit.needs_entropy and (is_long or not is_differentiated(q, k, v)):
        return _attend_in_one_call(call)
    if is_long:
        stock = kernel(q, k, v, mask, call.is_causal, call.scale)
        if stock is not None:
            return _attend_in_two_calls(stock, call)
    return attend_in_blocks(call)


def _has_symbolic_size(*sizes: int) -> bool:
    """True if sizes are symbolic, for torch.export, and cannot be compared."""
    return torch.compiler.is_exporting() and any(isinstance(x, torch.SymInt) for x in sizes)


def _first(x: Tensor, n: int, axis: int) -> Tensor:
    """The first n along an axis.

    Under a compiler it is a copy. Otherwise contiguous parts and others have a graph each.
    """
    x = x.narrow(axis, 0, n)
    return x.clone(memory_format=torch.contiguous_format) if torch.compiler.is_compiling() else x


def _attend_in_one_call(call: Call) -> Tensor:
    """Stock attention of queries times beta, for queries that see all keys.

    With a mask, stock attention may add -inf to masked logits, which gives NaN if they are NaN.
    """
    q, k, v = _times_beta(call), call.k, call.v
    has_groups = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210 (a compiler has no bool)
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, scale=call.scale, enable_gqa=has_groups
    )
    return out


def _attend_in_two_calls(stock: Kernel, call: Call) -> Tensor:
    q, k, v, H = call.q, call.k, call.v, None
    if call.fit.needs_entropy:
        # Subtracting one vector from all keys leaves softmax as it is, and makes E[z] and log Z
        # smaller, so that their difference is more exact.
        k = k - _typical_key(k, call.mask)
        with torch.set_grad_enabled(torch.is_grad_enabled() and call.entropy_gradient):
            H = _entropy(stock, q, k, call.scale)
    return stock(_times_beta(call, H), k, v)[0]


def _times_beta(call: Call, H: Tensor | None = None) -> Tensor:
    """The queries times beta, given their entropies (B, N, T) if the fit needs them."""
    q, fit, log_n = call.q, call.fit, None
    if fit.is_identity:
        return q  # the fit does not name this layer
    if fit.ignores_inputs:
        beta = constant_betas(fit, q)
    else:
        if fit.needs_size:
            log_n = log_n_keys(q, call.k, call.mask, call.is_causal)
        beta = beta_of_rows(Features(H, log_n), fit, -2)[..., None]
    scaled = q * beta
    return scaled if scaled.dtype == q.dtype else scaled.to(q.dtype)


def _typical_key(k: Tensor, mask: Tensor | None) -> Tensor:
    """(B, K, 1, W): for each coordinate, the lower quartile by magnitude of some keys.

    Keys that no query sees have no part; 0 if there is no other. Gradients treat it as a constant.
    A mean would lose all precision to one very large key.
    """
    k, S = k.detach(), k.shape[2]
    # Of fewer keys some come twice: with a number of samples that depends on S, a compiler makes a
    # graph for each S.
    share = torch.linspace(0, 1, TYPICAL_KEYS, dtype=torch.float32, device=k.device)
    if mask is None:
        some = k[:, :, (share * (S - 1)).long()]
    else:
        seen = (
            mask.expand(*mask.shape[:-1], S).any(-2).any(1).cumsum(-1)
        )  # seen keys up to each key
        rank = 1 + (share * (seen[:, -1:] - 1).clamp(min=0)).long()
        index = torch.searchsorted(seen, rank).clamp(max=S - 1)[:, None, :, None]
        some = k.gather(2, index.expand(k.shape[0], k.shape[1], -1, k.shape[3]))
    size = some.abs().nan_to_num(torch.inf, torch.inf)
    index = size.kthvalue(1 + TYPICAL_KEYS // 4, 2, keepdim=True).indices
    return some.gather(2, index).nan_to_num(0.0, 0.0, 0.0)


def _entropy(stock: Kernel, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """H = log Z - E[z] of each query, (B, N, T).

    Its gradient is that of E[z] through the weights alone, since E[dz] cancels between the terms.
    """
    # A NaN among values reaches queries that do not see it, since 0 times NaN is NaN.
    values = k.detach().nan_to_num(0.0, 0.0, 0.0)
    mean_key, log_normaliser = stock(q, k, values)
    dtype = wide(q.dtype)
    mean = scale * (q.detach().to(dtype) * mean_key.to(dtype)).sum(-1)
    return (log_normaliser.detach().to(dtype) - mean).clamp(min=0)


def log_n_keys(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """log n of the n keys that each query sees, (B, N, T); 0 for a query without any."""
    T, S = q.shape[2], k.shape[2]
    if mask is not None:
        n = mask.expand(*mask.shape[:-1], S).sum(-1)
    elif is_causal:
        n = torch.arange(1, T + 1, device=q.device).clamp(max=S)
    else:
        return torch.full((), S, dtype=wide(q.dtype), device=q.device).log().expand(q.shape[:3])
    log_n: Tensor = n.clamp(min=1).to(wide(q.dtype)).log().expand(q.shape[:3])
    return log_n
