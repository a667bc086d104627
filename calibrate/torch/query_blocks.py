"""Attention in PyTorch in blocks of queries, without the whole matrix of logits.

Letters for shapes: B batch, N query heads, K key heads, T queries, S keys, W width.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from calibrate.store.fit import Fit
from calibrate.torch.softmax import adaptive_softmax


class QueryBlockSizes(NamedTuple):
    """How queries are cut into blocks.

    With the whole matrix, 2,048 queries with a bias or a soft-cap take 1.3 to 3.7 times as long,
    and with gradients 0.8 to 2.2 times (an EPYC); 16,384 queries take 1.1 GB instead of 59 MB.
    """

    logits: int = 1 << 20
    min_rows: int = 16
    few_queries: int = 32  # up to so many, a fused kernel reads the keys too often


QUERY_BLOCKS = QueryBlockSizes()


class Call(NamedTuple):
    """The inputs of attention."""

    q: Tensor  # (B, N, T, W)
    k: Tensor  # (B, K, S, W)
    v: Tensor  # (B, K, S, any)
    mask: Tensor | None  # bool, True for real keys, or a bias of logits; each axis possibly 1
    sinks: Tensor | None  # (B, N, T, 1), each axis possibly 1
    fit: Fit
    scale: float
    is_causal: bool
    soft_cap: float | None
    dropout_p: float
    entropy_gradient: bool

    def with_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None
    ) -> "Call":
        """The call with other tensors; the same object if they are the same, as in decoding."""
        same = q is self.q and k is self.k and v is self.v
        if same and mask is self.mask and sinks is self.sinks:
            return self
        return self._replace(q=q, k=k, v=v, mask=mask, sinks=sinks)


def causal_mask(T: int, S: int, device: torch.device, first: int = 0) -> Tensor:
    """(T, S), True for the keys that each query sees; `first` is the position of the first."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril_(first)


def both_masks(mask: Tensor | None, real: Tensor) -> Tensor:
    """A mask, bool or a bias, without the keys that are not `real`."""
    if mask is None:
        return real
    return mask & real if mask.dtype == torch.bool else mask.masked_fill(~real, -torch.inf)


def attend_in_blocks(call: Call) -> Tensor:
    """Attention block by block; gradients compute each block again."""
    q, k, v = call.q, call.k, call.v
    B, N, T, _ = q.shape
    S = k.shape[2]
    # A compiler would unroll the loop for one length. One block serves any length.
    rows = max(QUERY_BLOCKS.min_rows, QUERY_BLOCKS.logits // max(1, B * N * S))
    rows = T if torch.compiler.is_compiling() else rows
    if rows >= T:
        return _attend_block(call, 0)
    outs, grad = [], torch.is_grad_enabled()
    for first in range(0, T, rows):
        last = min(T, first + rows)
        seen = min(S, last) if call.is_causal else S
        part = call._replace(
            q=q[:, :, first:last],
            k=k[:, :, :seen],
            v=v[:, :, :seen],
            mask=_part(call.mask, first, last, seen),
            sinks=_part(call.sinks, first, last, 1),
        )
        block = partial(_attend_block, part, first)
        outs.append(checkpoint(block, use_reentrant=False) if grad else block())
    return torch.cat(outs, 2)


def _part(x: Tensor | None, first: int, last: int, seen: int) -> Tensor | None:
    """The queries and keys of a block, from (B, N, T, S), each axis possibly 1."""
    if x is None:
        return None
    x = x if x.shape[2] == 1 else x[:, :, first:last]
    return x if x.shape[3] == 1 else x[..., :seen]


def _attend_block(call: Call, first: int) -> Tensor:
    """The queries (B, N, rows, W) from position `first` on."""
    (B, N, rows, _), (K, S) = call.q.shape, call.k.shape[1:3]
    mask = call.mask
    if call.is_causal:
        mask = both_masks(mask, causal_mask(rows, S, call.q.device, first))
    z, mask = masked_logits(call.q, call.k, mask, call.sinks, call.scale, call.soft_cap)
    weights = adaptive_softmax(z, call.fit, where=mask, entropy_gradient=call.entropy_gradient)
    weights = weights if call.sinks is None else weights[..., :S]
    weights = torch.nn.functional.dropout(weights, call.dropout_p)
    grouped = weights.reshape(B, K, N // max(1, K) * rows, S)
    return (grouped @ call.v).reshape(B, N, rows, call.v.shape[-1])


def masked_logits(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Logits (B, N, T, S) of queries (B, N, T, W), and which of them are real (None: all).

    A sink is one more item, the last. A query whose bias is -inf throughout sees no key.
    """
    (B, N, T, W), (K, S) = q.shape, k.shape[1:3]
    grouped = (q * scale).reshape(B, K, N // max(1, K) * T, W)  # a group has the same keys
    z = (grouped @ k.mT).reshape(B, N, T, S)
    if soft_cap is not None:
        z = soft_cap * torch.tanh(z / soft_cap)
    if mask is not None and mask.dtype != torch.bool:
        z, mask = z + mask, mask != -torch.inf
    if sinks is not None:
        z = torch.cat([z, sinks.to(z.dtype).expand(B, N, T, 1)], -1)
        if mask is not None:
            mask = torch.nn.functional.pad(mask.expand(B, N, T, S), (0, 1), value=True)
    return z, mask
