"""Tiny random models of Transformers' classes, and inputs that they run on; made without network.

A configuration's sizes are recognised by their names and made small, in nested ones too; what this
does not suit is left out of the lists of tests/test_transformers_classes.py.
"""

import inspect
import re

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

# The first pattern that fits a name gives the most that its number may be.
LARGEST = {
    r"\w*rotary_dim": 4,
    r"\w*(intermediate|ffn|feedforward|feed_forward|mlp)_?(size|dim|hidden_size)\w*": 48,
    r"d_ff|d_inner|n_inner|\w*_ff": 48,
    r"(\w*_)?(num|n)_(hidden_|encoder_|decoder_|text_|vision_)?(layers?|blocks)": 2,
    r"\w*(encoder|decoder)_layers?|(\w*_)?depth": 2,
    r"(\w*_)?(num|n)_(key_value|kv)_heads?": 2,
    r"(\w*_)?(attention|num|n)_(attention_)?heads?": 4,
    r"\w*head_dim|d_kv|kv_channels|\w*head_size": 8,
    r"dim|width|d_model|n_embd|\w*_dim|\w*(hidden|embedding|feature|conv|output|input)_size": 32,
    r"\w*vocab_size": 99,
    r"n_positions|\w*max_(position_embeddings|(source|target|text|audio)_positions)": 128,
    r"image_size": 32,
    r"patch_size": 8,
    r"\w*(num|n)_\w*experts": 4,
    r"num_experts_per_tok|\w*top_?k\w*": 2,
    r"\w*(num_queries|num_query_tokens|num_latents)": 8,
}  # fmt: skip
LARGEST_OF_EACH = {
    r"\w*(depths|layers_per|num_layers|num_blocks)\w*": 1, r"\w*heads\w*": 2,
    r"\w*(sizes|dims?|channels)": 32, "image_size": 32, "patch_size": 8,
}  # fmt: skip
IDS = torch.randint(10, 90, (2, 20), generator=torch.manual_seed(1))
PADDED = torch.ones(2, 20, dtype=torch.long)
PADDED[0, 14:] = 0
# Spectrograms: channels and frames, or frames and channels.
FEATURES = ((80, 256), (128, 256), (60, 80), (60, 160), (60, 32), (32, 20))


def tiny_albert(**changes):
    """Layers that share one module, with attention whose weights are told."""
    config = transformers.AlbertConfig(
        embedding_size=16, hidden_size=32, intermediate_size=32, **changes
    )
    torch.manual_seed(0)
    model = transformers.AlbertModel(config).eval()
    model.set_attn_implementation("eager")
    return model


def _is_whole(x):
    return isinstance(x, int) and not isinstance(x, bool)


def _smaller(name, value):
    """The number, or the list of numbers, made small."""
    if _is_whole(value):
        bounds = (bound for pattern, bound in LARGEST.items() if re.fullmatch(pattern, name))
        return min(value, next(bounds, value))
    if isinstance(value, list | tuple) and value and all(map(_is_whole, value)):
        bounds = (b for pattern, b in LARGEST_OF_EACH.items() if re.fullmatch(pattern, name))
        bound = next(bounds, max(value))
        return [min(x, bound) for x in value]
    if isinstance(value, dict) and "mrope_section" in value:
        return value | {"mrope_section": [2, 1, 1]}  # they sum to half a head's width
    return value


def tiny_configuration(kind):
    """One with two layers, four heads, and about 32 channels."""
    default, changes = kind(), {}
    inner = getattr(kind, "sub_configs", {})
    for name, value in default.to_dict().items():
        of_part = type(getattr(default, name, None))
        if name in inner and of_part not in (type(None), transformers.PreTrainedConfig):
            changes[name] = tiny_configuration(of_part)
        elif name in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            changes[name] = (list(dict.fromkeys(value)) + value)[:2]  # two kinds, if there are
        elif name not in inner and (small := _smaller(name, value)) != value:
            changes[name] = small
    numbers = default.to_dict()
    if numbers.get("num_key_value_heads") == numbers.get("num_attention_heads") is not None:
        changes["num_key_value_heads"] = changes.get("num_attention_heads")
    changes |= {name: 0.3 for name in ("initializer_range", "init_std") if hasattr(default, name)}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return kind(**changes | {name: i for name, i in ends.items() if hasattr(default, name)})


def tiny_model(model_type):
    """The base model of a type, with random weights everywhere, for evaluation."""
    name = MODEL_MAPPING_NAMES[model_type]
    kind = getattr(transformers, name if isinstance(name, str) else name[0])
    config = tiny_configuration(CONFIG_MAPPING[model_type])
    with torch.device("meta"):
        size = sum(x.numel() for x in kind(config).parameters())
    assert size < 20_000_000, f"{model_type} has {size:,} parameters"
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for x in model.parameters():  # what starts as zeros would hide whether attention matters
            x += 0.05 * torch.randn_like(x)
    model.set_attn_implementation("eager")
    return model


def _images(config):
    for part in (config, getattr(config, "vision_config", None)):
        if side := getattr(part, "image_size", None):
            return torch.randn(2, getattr(part, "num_channels", 3), *(
                (side, side) if isinstance(side, int) else side
            ))  # fmt: skip
    return torch.randn(2, getattr(config, "num_channels", 3), 32, 32)


def possible_inputs(model):
    """Inputs that the model may run on, the likeliest first."""
    torch.manual_seed(0)
    names, main = inspect.signature(model.forward).parameters, model.main_input_name
    more = {"decoder_input_ids": IDS[:, :9]} if "decoder_input_ids" in names else {}
    mask = {"attention_mask": PADDED} if "attention_mask" in names else {}
    if "input_ids" in names:
        text = {"input_ids": IDS} | more
        if "pixel_values" in names:
            yield text | mask | {"pixel_values": _images(model.config)}
        yield text | mask
        yield text
    if "pixel_values" in names:
        yield {"pixel_values": _images(model.config)} | more
        for shape in ((2, 3, 128, 128), (2, 4, 3, 32, 32)):
            yield {"pixel_values": torch.randn(shape)} | more
    if main == "pixel_values_videos":
        yield {main: torch.randn(1, 16, 3, 32, 32)}
    if main == "input_values":
        for shape in ((2, 4000), (2, 16000), (2, 1, 4000), (2, 128, 128)):
            yield {main: torch.randn(shape)} | more
    if main in ("input_features", "inputs_embeds", "hidden_states"):
        for shape in FEATURES:
            yield {main: torch.randn(2, *shape)} | more
