"""The configuration of an exported model: what engines read beside the weights.

Constants leave it as it is, but for a soft-cap of logits, cap tanh(z / cap): scaled with beta, it
gives beta z too. For rules by size, a Llama or Mistral becomes a Ministral 3: the same mathematics,
and queries times 1 + ratio log(1 + floor(position / 1)), where 1 + position is n. Transformers,
Ollama and MLX read the ratio in `rope_parameters`, vLLM in `llama_4_scaling`, SGLang looks for the
floor at the top.
"""

import re
from dataclasses import fields
from typing import Any

import transformers
from transformers import Ministral3Config

from calibrate.errors import CalibrateError
from calibrate.export.architectures import architecture_of
from calibrate.export.plan import FIT_CONSTANTS, ExportPlan
from calibrate.store.carried_fit import KEY, require_original
from calibrate.transformers.folders import ModelFolder

FIT = "calibrate-fit.json"  # in an exported folder
_PLAIN_ROPE = ("default", "linear")  # others read the floor as the length of pretraining


def require_original_folder(folder: ModelFolder) -> None:
    """Raises CoefficientsError for a model that carries a fit already.

    By its configuration, which Transformers keeps when it saves the model again, or by FIT.
    """
    require_original(folder.path, getattr(folder.config, KEY, None))
    if (folder.path / FIT).exists():
        require_original(folder.path, {"fit": f"in its {FIT}"})


def soft_cap(config: Any) -> tuple[str, float] | None:
    """The cap of logits before softmax, behind its key in config.json; None if there is none."""
    key = architecture_of(config).soft_cap
    cap = getattr(config, key, None) if key else None
    return (key, cap) if key and cap else None


def exported_configuration(stored: dict[str, Any], config: Any, plan: ExportPlan) -> dict[str, Any]:
    """The content of config.json of an exported model.

    Args:
      stored: that of the model.
      config: the same, as Transformers reads it.
    Raises:
      CalibrateError: an engine could not apply the plan exactly to such a model.
    """
    if getattr(config, "clip_qkv", None):
        raise CalibrateError(
            f"clip_qkv is {config.clip_qkv}: the model clips queries after their projection, so "
            "that scaled weights would not give scaled queries; no fit can be exported for it"
        )
    exported = {key: value for key, value in stored.items() if key != "auto_map"}  # code
    if capped := soft_cap(config):
        key, cap = capped
        factor, *others = sorted(set(plan.factors.values()))
        if others:
            raise CalibrateError(
                f"{key} is {cap}: the model caps its logits before softmax, with one cap for all "
                f"heads, and the factors of this fit are {factor:.4g} to {others[-1]:.4g}; fit one "
                f"constant for all heads: {FIT_CONSTANTS}"
            )
        exported[key] = cap * factor
    return _as_ministral(exported, config, plan.ratio) if plan.ratio else exported


def _as_ministral(exported: dict[str, Any], config: Any, ratio: float) -> dict[str, Any]:
    if difference := unlike_ministral(config):
        raise CalibrateError(
            "the fit goes by log n, which engines apply in models like Ministral 3, and this "
            f"model cannot become one: {difference}; export a fit of constants: {FIT_CONSTANTS}"
        )
    rope = dict(config.rope_parameters or {})
    floor = {"original_max_position_embeddings": 1}
    # What a file leaves out has other values in a Ministral 3.
    own = [f.name for f in fields(Ministral3Config) if f.name in Ministral3Config.__annotations__]
    known = {name: getattr(config, name) for name in own if hasattr(config, name)}
    exported = {key: value for key, value in exported.items() if key != "rope_scaling"}
    ministral = {
        "model_type": "ministral3",
        "architectures": _classes_of_ministral(config),
        "sliding_window": getattr(config, "sliding_window", None),
        "rope_parameters": rope | floor | {"llama_4_scaling_beta": ratio},
        "llama_4_scaling": floor | {"beta": ratio},
    }
    return exported | known | floor | ministral


def _classes_of_ministral(config: Any) -> list[str]:
    """The classes of a Ministral 3 in place of those of a Llama or a Mistral."""
    names = map(str, getattr(config, "architectures", None) or ["LlamaForCausalLM"])
    return [re.sub("^(Llama|Mistral)(?=[A-Z])", "Ministral3", name) for name in names]


def unlike_ministral(config: Any) -> str | None:
    """Why a Ministral 3 with the same weights is not the same model; None if it is."""
    architecture = architecture_of(config)
    if not architecture.becomes_ministral:
        return f"it is a {architecture.model_type}, and not a Llama or a Mistral"
    for name in _classes_of_ministral(config):
        if not (name.startswith("Ministral3") and hasattr(transformers, name)):
            return f"Transformers has no {name}"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "its projections have biases"
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in _PLAIN_ROPE:
        return f"its rotary positions are of type {rope_type!r}"
    window = getattr(config, "sliding_window", None)
    if window and window < config.max_position_embeddings:
        return f"its queries see the last {window:,} tokens, and engines would take all for n"
    return None
