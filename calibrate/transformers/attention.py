"""Attention in Transformers' models that applies a fit: registered under a name, and verified."""

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from calibrate.errors import CoefficientsError
from calibrate.files.coefficients import Coefficients, check_fit, identity
from calibrate.torch import scaled_dot_product_attention

# Transformers treats a model whose implementation contains one of these as that implementation.
_RESERVED = ("eager", "sdpa", "flash", "flex", "paged")
# Additive masks hold the least number of some dtype, or what older models add: -10,000, which
# bfloat16 rounds to -9,984. Keys with so much less have no weight.
_MASKED = -9_000.0
# Arguments by which models choose keys for other implementations; the mask does not show them.
_UNSUPPORTED = ("indices", "block_indices", "cache")

registered: dict[str, Coefficients] = {}


def register(name: str, coefficients: Coefficients) -> None:
    """Registers a fit with Transformers as an attention implementation of that name.

    Models loaded with `attn_implementation=name`, and those given it by
    `model.set_attn_implementation(name)`, then apply it in every attention layer; with entries per
    layer, by the layer's `layer_idx`. Registered with it is the function that makes masks, without
    which Transformers would make none, and causality would silently be lost.

    Masks may be boolean or additive; causality, padding, sliding windows, grouped queries, a
    logit soft-cap, attention sinks (items of the entropy like others), position biases and dropout
    are honoured.

    Args:
      name: letters, digits, ".", "_" and "-". The same name again changes the fit of all models
        that use it.
      coefficients: a fit, from `calibrate.load`; per head: along the query heads.
    Raises:
      CoefficientsError: no fit was given; in a forward pass, one that does not fit the heads, or
        has entries per layer for a module that does not know its layer.
      ValueError: a name that is taken, or that Transformers interprets; in a forward pass, a model
        that chooses keys by other arguments than its mask.
    Reference: Velickovic et al. 2024, section 3.
    """
    fit = check_fit(coefficients)
    name_is_free = isinstance(name, str) and not any(word in name.lower() for word in _RESERVED)
    if not name_is_free or not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(
            f"name is {name!r}; give letters, digits, '.', '_' or '-', and none of "
            f"{', '.join(_RESERVED)}, which Transformers interprets"
        )
    if name in AttentionInterface() and name not in registered:
        raise ValueError(f"name is {name!r}, which others have registered; give another")
    registered[name] = fit
    AttentionMaskInterface.register(name, make_mask)
    AttentionInterface.register(name, attention_function(fit))


def verify(model: PreTrainedModel) -> None:
    """Raises unless the model applies a registered fit.

    Transformers accepts any registered name, for models too whose code never looks it up: they
    would continue with plain softmax.

    Args:
      model: any of Transformers' models.
    Raises:
      CoefficientsError: it has no softmax attention, or a part of it (an encoder, say) has an
        attention implementation that is not a registered fit, code that does not look
        implementations up, or lacks a layer that the fit names.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    parts = [part for part in parts if _has_attention(part)]
    if not parts:
        raise CoefficientsError(f"{type(model).__name__} has no softmax attention")
    for part in parts:
        _verify_part(part)


def _verify_part(model: PreTrainedModel) -> None:
    name, model_type = model.config._attn_implementation, type(model).__name__
    if name not in registered:
        raise CoefficientsError(
            f"{model_type} has attention implementation {name!r}; register a fit, and load the "
            "model with attn_implementation= its name (or verify the part that is to have a fit)"
        )
    if not model._can_set_attn_implementation():
        raise CoefficientsError(
            f"{model_type} does not look up registered attention; it continues with plain softmax"
        )
    layers = {getattr(module, "layer_idx", None) for module in model.modules()}
    absent = set(_fits_of_layers(registered[name])) - layers
    if absent:
        raise CoefficientsError(
            f"{registered[name].reference} has entries for layers {sorted(absent)}, "
            f"which {model_type} does not have; load the fit of this model"
        )


def _has_attention(model: PreTrainedModel) -> bool:
    """Whether it has attention of its own, not only in inner models with another configuration."""
    inner = [
        part for part in model.modules()
        if isinstance(part, PreTrainedModel) and part.config is not model.config
    ]  # fmt: skip
    not_own = {id(module) for part in inner for module in part.modules()}
    return any(
        "Attention" in type(module).__name__ for module in model.modules()
        if id(module) not in not_own
    )  # fmt: skip


def make_mask(*arguments: Any, config: Any = None, **options: Any) -> Tensor | None:
    """A bool mask; None where it would hide nothing, or no more than causality does.

    Only models written for PyTorch's own attention understand None; others always get a mask.
    """
    if not _understand_none(type(config).__module__):
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*arguments, config=config, **options)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _understand_none(configuration: str) -> bool:
    """Whether all models with the configurations of that module are written for PyTorch's own
    attention, and so for masks that are left out."""
    code = sys.modules.get(configuration.replace("configuration_", "modeling_"))
    models: list[Any] = [
        x for x in vars(code).values()
        if isinstance(x, type) and issubclass(x, PreTrainedModel) and x.__module__ == code.__name__
    ] if code else []  # fmt: skip
    return bool(models) and all(model._supports_sdpa for model in models)


def attention_function(fit: Coefficients) -> Callable[..., tuple[Tensor, None]]:
    """What Transformers calls in each attention layer, with (batch, heads, length, width)."""
    of_layer = _fits_of_layers(fit)
    unnamed = identity() if of_layer else fit

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None, scaling: float | None = None, dropout: float = 0.0,
        is_causal: bool | None = None, position_bias: Tensor | None = None,
        softcap: float | None = None, s_aux: Tensor | None = None, sinks: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        _refuse_unsupported(module, others)
        layer: Any = getattr(module, "layer_idx", None)
        if of_layer and layer is None:
            raise CoefficientsError(
                f"{fit.reference} has entries per layer, and {type(module).__name__} has no "
                "layer_idx; register the fit of one layer: coefficients.layer(i)"
            )
        causal = is_causal_alone(module, attention_mask, query.shape[2], is_causal)
        if causal:
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
            if position_bias is not None:
                position_bias = position_bias[..., : query.shape[2]]
        out = scaled_dot_product_attention(
            query, key, value, mask_and_bias(attention_mask, position_bias), dropout,
            causal, scaling, enable_gqa=True, logits_soft_cap=softcap,
            sinks=s_aux if sinks is None else sinks,
            coefficients=of_layer.get(layer, unnamed),
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    return attend


def is_causal_alone(
    module: Any, mask: Tensor | None, n_queries: int, is_causal: bool | None
) -> bool:
    """Whether it is left to attention to be causal.

    A query alone without a mask is the last one, and sees all; several are the first ones.
    """
    if mask is not None or n_queries == 1:
        return False
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal is None:
        raise ValueError(
            f"{type(module).__name__} gives no mask, and no is_causal; use the model without a fit"
        )
    return bool(causal)


def _fits_of_layers(fit: Coefficients) -> dict[int, Coefficients]:
    """Those of the layers that it names; empty if all are alike."""
    return {entry.layer: fit.layer(entry.layer) for entry in fit.entries if entry.layer is not None}


def _refuse_unsupported(module: Any, others: dict[str, Any]) -> None:
    config = getattr(module, "config", None)
    name = None if config is None else config._attn_implementation
    if config is not None and name not in AttentionMaskInterface._global_mapping:
        raise ValueError(
            f"attention is registered as {name!r}, and no mask function is: causality and padding "
            "would be lost; use calibrate.transformers.register"
        )
    for word in _UNSUPPORTED:
        if others.get(word) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {word!r}, which calibrate.transformers does not "
                "apply; use the model without a fit"
            )


def mask_and_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """One mask: bool, or a bias that is -inf where keys are masked."""
    if mask is not None and mask.is_floating_point():
        mask = mask.masked_fill(mask <= _MASKED, -torch.inf)
        return mask if bias is None else mask + bias
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(
            f"attention_mask is {mask.dtype}; give bool, True for real keys, or floats"
        )
    if mask is None or bias is None:
        return bias if mask is None else mask
    return bias.masked_fill(~mask, -torch.inf)
