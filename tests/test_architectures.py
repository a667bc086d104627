"""The table of architectures: what its entries say, and the guides that list them."""

import json
from pathlib import Path

import pytest
import torch
from commands import refusal
from guides import FOLDER, ROOT, section
from safetensors.torch import save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from calibrate.core.rule import RuleForm
from calibrate.export.architectures import (
    ARCHITECTURES,
    SOFT_CAP,
    Layout,
    Norm,
)
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit
from calibrate.store.saving import save_to_store

ONE_CONSTANT = Fit(RuleForm.constant(0.1, 16.0), (Entry((1.5,)),), name="mine")


@pytest.mark.parametrize(
    "model_type",
    [
        "bloom",  # a bias by position
        "gemma3",  # several models in one
        "llama4_text",  # a norm of queries without weights
        "mamba",  # no attention
    ],
)
def test_a_type_that_is_not_in_the_table_is_refused(model_type, here):
    Path("m").mkdir()
    Path("m/config.json").write_text(json.dumps({"model_type": model_type}))
    save_file({"x": torch.ones(1)}, "m/model.safetensors")
    save_to_store(ONE_CONSTANT, here / "fits")
    line = refusal("export", "mine", "--model", "m", "--out", "out")
    assert repr(model_type) in line
    assert "table of architectures" in line
    assert not Path("out").exists()


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
    return f"`{module.module}`" + (f" ({', '.join(notes)})" if notes else "")


def columns(architecture):
    """The columns of an architecture in the guide, after its type."""
    queries = ", else ".join(map(module_text, architecture.query_modules()))
    kind = architecture.model_type
    config = CONFIG_MAPPING[kind]() if kind in CONFIG_MAPPING else None
    cap = SOFT_CAP if hasattr(config, SOFT_CAP) else None
    beside = [f"`{name}`" for name in (architecture.sinks, cap) if name]
    gguf = f"`{architecture.gguf}`" if architecture.gguf else ""
    return "; and ".join([queries, *beside]), gguf


def rows():
    """The types of the table with their columns, types of the same columns in one row."""
    types = {}
    for name, architecture in sorted(ARCHITECTURES.items()):
        types.setdefault(columns(architecture), []).append(f"`{name}`")
    return ["| " + " | ".join([", ".join(names), *row]) + " |" for row, names in types.items()]


def test_the_guide_lists_every_architecture():
    guide = (ROOT / FOLDER / "architectures.md").read_text(encoding="utf-8")
    listed = [line for line in guide.splitlines() if line.startswith("| `")]
    assert listed == rows(), "\n".join(["expected:", *rows()])


SERVED = {
    "Llama, SmolLM2": "llama",
    "Mistral": "mistral",
    "Qwen2, Qwen2.5": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3 MoE, Qwen3-Next, Qwen3.5 (text)": "qwen3_moe qwen3_next qwen3_5_text",
    "Gemma 3 (text)": "gemma3_text",
    "Gemma 2": "gemma2",
    "Phi-3, Granite": "phi3 granite",
    "OLMo 2": "olmo2",
    "Mixtral, DeepSeek V2 and V3": "mixtral deepseek_v2 deepseek_v3",
    "gpt-oss": "gpt_oss",
}


def test_the_guide_answers_which_model_runs_where():
    page = section("serving.md", "Which model, which way, which engine?")
    lines = page.strip().split("\n\n")[1].splitlines()[2:-1]
    rows = {name: cells for name, *cells in (line.strip("| ").split(" | ") for line in lines)}
    assert [*rows] == [*SERVED]
    for name, (folder, gguf, lora, rules) in rows.items():
        for model_type in SERVED[name].split():
            architecture = ARCHITECTURES[model_type]
            assert folder == "yes"
            assert gguf.startswith("yes") == (architecture.gguf is not None), name
            assert ("norm" in lora) == (architecture.query_norm is not None), name
            assert ("sinks" in lora) == (architecture.sinks is not None), name
            assert ("log-size" in rules) == architecture.becomes_ministral, name
