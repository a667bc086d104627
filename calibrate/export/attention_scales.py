"""Attention scales that an engine may apply to a model instead of those of its config.json.

A scale is an array of factors of the queries, relative to the model as its configuration states it:
(heads, n) or a shape that broadcasts to it, for n = 1, 2, ... tokens so far. Its name says what an
engine does with a key of the configuration.

An ignored soft-cap or sliding window is no such factor: the model itself is changed for a while.
YaRN and LongRoPE multiply queries and keys by their attention factor a, and so logits by a^2. In a
model that rotates only a part of each head, a is no factor of the logits, and has no name here.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from calibrate.export.architectures import SOFT_CAP
from calibrate.transformers.betas import HeadBetas
from calibrate.transformers.verification import layer_number

_ROTARY_NAMES = {"yarn": "YaRN", "longrope": "LongRoPE"}
# Keys that set the scale of the logits, instead of 1 / sqrt(head_dim).
_SCALING_KEYS = (
    "query_pre_attn_scalar",
    "attention_multiplier",
    "mscale_all_dim",
)
_WINDOW_KEY = "sliding_window"
_NO_WINDOW = 1 << 30


def named_scales(config: Any, heads: HeadBetas, n: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the scales by which an engine can misread a model's configuration, by name."""
    config = config.get_text_config()
    layers = [layer for layer, _ in heads.heads]
    return (
        _rotary_scales(config, layers)
        | _constant_scales(config, heads, layers)
        | _position_scales(config, n)
    )


def _rotary_parameters(config: PreTrainedConfig) -> dict[str | None, dict[str, Any]]:
    """Returns the parameters of rotary positions by layer type; None stands for all layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = {key: x for key, x in parameters.items() if isinstance(x, dict)}
    return {**nested} if nested else {None: parameters}


def _rotary_scales(config: PreTrainedConfig, layers: list[int]) -> dict[str, np.ndarray]:
    """Returns the scales of engines that misread the attention factor of YaRN or LongRoPE."""
    scales = dict[str, np.ndarray]()
    for layer_type, parameters in _rotary_parameters(config).items():
        kind = parameters.get("rope_type")
        is_partial = parameters.get("partial_rotary_factor", 1.0) != 1.0
        if kind not in _ROTARY_NAMES or is_partial or hasattr(config, "qk_rope_head_dim"):
            continue
        _, a = ROPE_INIT_FUNCTIONS[kind](config, layer_type=layer_type)
        name = f"{_ROTARY_NAMES[kind]}'s attention factor"
        factors = {
            f"without {name}": a**-2,
            f"{name} applied twice": a**2,
            f"{name} on queries alone": 1 / a,
            f"{name} logged twice": ((0.1 * math.log(a) + 1) / a) ** 2,
        }
        if kind == "yarn":
            default = 0.1 * math.log(max(parameters["factor"], 1)) + 1
            factors[f"{name} as 0.1 log(factor) + 1"] = (default / a) ** 2
        in_type = [layer_type in (None, _layer_type(config, layer)) for layer in layers]
        for scale_name, factor in factors.items():
            if not math.isclose(factor, 1, rel_tol=1e-6):
                scales[scale_name] = np.where(in_type, factor, 1.0)[:, None]
    return scales


def _layer_type(config: PreTrainedConfig, layer: int) -> str | None:
    types = getattr(config, "layer_types", None) or ()
    return types[layer] if layer < len(types) else None


def _constant_scales(
    config: PreTrainedConfig, heads: HeadBetas, layers: list[int]
) -> dict[str, np.ndarray]:
    """Returns the scale 1 / sqrt(head_dim) instead of a constant that the configuration sets."""
    (rotary, *_) = _rotary_parameters(config).values()
    key = next((x for x in _SCALING_KEYS if getattr(config, x, None) or rotary.get(x)), None)
    factors = {
        layer: width**-0.5 / scaling for layer, (width, scaling) in _layer_scaling(heads).items()
    }
    if key is None or all(math.isclose(x, 1, rel_tol=1e-6) for x in factors.values()):
        return {}
    return {f"{key} ignored, 1 / sqrt(head_dim)": _scale_of_layers(factors, layers)}


def _position_scales(config: PreTrainedConfig, n: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the scale without Llama 4's factor, which grows with the position of a query."""
    (rotary, *_) = _rotary_parameters(config).values()
    beta, start = rotary.get("llama_4_scaling_beta"), rotary.get("original_max_position_embeddings")
    if not (beta and start):
        return {}
    factors = 1 / (1 + beta * np.log1p(np.floor((n - 1) / start)))
    return {"llama_4_scaling_beta unread": factors[None]}


def usual_scales(heads: HeadBetas) -> dict[str, np.ndarray]:
    """Returns the scales that an engine can get wrong for any configuration, by name."""
    layers, scaling = [layer for layer, _ in heads.heads], _layer_scaling(heads)
    factors = {
        "1 / sqrt(head_dim) applied once more": {i: w**-0.5 for i, (w, _) in scaling.items()},
        "no attention scale": {i: 1 / scale for i, (_, scale) in scaling.items()},
    }
    return {
        name: _scale_of_layers(by_layer, layers)
        for name, by_layer in factors.items()
        if {*by_layer.values()} - {1.0}
    }


def _layer_scaling(heads: HeadBetas) -> dict[int, tuple[int, float]]:
    """Returns head_dim and the scale of the logits of each layer whose module names them."""
    scaling_of_layer = dict[int, tuple[int, float]]()
    for module in heads.columns:
        width = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
        scaling = getattr(module, "scaling", None)
        if isinstance(width, int) and isinstance(scaling, float) and scaling > 0:
            scaling_of_layer[layer_number(module)] = (width, scaling)
    return scaling_of_layer


def _scale_of_layers(factors: dict[int, float], layers: list[int]) -> np.ndarray:
    """Returns (heads, 1): the factor of each head's layer, 1 for layers that have none."""
    return np.array([factors.get(layer, 1.0) for layer in layers])[:, None]


def ignored_keys(model: Any, heads: HeadBetas) -> dict[str, AbstractContextManager[None]]:
    """Returns contexts in which a model ignores its soft-cap or sliding window, by name."""
    config, contexts = model.config.get_text_config(), dict[str, AbstractContextManager[None]]()
    if getattr(config, SOFT_CAP, None):
        capped = [x for x in heads.columns if hasattr(x, SOFT_CAP)]
        contexts[f"{SOFT_CAP} ignored"] = _with_attribute(capped, SOFT_CAP, None)
    if getattr(config, _WINDOW_KEY, None):
        windowed = [x for x in heads.columns if getattr(x, _WINDOW_KEY, None)]
        changed = _with_attribute([config, *windowed], _WINDOW_KEY, _NO_WINDOW)
        contexts[f"{_WINDOW_KEY} ignored"] = changed
    return contexts


@contextmanager
def _with_attribute(objects: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of objects until the block ends."""
    before = [(x, getattr(x, name)) for x in objects]
    for x, _ in before:
        setattr(x, name, value)
    try:
        yield
    finally:
        for x, old in before:
            setattr(x, name, old)
