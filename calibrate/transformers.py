"""Floor 2, the runtime in Hugging Face Transformers: attention that applies a fit (extra
"transformers")."""

import re
from collections.abc import Callable
from typing import Any

from calibrate.errors import CoefficientsError
from calibrate.files.coefficients import Coefficients, check_fit, identity

try:
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import sdpa_mask
except ImportError as missing:
    raise ImportError(
        "calibrate.transformers needs PyTorch and Transformers: "
        "pip install 'calibrate[transformers]'"
    ) from missing

from calibrate.torch import scaled_dot_product_attention

Tensor = torch.Tensor

# What Transformers looks for in a name, to treat the model as one with that implementation.
_TAKEN = ("eager", "sdpa", "flash", "flex", "paged")
# What models choose keys by, for the kernels of other implementations: no mask shows it.
_UNSEEN = ("indices", "block_indices", "cache")

_registered: dict[str, Coefficients] = {}


def register(name: str, coefficients: Coefficients) -> None:
    """Makes a fit known to Transformers as an attention implementation of that name.

    Models loaded with `attn_implementation=name`, and those given it by
    `model.set_attn_implementation(name)`, then apply it in every attention layer; with entries per
    layer, by the layer's `layer_idx`. Registered with it is the function that makes masks, without
    which Transformers would make none, and causality would be lost without a word.

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
      ValueError: a name that Transformers has, or reads a meaning into; in a forward pass, a model
        that passes what chooses keys elsewhere than in its mask.
    Reference: Velickovic et al. 2024, section 3.
    """
    fit = check_fit(coefficients)
    if not re.fullmatch(r"[\w.-]+", name) or any(word in name for word in _TAKEN):
        raise ValueError(
            f"name is {name!r}; give letters, digits, '.', '_' or '-', and none of "
            f"{', '.join(_TAKEN)}, which Transformers reads a meaning into"
        )
    if name in AttentionInterface() and name not in _registered:
        raise ValueError(f"name is {name!r}, which is registered by others; give another")
    _registered[name] = fit
    AttentionMaskInterface.register(name, sdpa_mask)
    AttentionInterface.register(name, _attention_function(fit))


def verify(model: PreTrainedModel) -> None:
    """Raises unless the model applies a fit that `register` made known.

    Transformers accepts any registered name, for models too whose code never looks it up: they
    would go on with plain softmax.

    Args:
      model: any of Transformers' models.
    Raises:
      CoefficientsError: its attention implementation is no fit's, its code does not look
        implementations up, or the fit names a layer that it does not have.
    """
    name = model.config._attn_implementation
    if name not in _registered:
        raise CoefficientsError(
            f"{type(model).__name__} has attention implementation {name!r}; register a fit, and "
            "load the model with attn_implementation= its name"
        )
    if not model._can_set_attn_implementation():
        raise CoefficientsError(
            f"{type(model).__name__} does not look its attention up among the registered; it goes "
            "on with plain softmax"
        )
    layers = {getattr(module, "layer_idx", None) for module in model.modules()}
    absent = set(_fits_of_layers(_registered[name])) - layers
    if absent:
        raise CoefficientsError(
            f"{_registered[name].reference} has entries for layers {sorted(absent)}, "
            f"which {type(model).__name__} does not have; load the fit of this model"
        )


def _attention_function(fit: Coefficients) -> Callable[..., tuple[Tensor, None]]:
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
        _refuse_what_no_mask_shows(module, others)
        layer: Any = getattr(module, "layer_idx", None)
        if of_layer and layer is None:
            raise CoefficientsError(
                f"{fit.reference} has entries per layer, and {type(module).__name__} has no "
                "layer_idx; register the fit of one layer: coefficients.layer(i)"
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # A query alone without a mask is the last one, and sees all; several are the first ones.
        causal = causal and attention_mask is None and query.shape[2] > 1
        if causal:
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
            if position_bias is not None:
                position_bias = position_bias[..., : query.shape[2]]
        out = scaled_dot_product_attention(
            query, key, value, _mask_and_bias(attention_mask, position_bias), dropout,
            causal, scaling, enable_gqa=True, logits_soft_cap=softcap,
            sinks=s_aux if sinks is None else sinks,
            coefficients=of_layer.get(layer, unnamed),
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    return attend


def _fits_of_layers(fit: Coefficients) -> dict[int, Coefficients]:
    """Those of the layers that it names; empty if all are alike."""
    return {entry.layer: fit.layer(entry.layer) for entry in fit.entries if entry.layer is not None}


def _refuse_what_no_mask_shows(module: Any, others: dict[str, Any]) -> None:
    name = module.config._attn_implementation
    if name not in AttentionMaskInterface._global_mapping:
        raise ValueError(
            f"attention is registered as {name!r}, and no mask function is: causality and padding "
            "would be lost; use calibrate.transformers.register"
        )
    for word in _UNSEEN:
        if others.get(word) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {word!r}, which calibrate.transformers does not "
                "apply; use the model without a fit"
            )


def _mask_and_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """One mask: bool, or a bias that is -inf where keys are masked.

    Additive masks hold the least number of their dtype where Transformers means "masked".
    """
    if mask is not None and mask.is_floating_point():
        mask = mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
        return mask if bias is None else mask + bias
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(
            f"attention_mask is {mask.dtype}; give bool, True for real keys, or floats"
        )
    if mask is None or bias is None:
        return bias if mask is None else mask
    return bias.masked_fill(~mask, -torch.inf)
