"""Attention scales that an engine may apply to a stock model in place of those of its config.json.

A scale is named by what an engine does with a key of the configuration, or has parameters to
estimate. Both are factors of the queries relative to the model as stated, by layer and n, the
tokens so far. A dropped soft-cap or sliding window is no factor: the model itself is changed for a
while. YaRN and LongRoPE multiply queries and keys by their attention factor a, so logits by
a^2; where only a part of a head is rotated, that is no factor of logits, and no name is given.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from calibrate.transformers.betas import HeadBetas
from calibrate.transformers.verification import layer_of

# The factors of a layer's queries: (n_queries,), or one number for all.
Scale = Callable[[int, np.ndarray], Any]

PROBE_FACTOR = 1.25
_ROTARY = {"yarn": "YaRN", "longrope": "LongRoPE"}
_MIN_FACTOR = 0.01
# Where searches begin beside 1 and 0.
_FAR_FACTORS = (1 / 8, 1 / 3, 3.0, 8.0)
_FAR_SLOPES = (-0.1, 0.3, 1.0)
# Keys that set the scaling of attention in place of 1 / sqrt(head_dim).
_SCALING_KEYS = (
    "query_pre_attn_scalar",
    "attention_multiplier",
    "mscale_all_dim",
    "scale_attn_by_inverse_layer_idx",
)
_UNSCALED_KEY = "scale_attn_weights"  # of GPT-2; false: logits are not scaled
_SOFT_CAP_KEY = "attn_logit_softcapping"
_WINDOW_KEY = "sliding_window"
_NO_WINDOW = 1 << 30


@dataclass(frozen=True)
class ScaleFamily:
    """Scales with parameters, which are 0 for the model as stated."""

    name: str
    parameters: tuple[str, ...]
    scale: Callable[[np.ndarray], Scale]
    value: Callable[[float], float]  # of a parameter, as people read it
    slope: Callable[[float], float]  # of that value
    step: float  # of a finite difference
    limit: float  # to a step of an estimate
    starts: tuple[tuple[float, ...], ...]  # beside 0: where a search may begin


def named_scales(config: PreTrainedConfig, heads: HeadBetas) -> dict[str, Scale]:
    """The scales that a model's configuration lets an engine get wrong, by name."""
    config = config.get_text_config()
    return _of_rotary(config) | _of_constant(config, heads) | _of_position(config)


def _rotary_by_type(config: PreTrainedConfig) -> dict[str | None, dict[str, Any]]:
    """The parameters of rotary positions by the type of layers; None: of all layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = {key: x for key, x in parameters.items() if isinstance(x, dict)}
    return {**nested} if nested else {None: parameters}


def _of_rotary(config: PreTrainedConfig) -> dict[str, Scale]:
    """Scales of an attention factor of YaRN or LongRoPE."""
    scales = dict[str, Scale]()
    for layer_type, parameters in _rotary_by_type(config).items():
        kind = parameters.get("rope_type")
        partial = parameters.get("partial_rotary_factor", 1.0) != 1.0
        if kind not in _ROTARY or partial or hasattr(config, "qk_rope_head_dim"):
            continue
        _, a = ROPE_INIT_FUNCTIONS[kind](config, layer_type=layer_type)
        name = f"{_ROTARY[kind]}'s attention factor"
        logit_factors = {
            f"without {name}": a**-2,
            f"{name} applied twice": a**2,
            f"{name} on queries alone": 1 / a,
            f"{name} logged twice": ((0.1 * math.log(a) + 1) / a) ** 2,
        }
        if kind == "yarn":
            default = 0.1 * math.log(max(parameters["factor"], 1)) + 1
            logit_factors[f"{name} as 0.1 log(factor) + 1"] = (default / a) ** 2
        for scale_name, factor in logit_factors.items():
            if not math.isclose(factor, 1, rel_tol=1e-6):
                scales[scale_name] = _of_type(config, layer_type, factor)
    return scales


def _of_type(config: PreTrainedConfig, layer_type: str | None, factor: float) -> Scale:
    """A factor of the layers of one type; None: of all layers."""

    def scale(layer: int, n: np.ndarray) -> float:
        return factor if layer_type in (None, _layer_type(config, layer)) else 1.0

    return scale


def _layer_type(config: PreTrainedConfig, layer: int) -> str | None:
    types: Sequence[str] = getattr(config, "layer_types", None) or ()
    return types[layer] if layer < len(types) else None


def _of_constant(config: PreTrainedConfig, heads: HeadBetas) -> dict[str, Scale]:
    """1 / sqrt(head_dim) in place of a constant that the configuration sets."""
    (rotary, *_) = _rotary_by_type(config).values()
    key = next((x for x in _SCALING_KEYS if getattr(config, x, None) or rotary.get(x)), None)
    if getattr(config, _UNSCALED_KEY, True) is False:
        key = _UNSCALED_KEY
    factors = {
        layer: width**-0.5 / scaling for layer, (width, scaling) in _scaling_of(heads).items()
    }
    if key is None or all(math.isclose(x, 1, rel_tol=1e-6) for x in factors.values()):
        return {}
    return {f"{key} ignored, 1 / sqrt(head_dim)": lambda layer, n: factors.get(layer, 1.0)}


def _scaling_of(heads: HeadBetas) -> dict[int, tuple[int, float]]:
    """head_dim and the factor of logits of each layer whose module names them."""
    scaling_of = dict[int, tuple[int, float]]()
    for module in heads.columns:
        width = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
        scaling = getattr(module, "scaling", None)
        if isinstance(width, int) and isinstance(scaling, float) and scaling > 0:
            scaling_of[layer_of(module)] = (width, scaling)
    return scaling_of


def usual_scales(heads: HeadBetas) -> dict[str, Scale]:
    """Scales that an engine may get wrong for any configuration, by name."""
    scaling_of = _scaling_of(heads)
    once_more = {layer: width**-0.5 for layer, (width, _) in scaling_of.items()}
    without = {layer: 1 / scaling for layer, (_, scaling) in scaling_of.items()}
    factors_of = {"1 / sqrt(head_dim) applied once more": once_more, "no attention scale": without}
    return {name: _of_layers(x) for name, x in factors_of.items() if {*x.values()} - {1.0}}


def _of_layers(factors: dict[int, float]) -> Scale:
    return lambda layer, n: factors.get(layer, 1.0)


def ignored_keys(model: Any, heads: HeadBetas) -> dict[str, AbstractContextManager[None]]:
    """Changes of a model for an engine that ignores its soft-cap or its sliding window, by name."""
    config, changes = model.config.get_text_config(), dict[str, AbstractContextManager[None]]()
    if getattr(config, _SOFT_CAP_KEY, None):
        capped = [x for x in heads.columns if hasattr(x, _SOFT_CAP_KEY)]
        changes[f"{_SOFT_CAP_KEY} ignored"] = _with_attribute(capped, _SOFT_CAP_KEY, None)
    if getattr(config, _WINDOW_KEY, None):
        windowed = [x for x in heads.columns if getattr(x, _WINDOW_KEY, None)]
        changed = _with_attribute([config, *windowed], _WINDOW_KEY, _NO_WINDOW)
        changes[f"{_WINDOW_KEY} ignored"] = changed
    return changes


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


def _of_position(config: PreTrainedConfig) -> dict[str, Scale]:
    """Queries without the factor that grows with their position."""
    (rotary, *_) = _rotary_by_type(config).values()
    beta, start = rotary.get("llama_4_scaling_beta"), rotary.get("original_max_position_embeddings")
    if not (beta and start):
        return {}
    return {
        "llama_4_scaling_beta unread": lambda layer, n: (
            1 / (1 + beta * np.log1p(np.floor((n - 1) / start)))
        )
    }


def scale_families(config: PreTrainedConfig) -> list[ScaleFamily]:
    """The scales to estimate: one factor, one by position, and one for each type of layers."""
    config = config.get_text_config()
    types = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    h = math.log(PROBE_FACTOR)

    def of_all(x: np.ndarray) -> Scale:
        return lambda layer, n: math.exp(x[0])

    def of_position(x: np.ndarray) -> Scale:
        return lambda layer, n: np.maximum(1 + x[0] * np.log(n), _MIN_FACTOR)

    def of_types(x: np.ndarray) -> Scale:
        def scale(layer: int, n: np.ndarray) -> float:
            layer_type = _layer_type(config, layer)
            return 1.0 if layer_type is None else math.exp(x[types.index(layer_type)])

        return scale

    far = [math.log(factor) for factor in _FAR_FACTORS]
    one = tuple((x,) for x in far)
    name, slopes = "a factor 1 + r log n", tuple((r,) for r in _FAR_SLOPES)
    families = [
        ScaleFamily(
            "one factor for all layers", ("factor",), of_all, math.exp, math.exp, h, 1.0, one
        ),
        ScaleFamily(name, ("r",), of_position, float, lambda _: 1.0, 0.02, 0.1, slopes),
    ]
    if len(types) > 1:
        name = "a factor for each type of layers"
        some = [x for x in np.ndindex(*[2] * len(types)) if any(x)]
        starts = tuple(tuple(log * i for i in x) for x in some for log in (far[1], far[-2]))
        families.append(ScaleFamily(name, types, of_types, math.exp, math.exp, h, 1.0, starts))
    return families
