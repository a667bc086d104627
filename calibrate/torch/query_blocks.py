"""Attention that applies a fit, computed in blocks of queries: the whole matrix never exists.

Letters for shapes: B batch, N query heads, K key heads, T queries, S keys, W width.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from calibrate.files.coefficients import Coefficients
from calibrate.torch.softmax import adaptive_softmax

BLOCK_LOGITS = 1 << 20
MIN_ROWS = 16


class AttentionOptions(NamedTuple):
    """What determines the weights, but for logits and masks."""

    fit: Coefficients
    scale: float
    is_causal: bool
    soft_cap: float | None
    dropout_p: float
    entropy_gradient: bool


def causal_mask(T: int, S: int, device: torch.device, first: int = 0) -> Tensor:
    """(T, S), True for the keys that each query sees; the first query stands at `first`."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril_(first)


def attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None,
    sinks: Tensor | None, options: AttentionOptions,
) -> Tensor:  # fmt: skip
    """A block of queries meets its keys at a time: the matrix of all logits never exists."""
    B, N, T, _ = q.shape
    S = k.shape[2]
    # A compiler unrolls the loop, for one length; it holds the matrix instead, for any.
    rows = T if torch.compiler.is_compiling() else max(MIN_ROWS, BLOCK_LOGITS // max(1, B * N * S))
    if rows >= T:
        return _attend_block(q, k, v, mask, bias, sinks, 0, options)
    outs, grad = [], torch.is_grad_enabled()
    for first in range(0, T, rows):
        last = min(T, first + rows)
        seen = min(S, last) if options.is_causal else S
        block = partial(
            _attend_block, q[:, :, first:last], k[:, :, :seen], v[:, :, :seen],
            _part(mask, first, last, seen), _part(bias, first, last, seen), sinks, first, options,
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
    sinks: Tensor | None, first: int, options: AttentionOptions,
) -> Tensor:  # fmt: skip
    """The queries (B, N, rows, W) from position `first` on."""
    B, N, rows, _ = q.shape
    z, mask = masked_logits(
        q, k, mask, bias, sinks, first, options.scale, options.is_causal, options.soft_cap
    )
    weights = adaptive_softmax(
        z, options.fit, where=mask, entropy_gradient=options.entropy_gradient
    )
    if sinks is not None:
        weights = weights[..., :-1]
    weights = torch.nn.functional.dropout(weights, options.dropout_p)
    K, S = k.shape[1:3]
    together = weights.reshape(B, K, N // max(1, K) * rows, S)
    return (together @ v).reshape(B, N, rows, v.shape[-1])


def masked_logits(
    q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    first: int, scale: float, is_causal: bool, soft_cap: float | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Logits of the queries (B, N, rows, W) from position `first` on, and which items are real.

    (B, N, rows, S), or S + 1 with a sink, last; the mask is None if all of them are.
    """
    B, N, rows, W = q.shape
    K, S = k.shape[1:3]
    together = (B, K, N // max(1, K) * rows)  # queries of a group meet the same keys
    z = ((q * scale).reshape(*together, W) @ k.mT).reshape(B, N, rows, S)
    if soft_cap is not None:
        z = soft_cap * torch.tanh(z / soft_cap)
    if bias is not None:
        z = z + bias
        mask = _both(mask, bias != -torch.inf)  # a query without keys gives 0, not NaN
    if is_causal:
        mask = _both(mask, causal_mask(rows, S, q.device, first))
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
