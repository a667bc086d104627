"""Stock attention kernels that return the log of their normaliser; that of CPUs is private API.

Letters for shapes: B batch, N query heads, K key heads, T queries, S keys, W width.
"""

from collections.abc import Callable, Hashable
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

# (query, key, value) -> output and log of sum exp of the scaled logits, (B, N, T)
Kernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_flex_attention: Callable[..., Any] = flex.flex_attention
_MIN_WIDTH = 16  # of matrix products on an accelerator
_MIN_QUERIES = 128  # flex_attention fails to compile for changing lengths of fewer


def kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Kernel | None:
    """A kernel for these shapes, dtype, device and mask, or None.

    Args:
      mask: bool, broadcastable to (B, N, T, S); None if causal.
    """
    if query.device.type == "cpu":
        return _kernel_of_cpu(query, key, value, mask, is_causal, scale)
    fits = query.shape[-1] >= _MIN_WIDTH and query.shape[2] >= _MIN_QUERIES
    if query.device.type == "cuda" and fits:
        has_groups = query.shape[1] != key.shape[1]
        variant = (query.dtype, is_causal, mask is not None, has_groups)
        attention = _flex_attention  # compiled with its caller
        if not torch.compiler.is_compiling():
            attention = compiled_flex_attention(variant)
        return kernel_of_flex(query, key, mask, is_causal, scale, attention)
    return None


def _kernel_of_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Kernel | None:
    """The kernel of PyTorch's own attention on CPUs; its name is not public.

    It adds -inf to masked logits, which gives NaN for a logit of NaN or inf. So there is no kernel
    for a mask and such logits. Compiled code cannot look, and sets keys that no query sees to 0.
    """
    op = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    compiling = torch.compiler.is_compiling()  # compiled code cannot read the choice of kernels
    allowed = compiling or torch.backends.cuda.flash_sdp_enabled()
    if op is None or not allowed or value.shape[-1] != query.shape[-1]:
        return None
    unseen = None
    if mask is not None:
        if compiling:
            unseen = ~mask.expand(*mask.shape[:-1], key.shape[2]).any(2).any(1)[:, None, :, None]
        elif not _logits_are_finite(query, key):
            return None
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        key = key if unseen is None else key.masked_fill(unseen, 0)
        query, key, value = map(_with_contiguous_rows, (query, key, value))
        result: tuple[Tensor, Tensor] = op(
            query, key, value, is_causal=is_causal, attn_mask=mask, scale=scale
        )
        return result

    return attend


def _logits_are_finite(query: Tensor, key: Tensor) -> bool:
    """True if logits are finite even times any beta; False if that is unknown."""
    try:
        return bool(query.norm() * key.norm() < torch.finfo(query.dtype).max ** 0.5)
    except RuntimeError:  # under torch.func.vmap
        return False


def _with_contiguous_rows(x: Tensor) -> Tensor:
    """A tensor with contiguous rows: with others, kernels read beyond a row."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def kernel_of_flex(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float, attention: Any
) -> Kernel:
    """flex_attention, which is public. Compiled, it does without the matrix of logits."""
    T, S = query.shape[2], key.shape[2]
    block_mask = None
    if is_causal:
        block_mask = _causal_blocks(T, S, query.device)
    elif mask is not None:
        B, N = mask.shape[:2]
        mask = mask.expand(B, N, T, S)

        def sees(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            return mask[b if B > 1 else 0, h if N > 1 else 0, t, s]

        block_mask = flex.create_block_mask(sees, B, N, T, S, query.device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = map(_with_contiguous_rows, (query, key, value))
        out, aux = attention(
            query,
            key,
            value,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=flex.AuxRequest(lse=True),
        )
        return out, aux.lse

    return attend


@lru_cache(maxsize=8)
def _causal_blocks(T: int, S: int, device: torch.device) -> Any:
    return flex.create_block_mask(lambda b, h, t, s: s <= t, None, None, T, S, device)


@lru_cache
def compiled_flex_attention(variant: Hashable, backend: str = "inductor") -> Callable[..., Any]:
    """flex_attention, compiled for one variant of calls: a dtype and a kind of mask.

    PyTorch compiles a function at most eight times, and then runs it uncompiled, with the matrix of
    logits. From PyTorch 2.13 on, each variant has eight compilations of its own.
    """
    isolated = "isolate_recompiles" in signature(torch.compile).parameters
    options: dict[str, Any] = {"isolate_recompiles": True} if isolated else {}
    return torch.compile(_flex_attention, backend=backend, **options)
