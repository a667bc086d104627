"""The table of architectures: what its entries say, and that a new one needs nothing else."""

import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from test_cli import refusal
from test_export import assert_alike, constants, export, logits, stock, under
from tiny_causal import SIZES
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    MistralConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from calibrate.core.rule import Rule
from calibrate.errors import CalibrateError
from calibrate.export.architectures import (
    ARCHITECTURES,
    Architecture,
    Layout,
    Norm,
    Projection,
    architecture_of,
    exported_architectures,
    require_supported,
)
from calibrate.export.refused_architectures import NOT_RUN, REFUSALS
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry
from calibrate.store.publishing import publish
from calibrate.transformers.loading_report import text_part

SOFT_CAP = "attn_logit_softcapping"
ONE_CONSTANT = Coefficients(Rule.log_size(0.1, 16.0), (Entry((0.0, 1.5), (0.0, 6.0)),), name="mine")


class MadeUpConfig(LlamaConfig):
    model_type = "made_up"


class MadeUpAttention(LlamaAttention):
    """Attention whose projection of queries has a name of its own."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.wq = self._modules.pop("q_proj")

    @property
    def q_proj(self):
        return self.wq


class MadeUpForCausalLM(LlamaForCausalLM):
    config_class = MadeUpConfig

    def __init__(self, config):
        super().__init__(config)
        for i, layer in enumerate(self.model.layers):
            layer.self_attn = MadeUpAttention(config, i)


@pytest.fixture
def made_up(here):
    """A tiny model in a folder, of a type that Transformers knows, and the table does not."""
    AutoConfig.register("made_up", MadeUpConfig)
    AutoModelForCausalLM.register(MadeUpConfig, MadeUpForCausalLM)
    AutoModelForCausalLM.from_config(MadeUpConfig(**SIZES)).save_pretrained("m")
    yield Path("m")
    del CONFIG_MAPPING._extra_content["made_up"]
    del MODEL_FOR_CAUSAL_LM_MAPPING._extra_content[MadeUpConfig]


def test_an_architecture_is_added_in_one_place(made_up, monkeypatch):
    command = ("export", "paper", "--model", made_up, "--out", "refused")
    assert "'made_up'" in refusal(*command)
    entry = Architecture("made_up", projections=(Projection("wq"),))
    monkeypatch.setitem(ARCHITECTURES, entry.model_type, entry)
    model = stock(made_up)
    plain, fit = logits(model), constants(model.config)
    exported = stock(export(fit, made_up))
    assert type(exported) is MadeUpForCausalLM
    assert_alike(under(fit, model), logits(exported), plain)


def test_keys_of_configurations_are_those_of_the_table():
    for architecture in exported_architectures():
        if architecture.model_type in CONFIG_MAPPING:
            config = CONFIG_MAPPING[architecture.model_type]()
            assert hasattr(config, SOFT_CAP) == (architecture.soft_cap == SOFT_CAP), architecture


@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_causal_type_is_exported_or_refused_with_its_reason(model_type):
    assert CONFIG_MAPPING[model_type].model_type in ARCHITECTURES


def default_config(model_type):
    """The default configuration of a type; None if it has none."""
    try:
        return CONFIG_MAPPING[model_type]()
    except (ValueError, StrictDataclassError):
        return None


UNLISTED = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - ARCHITECTURES)
ONE_MODEL = {"chameleon", "evolla", "idefics", "pi0", "udop", "vision-encoder-decoder"}


@pytest.mark.parametrize("model_type", UNLISTED)
def test_containers_that_are_not_listed_name_their_text_model(model_type):
    if (config := default_config(model_type)) is None or model_type in ONE_MODEL:
        assert model_type in ONE_MODEL
        return
    text_type = text_part(config).model_type
    with pytest.raises(CalibrateError, match=rf"'{config.model_type}'.* {text_type};"):
        require_supported(config)


def test_the_text_model_is_that_of_the_folder_and_not_the_default():
    text = MistralConfig(**SIZES)
    assert architecture_of(LlavaConfig(text_config=text)).refusal.endswith(" of type mistral")


DRAFTER = {
    "num_kv_shared_layers": 30,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
NEEDED = {
    "gemma4_assistant": {"text_config": DRAFTER},
    "gemma4_unified_assistant": {"text_config": DRAFTER},
}
REFUSED = [(x, reason) for reason, types in REFUSALS.items() for x in types.split()]


@pytest.mark.parametrize(("model_type", "reason"), REFUSED)
def test_the_command_names_the_reason_of_each_refused_type(model_type, reason, here):
    Path("m").mkdir()
    stored = {"model_type": model_type, **NEEDED.get(model_type, {})}
    Path("m/config.json").write_text(json.dumps(stored))
    save_file({"x": torch.ones(1)}, "m/model.safetensors")
    publish(ONE_CONSTANT, here / "fits")
    line = refusal("export", "mine", "--model", "m", "--out", "out")
    assert f"{model_type!r} cannot be exported: {reason}; " in line
    assert ("calibrate.transformers" in line) == (reason not in NOT_RUN)


def test_containers_name_the_type_of_their_text_model():
    named = {
        types: match[1]
        for reason, types in REFUSALS.items()
        if (match := re.search(r"its text model is of type (\S+)", reason))
    }
    assert len(named) > 10
    for container, text_type in named.items():
        if text := CONFIG_MAPPING[container].sub_configs.get("text_config"):
            actual = CONFIG_MAPPING[container]().text_config if text is AutoConfig else text
            assert actual.model_type == text_type, container


def test_refused_types_have_no_engines_and_graphs_have_a_test():
    for architecture in ARCHITECTURES.values():
        assert not (architecture.refusal and architecture.gguf), architecture
    graphs = {x.gguf.name for x in exported_architectures() if x.gguf}
    run = {x.gguf.name for x in exported_architectures() if "llama.cpp" in x.engines}
    assert graphs == run


LAYOUTS = {
    Layout.SEPARATE: [],
    Layout.QUERIES_FIRST: ["fused: queries first"],
    Layout.INTERLEAVED: ["fused: by head"],
}


def module_text(module):
    """A norm or a projection as the guide names it."""
    if isinstance(module, Norm):
        return f"norm `{module.module}`" + (" (1 + weight)" if module.base else "")
    notes = list(LAYOUTS[module.layout])
    if module.is_transposed:
        notes.append("in columns")
    if module.interleaved_without:
        notes.append(f"by head without `{module.interleaved_without}`")
    return f"`{module.module}`" + (f" ({', '.join(notes)})" if notes else "")


def columns(architecture):
    """The columns of an architecture in the guide, after its type."""
    beside = [architecture.sinks, architecture.soft_cap]
    return (
        ", else ".join(map(module_text, architecture.query_modules())),
        ", ".join(f"`{name}`" for name in beside if name),
        f"`{architecture.gguf.name}`" if architecture.gguf else "",
        ", ".join(architecture.engines),
    )


def rows(columns_of):
    """The types of the table with their columns, types of the same columns in one row."""
    types = {}
    for architecture in ARCHITECTURES.values():
        if row := columns_of(architecture):
            types.setdefault(row, []).append(f"`{architecture.model_type}`")
    return ["| " + " | ".join([", ".join(names), *row]) + " |" for row, names in types.items()]


def test_the_guide_lists_every_architecture():
    guide = (Path(__file__).parents[1] / "fits" / "serving.md").read_text(encoding="utf-8")
    section = guide.split("\n## Architectures\n")[1].split("\n## ")[0]
    exported = rows(lambda x: () if x.refusal else columns(x))
    refused = rows(lambda x: (x.refusal,) if x.refusal else ())
    listed = [line for line in section.splitlines() if line.startswith("| `")]
    assert listed == exported + refused, "\n".join(["expected:", *exported, *refused])
