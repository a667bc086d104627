"""The config.json of an exported model.

A fit of constants leaves it as it is, with one exception: a soft-cap of the logits,
cap tanh(z / cap), is multiplied by beta like the queries, which gives beta times the capped logits.

For a rule of log n, a Llama or Mistral becomes a Ministral 3. This is the same model, with queries
multiplied by 1 + ratio log(1 + floor(position / 1)), where 1 + position is n. Transformers, Ollama
and MLX read the ratio in `rope_parameters`, vLLM in `llama_4_scaling`; SGLang reads the 1 that
divides positions at the top level.
"""

from dataclasses import fields
from typing import Any

from transformers import Ministral3Config

from calibrate.errors import CalibrateError
from calibrate.export.architectures import SOFT_CAP, architecture_of
from calibrate.export.plan import FIT_CONSTANTS, ExportPlan
from calibrate.store.coefficient_file import MODEL_KEY, require_original
from calibrate.transformers.folders import ModelFolder

FIT_FILE = "calibrate-fit.json"  # in an exported folder
_EXACT_ROPE = ("default", "linear")  # other types use the divisor as the length of pretraining
_CAUSAL_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM")
_DIVISOR = {"original_max_position_embeddings": 1}


def require_original_folder(folder: ModelFolder) -> None:
    """Raises CoefficientsError for a model that carries a fit already.

    Its configuration says so, also after Transformers has saved the model again, or a FIT_FILE.
    """
    require_original(folder.path, getattr(folder.config, MODEL_KEY, None))
    if (folder.path / FIT_FILE).exists():
        require_original(folder.path, {"fit": f"in its {FIT_FILE}"})


def soft_cap(config: Any) -> float | None:
    """Returns the cap of the logits; None if the model has none."""
    return getattr(config, SOFT_CAP, None) or None


def exported_configuration(stored: dict[str, Any], config: Any, plan: ExportPlan) -> dict[str, Any]:
    """Returns the content of config.json of an exported model.

    Args:
      stored: content of the model's config.json.
      config: the same, as Transformers reads it.
    Raises:
      CalibrateError: engines could not apply the plan exactly to such a model.
    """
    if getattr(config, "clip_qkv", None):
        raise CalibrateError(
            f"clip_qkv is {config.clip_qkv}: the model clips queries after their projection, so "
            "that scaled weights would not give scaled queries; no fit can be exported for it"
        )
    exported = {key: value for key, value in stored.items() if key != "auto_map"}  # names code
    if cap := soft_cap(config):
        factor, *others = sorted(set(plan.factors.values()))
        if others:
            raise CalibrateError(
                f"{SOFT_CAP} is {cap}: the model caps its logits before softmax, with one cap for "
                f"all heads, and the factors of this fit are {factor:.4g} to {others[-1]:.4g}; fit "
                f"one constant for all heads: {FIT_CONSTANTS}"
            )
        exported[SOFT_CAP] = cap * factor
    return _ministral_configuration(exported, config, plan.ratio) if plan.ratio else exported


def _ministral_configuration(exported: dict[str, Any], config: Any, ratio: float) -> dict[str, Any]:
    """Returns the configuration of the Ministral 3 that multiplies queries by 1 + ratio log n."""
    if difference := unlike_ministral(config):
        raise CalibrateError(
            "the fit goes by log n, which engines apply in models like Ministral 3, and this "
            f"model cannot become one: {difference}; export a fit of constants: {FIT_CONSTANTS}"
        )
    rope = dict(config.rope_parameters or {})
    # Keys that the file leaves out have other defaults in a Ministral 3, so all are written.
    names = [f.name for f in fields(Ministral3Config) if f.name in Ministral3Config.__annotations__]
    known = {name: getattr(config, name) for name in names if hasattr(config, name)}
    exported = {key: value for key, value in exported.items() if key != "rope_scaling"}
    ministral = {
        "model_type": "ministral3",
        "architectures": ["Ministral3ForCausalLM"],
        "sliding_window": getattr(config, "sliding_window", None),
        "rope_parameters": rope | _DIVISOR | {"llama_4_scaling_beta": ratio},
        "llama_4_scaling": _DIVISOR | {"beta": ratio},
    }
    return exported | known | _DIVISOR | ministral


def unlike_ministral(config: Any) -> str | None:
    """Returns why a Ministral 3 with the same weights is another model; None if it is the same."""
    architecture = architecture_of(config)
    if not architecture.becomes_ministral:
        return f"it is a {architecture.model_type}, and not a Llama or a Mistral"
    for name in getattr(config, "architectures", None) or ():
        if name not in _CAUSAL_CLASSES:
            return f"its class is {name}"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "its projections have biases"
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in _EXACT_ROPE:
        return f"its rotary positions are of type {rope_type!r}"
    window = getattr(config, "sliding_window", None)
    if window and window < config.max_position_embeddings:
        return f"its queries see the last {window:,} tokens, and engines would take all for n"
    return None
