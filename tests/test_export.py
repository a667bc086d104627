"""Fits written into checkpoints: what stock Transformers makes of the exported folder."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from commands import call, refusal
from guides import lines_of, section
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_causal import causal_model, save
from tiny_models import tiny_configuration
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from calibrate.core.rule import RuleForm, Sharing
from calibrate.errors import CalibrateError
from calibrate.export import numerical_check
from calibrate.export.architectures import ARCHITECTURES
from calibrate.export.configuration import soft_cap
from calibrate.export.folder import prepare_folder, write_folder
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit
from calibrate.store.saving import save_to_store
from calibrate.transformers import apply
from calibrate.transformers.folders import ModelFolder

TOKENS = torch.randint(3, 60, (2, 24), generator=torch.manual_seed(1))
N_HEADS = 4
# What tiny_configuration does not know: sizes that a real configuration has.
MORE = {
    "axk1": {"n_group": 1, "topk_group": 1},
    "bamba": {
        "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "beam": {"n_group": 1, "topk_group": 1},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {
        "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1,
    },
    "ernie4_5_moe": {"moe_k": 2, "moe_num_experts": 4},
    "falcon_h1": {"attention_out_multiplier": 8.0},
    "gemma2": {"attn_logit_softcapping": 2.0},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4,
        "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8,
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2, "num_experts": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
}  # fmt: skip
MODEL_TYPES = {*ARCHITECTURES}
FAMILIES = (
    "gemma2", "gpt2", "gpt_neox", "gpt_oss", "olmo2", "qwen2", "qwen3", "qwen3_5_text",
)  # fmt: skip


def tiny(model_type, **changes):
    small = tiny_configuration(CONFIG_MAPPING[model_type])
    config = type(small)(**small.to_dict() | MORE.get(model_type, {}) | changes)
    generator = torch.Generator().manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for x in model.parameters():
        noise = torch.randn(x.shape, generator=generator)
        x.copy_(1.5 * noise / x.shape[-1] ** 0.5 if x.ndim > 1 else x + 0.3 * noise)
    return model


def constants(config, layers=(0, 1), alike=False, one=False):
    heads = config.num_attention_heads
    betas = np.random.default_rng(5).uniform(0.5, 2.0, (1 + max(layers), heads))
    if alike or one:
        betas[:] = betas[:1, :1] if one else betas[:, :1]
    return Fit(RuleForm.constant(0.25, 16.0), tuple(
        Entry((float(betas[i, h]),), (), i, h) for i in layers for h in range(heads)
    ), name="made")  # fmt: skip


def by_size(ratio=0.2, heads=N_HEADS):
    """b (1 + ratio log n), with b of each head of two layers."""
    betas = np.random.default_rng(6).uniform(0.5, 2.0, (2, heads))
    return Fit(RuleForm.log_size(0.25, 16.0), tuple(
        Entry((ratio * float(betas[i, h]), float(betas[i, h])), (0.0, 6.0), i, h)
        for i in range(2) for h in range(heads)
    ), name="made")  # fmt: skip


def logits(model):
    with torch.no_grad():
        return model(TOKENS % model.config.vocab_size, use_cache=False).logits


def under(fit, model):
    return logits(apply(model, fit))


def stock(folder):
    loaded, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype="auto", attn_implementation="eager"
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    return loaded.eval()


def export(fit, folder, out="out", **options):
    write_folder(prepare_folder(fit, ModelFolder(Path(folder)), **options), Path(out))
    return Path(out)


def assert_alike(ours, theirs, plain):
    scale = ours.abs().max()
    assert (ours - theirs).abs().max() < 1e-4 * scale
    assert (ours - plain).abs().max() > 1e-2 * scale


def assert_exported_is_ours(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this version of Transformers does not have it")
    tiny(model_type).save_pretrained("m")
    model = stock("m")
    queries = numerical_check.find_queries(model.config, model)
    alike = any(map(queries.heads_share, queries.layers))
    fit = constants(model.config, queries.layers, alike, one=soft_cap(model.config) is not None)
    theirs = stock(export(fit, "m"))
    assert type(theirs) is type(model)
    plain = logits(model)
    assert_alike(under(fit, model), logits(theirs), plain)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_constants_in_the_weights_are_those_of_our_runtime(model_type):
    assert_exported_is_ours(model_type)


@pytest.mark.parametrize("has_bias", [False, True], ids=["norms", "norms and biases"])
def test_heads_with_a_norm_each_have_factors_of_their_own(has_bias):
    """As in the larger StableLM 2: its list of norms has a weight of a head's width for each."""
    model = tiny("stablelm", qk_layernorm=True, use_qkv_bias=has_bias)
    model.save_pretrained("m")
    assert numerical_check.exportable(ModelFolder(Path("m"))) is Sharing.PER_HEAD
    fit = constants(model.config)
    theirs = stock(export(fit, "m"))
    assert_alike(under(fit, model), logits(theirs), logits(stock("m")))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES - set(FAMILIES)))
def test_constants_in_every_type_of_model(model_type):
    assert_exported_is_ours(model_type)


@pytest.mark.parametrize(("kind", "window"), [("llama", None), ("mistral", 256)])
def test_rules_by_size_are_those_of_our_runtime(kind, window):
    model = tiny(kind)
    model.config.sliding_window = window
    model.save_pretrained("m")
    fit = by_size()
    theirs = stock(export(fit, "m"))
    assert type(theirs).__name__ == "Ministral3ForCausalLM"
    plain = logits(stock("m"))
    ours = under(fit, stock("m"))
    assert_alike(ours, logits(theirs), plain)
    # The part of log n alone: constants would not do.
    b = replace(fit, entries=tuple(replace(e, coefficients=(0.0, e.coefficients[1]), check=())
                                   for e in fit.entries))  # fmt: skip
    assert_alike(ours, logits(theirs), under(b, stock("m")))


def tensors_of(folder):
    return {
        name: x for path in sorted(Path(folder).glob("*.safetensors"))
        for name, x in load_file(path).items()
    }  # fmt: skip


def test_only_queries_change_and_are_rounded_once():
    """In shards, in bfloat16; the files keep their headers and every other byte."""
    model = causal_model(attention_bias=True).to(torch.bfloat16)
    for name, x in model.named_parameters():
        if name.endswith("bias"):
            x.copy_(torch.randn_like(x))
    source = save(Path("m"), model, tokenizer=False, max_shard_size="20KB")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    fit = constants(model.config)
    out = export(fit, source)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    old, new = tensors_of(source), tensors_of(out)
    assert old.keys() == new.keys()
    assert len(list(out.glob("*.safetensors"))) > 3
    for name, x in old.items():
        if "q_proj" in name:
            f = [fit.entry_of(int(name.split(".")[2]), h).coefficients[0] for h in range(N_HEADS)]
            by_head = x.double().reshape(N_HEADS, 8, -1) * torch.tensor(f).double()[:, None, None]
            x = by_head.reshape(x.shape).to(torch.bfloat16)
        assert torch.equal(x, new[name]), name
    for path in out.glob("*.safetensors"):
        with open(path, "rb") as mine, open(source / path.name, "rb") as theirs:
            size = int.from_bytes(mine.read(8), "little")
            assert theirs.read(8 + size)[8:] == mine.read(size)
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_what_goes_with_the_weights():
    source = save(Path("m"), causal_model())
    for name in ("LICENSE", "modeling_tiny.py", "tokenizer_tricks.py", "old.bin", "README.md"):
        (source / name).write_text("x")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_tiny.Config"}
    (source / "config.json").write_text(json.dumps(config))
    out = export(constants(causal_model().config), source)
    assert {path.name for path in out.iterdir()} == {
        "LICENSE", "chat_template.jinja", "generation_config.json", "tokenizer.json",
        "tokenizer_config.json", "model.safetensors", "config.json", "calibrate-fit.json",
    }  # fmt: skip
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    assert transformers.AutoTokenizer.from_pretrained(out)("where the bell")["input_ids"]


def test_the_command_and_its_check(here):
    source = save(Path("m"), causal_model(), tokenizer=False)
    fit = replace(by_size(), source={"fingerprint": ModelFolder(source).fingerprint(), "head": "m"})
    fit, _ = save_to_store(fit, here / "fits")
    shown = call("export", "made", "--model", "m", "--out", "new/out").stdout
    assert "ministral3" in shown
    assert "(1 + 0.2 log n)" in shown
    again = call("export", "--check", "new/out")
    assert again.stdout == shown
    assert "4 of 4" in shown
    record = json.loads(call("export", "--check", "new/out", "--json").stdout)
    assert (record["fit"], record["faults"]) == ("made@1", [])
    assert record["id"] == json.loads(fit.path.read_text())["id"]
    assert record["ratio"] == pytest.approx(0.2)
    assert record["factors"]["1"] == [
        pytest.approx(e.coefficients[1]) for e in fit.entries if e.layer == 1
    ]
    assert "new/out " in refusal("export", "made", "--model", "m", "--out", "new/out")
    assert "m/x " in refusal("export", "made", "--model", "m", "--out", "m/x")
    refusal("export", "made", "--check", "new/out", code=2)
    weights = here / "new/out/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "new/out " in call("export", "--check", "new/out", code=1).stderr


SOURCE_CARD = "---\nlicense: apache-2.0\nlanguage: en\ntags: [theirs]\n---\n# Theirs\n"


def test_the_card_of_an_exported_folder(here):
    source = save(Path("m"), causal_model(), tokenizer=False)
    save_to_store(replace(by_size(), name="mine"), here / "fits")
    shown = call("export", "mine", "--model", "m", "--out", "out").stdout
    assert call("export", "--check", "out").stdout == shown
    card = ModelCard.load("out/README.md")
    data = card.data
    assert (data.base_model, data.base_model_relation) == (str(source.resolve()), "finetune")
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert data.tags == ["calibrate", "attention-temperature"]
    assert (
        f"its name on the Hub in place of `{source.resolve()}`,\nwherever that stands above."
        in (card.text)
    )
    (source / "README.md").write_text(SOURCE_CARD)
    call("export", "mine", "--model", "m", "--out", "again")
    again = ModelCard.load("again/README.md")
    assert (again.data.license, again.data.language) == ("apache-2.0", "en")
    assert "Theirs" not in again.text
    (source / "README.md").write_text("---\n: [\n---\n")
    call("export", "mine", "--model", "m", "--out", "third")


def test_the_page_that_documents_it(here):
    _, *lines = lines_of(section("serving.md", "From a fit to a served model"), "bash")
    assert len(lines) == 2
    save(Path("MODEL"), causal_model(), tokenizer=False)
    save_to_store(replace(by_size(), name="mine"), here / "fits")
    for line in lines:
        call(*shlex.split(line, comments=True)[1:])
    model = transformers.AutoModelForCausalLM.from_pretrained("model-mine")
    assert type(model).__name__ == "Ministral3ForCausalLM"


def test_only_a_causal_model_becomes_a_ministral(here):
    save(Path("m"), causal_model(), tokenizer=False)
    config = json.loads(Path("m/config.json").read_text())
    Path("m/config.json").write_text(json.dumps(config | {"architectures": ["LlamaForRanking"]}))
    with pytest.raises(CalibrateError, match="LlamaForRanking"):
        export(by_size(), Path("m"))
