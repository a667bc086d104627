"""Attention of Transformers' models that applies a fit.

One function is registered with Transformers as the attention implementation "calibrate". It applies
the fit that is an attribute of each attention module. `apply` sets the attribute after it has
verified the model; copies and pickles of a model keep it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

from calibrate.core.masking import is_masked
from calibrate.errors import CoefficientsError
from calibrate.store.fit import Fit
from calibrate.torch import scaled_dot_product_attention
from calibrate.torch.query_blocks import both_masks, masked_logits
from calibrate.torch.softmax_passes import wide

NAME = "calibrate"  # of the attention implementation
# Arguments that choose keys in other implementations, beside the mask.
_UNSUPPORTED = ("indices", "block_indices", "cache")

_numbers = count()  # for temporary names, as several models may have such attention at once


def get_module_fit(module: Any) -> Fit:
    """The fit of an attention module.

    Raises:
      CoefficientsError: the module has none, since its model was not verified.
    """
    fit: Fit | None = getattr(module, "_calibrate_fit", None)
    if fit is None:
        raise CoefficientsError(
            f"{type(module).__name__} has no fit, as its model is not verified; call "
            "calibrate.transformers.apply(model, fit, **inputs) with inputs that run it"
        )
    return fit


def set_module_fit(module: Any, fit: Fit) -> None:
    """Sets the fit of an attention module."""
    module._calibrate_fit = fit


def has_module_fit(module: Any) -> bool:
    """True if an attention module has a fit."""
    return hasattr(module, "_calibrate_fit")


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention with the module's fit, as Transformers calls it: (batch, heads, length, width)."""
    return attend_with(get_module_fit(module), module, query, key, value, attention_mask, **options)


def attend_with(
    fit: Fit,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a module with a fit: (batch, length, heads, width), and None for the weights.

    Masks may be boolean or additive: a number more than 9,000 below the highest of its row masks.
    Causality, padding, sliding windows, grouped queries, a logit soft-cap, attention sinks (items
    of the entropy like others), position biases and dropout apply.

    Raises:
      ValueError: the model chooses keys by arguments other than its mask.
    """
    _require_supported(module, others)
    causal = is_causal_alone(module, attention_mask, query.shape[2], is_causal)
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        mask_and_bias(attention_mask, position_bias),
        dropout,
        causal,
        scaling,
        enable_gqa=True,
        logits_soft_cap=softcap,
        sinks=s_aux if sinks is None else sinks,
        coefficients=fit,
    )
    return out.transpose(1, 2).contiguous(), None


def _require_supported(module: Any, arguments: Mapping[str, Any]) -> None:
    """Raises ValueError if a model passes arguments that this attention does not apply."""
    for name in _UNSUPPORTED:
        if arguments.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name!r}, which calibrate.transformers does "
                "not apply; use the model without a fit"
            )


def make_mask(*arguments: Any, config: Any = None, **options: Any) -> Tensor | None:
    """The mask of a model's attention, as Transformers asks for it.

    Models written for PyTorch's attention get a bool mask, or None if causality alone gives the
    same. Others always get an additive mask, which parts of them add to logits.
    """
    if _written_for_sdpa(type(config)):
        mask: Tensor | None = sdpa_mask(*arguments, config=config, **options)
        return mask
    options |= {"allow_is_bidirectional_skip": False}
    return eager_mask(*arguments, config=config, **options)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _written_for_sdpa(configuration: type) -> bool:
    """True if all models with a configuration, or of its module, support PyTorch's attention."""
    code = sys.modules.get(configuration.__module__.replace("configuration_", "modeling_"))
    if code is None:
        return False
    classes = [x for x in vars(code).values() if isinstance(x, type)]
    models: list[Any] = [
        x for x in classes if issubclass(x, PreTrainedModel) and x.__module__ == code.__name__
    ]
    own = [model for model in models if model.config_class is configuration]
    return bool(models) and all(model._supports_sdpa for model in own or models)


def register(name: str, attention: Callable[..., Any]) -> None:
    """Registers an attention function with Transformers, and `make_mask` for its masks."""
    AttentionMaskInterface.register(name, make_mask)
    AttentionInterface.register(name, attention)


@contextmanager
def temporary_attention(model: PreTrainedModel, attention: Callable[..., Any]) -> Iterator[None]:
    """Makes a model call another attention function until the block ends."""
    name = f"{NAME}-{next(_numbers)}"
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    implementations = [(part.config, part.config._attn_implementation) for part in parts]
    register(name, attention)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, before in implementations:
            config._attn_implementation = before
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name, None)


def is_causal_alone(
    module: Any, mask: Tensor | None, n_queries: int, is_causal: bool | None
) -> bool:
    """True if there is no mask and attention itself must be causal.

    Without a mask, a single query is the last one and sees all keys; several are the first ones.
    """
    if mask is not None or n_queries == 1:
        return False
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal is None:
        raise ValueError(
            f"{type(module).__name__} gives no mask, and no is_causal; use the model without a fit"
        )
    return bool(causal)


def mask_and_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Joins a mask and a bias: bool, or a bias that is -inf where keys are masked.

    An additive mask masks a key if its number is more than 9,000 below the highest of the query's
    row. A row of such numbers alone masks nothing, as in stock softmax.
    """
    if mask is not None and mask.is_floating_point():
        shifted = mask.to(wide(mask.dtype))
        shifted = shifted - shifted.amax(-1, keepdim=True)
        mask = mask.masked_fill(is_masked(shifted), -torch.inf)
        return mask if bias is None else mask + bias
    return bias if mask is None else both_masks(bias, mask)


def head_logits(
    module: Any,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    query_positions: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Logits of an attention layer in float32 or wider, and which are real (None: all).

    Logits are (batch, heads, queries, items), with one item for each key and for a sink; the bools
    broadcast to them.

    Args:
      query_positions: (batch,) the position of one query each; None means all queries.
    """
    (B, N, T, W), S = query.shape, key.shape[2]
    causal = is_causal_alone(module, mask, T, is_causal)
    mask, sinks = mask_and_bias(mask, position_bias), s_aux if sinks is None else sinks
    if sinks is not None and sinks.ndim == 1:
        sinks = sinks[None, :, None, None]
    rows = torch.arange(T, device=key.device)[:, None]
    if query_positions is not None:
        rows = query_positions[:, None, None, None]

        def rows_of_queries(x: Tensor, width: int) -> Tensor:
            return x.expand(B, N, T, width).gather(2, rows.expand(B, N, 1, width))

        query = rows_of_queries(query, W)
        mask = None if mask is None else rows_of_queries(mask, S)
        sinks = None if sinks is None else rows_of_queries(sinks, 1)
    if causal:
        mask = both_masks(mask, torch.arange(S, device=key.device) <= rows)
    q, k = (x.to(wide(x.dtype)) for x in (query, key))
    scale = W**-0.5 if scaling is None else scaling
    return masked_logits(q, k, mask, sinks, scale, softcap)


register(NAME, attend)
