"""Which attention scale a server applies to a stock model: `calibrate check-engine`."""

import json
import math
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from commands import call, refusal
from fake_server import completions, server, spelled, takes_text
from guides import lines_of, section
from llama_cpp import LlamaCpp
from test_export_gguf import FACTORS, WORDS, constants, export
from tiny_causal import SIZES, causal_model, save
from tiny_gguf import small_model, write_gguf
from transformers import AutoTokenizer

from calibrate.export.engine_check import APPLIES_OTHER, AS_STATED, CANNOT_TELL
from calibrate.transformers.betas import head_betas

YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32,
}  # fmt: skip
A = 0.1 * math.log(8) + 1
LONGROPE = YARN | {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "attention_factor": 1.4,
}  # fmt: skip
BY_POSITION = YARN | {
    "rope_type": "default", "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 2, "num_key_value_heads": 4,
    "rope_parameters": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip


def yarn(**changes):
    return causal_model("llama", rope_parameters=YARN | changes)


def some_prompts(lengths=(40, 80, 120, 180), n_tokens=256):
    """The option for prompts of token ids."""
    lines = [
        {
            "prompt_ids": np.random.default_rng(n).integers(3, n_tokens, n).tolist(),
            "answer_ids": [1],
        }
        for n in lengths
    ]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return "--prompts", "p.jsonl"


def check(stated, answer, *options, code=0):
    """The record of the command, and its line on stderr; without options at short prompts."""
    save("model", stated)
    options = options or some_prompts((12, 24, 36, 48), SIZES["vocab_size"])
    with server(answer) as url:
        result = call("check-engine", "--model", "model", "--engine", url, "--json", *options,
                      code=code)  # fmt: skip
    return json.loads(result.stdout), result.stderr.strip().splitlines()[-1]


class Scaled(torch.nn.Module):
    """A model whose queries are multiplied by factors of (layer, n)."""

    def __init__(self, model, factor):
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, ids, use_cache=False):
        with head_betas(self.model) as heads:
            n = np.arange(1, ids.shape[1] + 1)
            rows = [np.broadcast_to(self.factor(layer, n), n.shape) for layer, _ in heads.heads]
            heads.query_factors = torch.from_numpy(np.stack(rows)).float()[None]
            return self.model(ids, use_cache=use_cache)


def test_an_engine_that_agrees_at_the_prompts_of_the_built_in_task():
    save("model", yarn())
    with server(completions(yarn())) as url:
        result = call("check-engine", "--model", "model", "--engine", url, "--json")
    record = json.loads(result.stdout)
    assert record["applies"] == AS_STATED
    assert record["off"][AS_STATED] < 1e-4
    assert record["untold"] == []
    assert len(record["named"]) == 4
    assert record["lengths"][-1] > 200


ONCE_MORE = "1 / sqrt(head_dim) applied once more"
IGNORED = "{} ignored, 1 / sqrt(head_dim)"
# The type and configuration of a model, and the changes of the configuration that is served.
NAMED = {
    "without YaRN's attention factor": (
        "llama", {"rope_parameters": YARN}, {"rope_parameters": YARN | {"attention_factor": 1.0}},
    ),
    "YaRN's attention factor on queries alone": (
        "llama", {"rope_parameters": YARN},
        {"rope_parameters": YARN | {"attention_factor": A**0.5}},
    ),
    "YaRN's attention factor logged twice": (
        "llama", {"rope_parameters": YARN},
        {"rope_parameters": YARN | {"attention_factor": 0.1 * math.log(A) + 1}},
    ),
    # Engines compute 0.1 log(factor) + 1, whatever attention_factor says.
    "YaRN's attention factor as 0.1 log(factor) + 1": (
        "llama", {"rope_parameters": YARN | {"attention_factor": 1.6}}, {"rope_parameters": YARN},
    ),
    "LongRoPE's attention factor applied twice": (
        "phi3", {"rope_parameters": LONGROPE},
        {"rope_parameters": LONGROPE | {"attention_factor": 1.4**2}},
    ),
    IGNORED.format("query_pre_attn_scalar"): (
        "gemma2", {"query_pre_attn_scalar": 32}, {"query_pre_attn_scalar": 8},
    ),
    IGNORED.format("attention_multiplier"): (
        "granite", {"attention_multiplier": 0.1}, {"attention_multiplier": 8**-0.5},
    ),
    "llama_4_scaling_beta unread": (
        "ministral3", {"rope_parameters": BY_POSITION},
        {"rope_parameters": BY_POSITION | {"llama_4_scaling_beta": 0.0}},
    ),
    "attn_logit_softcapping ignored": ("gemma2", {}, {"attn_logit_softcapping": None}),
    "sliding_window ignored": ("gemma3", {"sliding_window": 8}, {"sliding_window": 4096}),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_scale_with_a_name(name):
    kind, stated, changes = NAMED[name]
    served = causal_model(kind, **stated | changes)
    record, line = check(causal_model(kind, **stated), completions(served), code=3)
    assert record["applies"] == name
    assert record["off"][name] < 1e-4
    assert f'"{name}"' in line


def test_a_scale_of_deepseek():
    """Multi-head latent attention: its rotary part has no name, the scale of the whole has."""
    served = causal_model("deepseek_v3", **LATENT)
    for layer in served.model.layers:
        assert layer.self_attn.scaling > 16**-0.5
        layer.self_attn.scaling = 16**-0.5
    record, _ = check(causal_model("deepseek_v3", **LATENT), completions(served), code=3)
    assert record["named"] == [record["applies"]] == [IGNORED.format("mscale_all_dim")]


@pytest.mark.parametrize(
    ("kind", "factor", "name"),
    [
        ("llama", 8**-0.5, ONCE_MORE),
        pytest.param("llama", 8**0.5, "no attention scale", marks=pytest.mark.slow),
        ("granite", 1 / 0.5, "no attention scale"),
    ],
)
def test_a_scale_applied_twice_and_none(kind, factor, name):
    served = Scaled(causal_model(kind), lambda *_: factor)
    record, line = check(causal_model(kind), completions(served), code=3)
    assert record["applies"] == name
    assert record["off"][name] < 1e-4
    assert f'"{name}"' in line


def test_a_scale_that_no_prompt_reaches_cannot_be_told():
    late = causal_model(
        "ministral3", rope_parameters=BY_POSITION | {"original_max_position_embeddings": 4096}
    )
    record, line = check(late, completions(late), code=1)
    assert (record["applies"], record["untold"]) == (CANNOT_TELL, ["llama_4_scaling_beta unread"])
    assert "llama_4_scaling_beta unread" in line


def test_a_server_that_gives_texts_of_tokens():
    """SGLang's form: it takes ids, and lists log p by text."""
    tokenizer = AutoTokenizer.from_pretrained(save("model", yarn()))
    twice = yarn(attention_factor=A**2)
    answer = completions(
        twice, spelled, takes=lambda body: not takes_text(body), tokenizer=tokenizer
    )
    record, _ = check(yarn(), answer, code=3)
    assert record["applies"] == "YaRN's attention factor applied twice"


@pytest.mark.parametrize("kind", ["bert", "bloom"], ids=["encoder", "bias"])
def test_a_model_is_refused_before_a_server_is_asked(kind):
    save("model", causal_model(kind))
    line = refusal("check-engine", "--model", "model", "--engine", "http://localhost:1")
    assert "model" in line
    assert "localhost" not in line


def test_a_remedy_is_an_option_of_the_command():
    """`check-engine` has no lengths of prompts."""
    save("model", causal_model(max_position_embeddings=24))
    line = refusal("check-engine", "--model", "model", "--engine", "http://localhost:1")
    assert line.endswith("give --prompts")
    assert "lengths" not in line
    line = refusal("check-engine", "--model", "m.gguf", "--engine", "http://localhost:1")
    assert "m.gguf is a .gguf file" in line
    assert "--model" in line


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_factor_without_a_name(noise):
    served = Scaled(causal_model(), lambda *_: 1.5)
    record, line = check(causal_model(), completions(served, noise=noise), code=3)
    assert record["applies"] == APPLIES_OTHER
    assert "another attention scale does not explain it" in line


def test_another_model():
    other = causal_model()
    for x in other.parameters():
        x.mul_(1.1)
    options = ("--served-model-name", "any", *some_prompts((12, 24, 36, 48)))
    record, line = check(yarn(), completions(other), *options, code=3)
    assert record["applies"] == APPLIES_OTHER
    assert "calibrate export --check EXPORTED --engine http" in line


def test_noise():
    """A quantised engine of the right scale agrees, or cannot be told; it never differs."""
    record, _ = check(yarn(), completions(yarn(), noise=0.05))
    assert record["applies"] == AS_STATED
    record, line = check(yarn(), completions(yarn(), noise=3.0), code=1)
    assert record["applies"] == CANNOT_TELL
    assert "--prompts" in line
    twice = completions(yarn(attention_factor=A**2), noise=0.01)
    assert check(yarn(), twice, code=3)[0]["applies"] == "YaRN's attention factor applied twice"


def yarn_keys(attention_factor=1.0):
    def add(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(YARN["factor"])
        writer.add_rope_scaling_orig_ctx_len(YARN["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(attention_factor)

    return add


def served(model, folder, keys):
    """A .gguf file of a model."""
    write_gguf(Path(folder), model, tokens=WORDS, add_keys=keys)
    return Path(folder) / "tiny.gguf"


def test_an_exported_file_whose_scales_transformers_does_not_read():
    model = small_model(vocab_size=len(WORDS), rope_parameters=YARN)
    export(constants(FACTORS), served(model, "m", yarn_keys()), "mine.gguf")
    line = refusal("export", "--check", "mine.gguf", "--engine", "http://localhost:1")
    assert "mine.gguf has llama.rope.scaling.type, " in line


@pytest.mark.parametrize(
    ("factor", "applies"),
    [(1.0, AS_STATED), (1 / A, "without YaRN's attention factor"),
     pytest.param(A, "YaRN's attention factor applied twice", marks=pytest.mark.slow)],
)  # fmt: skip
def test_llama_cpp_and_a_file_whose_key_is_changed(factor, applies):
    """By the command of the guide."""
    model = small_model(vocab_size=len(WORDS), rope_parameters=YARN)
    save("MODEL", model, tokenizer=False)
    engine = LlamaCpp(served(model, "m", yarn_keys(factor)))
    (line,) = lines_of(section("serving.md", "Does the engine apply the model's own scale?"))
    command = line.replace("http://localhost:8000", engine.address).split()[1:]
    code = 0 if applies == AS_STATED else 3
    result = call(*command, *some_prompts(), "--json", code=code)
    record = json.loads(result.stdout)
    assert record["applies"] == applies
    assert record["off"][applies] < 0.01


@pytest.mark.slow
def test_llama_cpp_with_an_exported_file_has_no_scale_with_a_name():
    model = small_model(vocab_size=len(WORDS))
    save("model", model, tokenizer=False)
    export(constants(FACTORS, FACTORS[::-1]), served(model, "m", lambda writer: None), "mine.gguf")
    engine = LlamaCpp("mine.gguf")
    options = ("--engine", engine.address, *some_prompts())
    record = json.loads(call("check-engine", "--model", "model", *options, "--json", code=3).stdout)
    assert record["applies"] == APPLIES_OTHER
    assert "applies the fit" in call("export", "--check", "mine.gguf", *options).stdout


@pytest.mark.slow
def test_a_check_needs_no_package_of_gguf_files():
    blocked = "import sys; sys.modules['gguf'] = None; import calibrate.export.engine_check"
    subprocess.run([sys.executable, "-c", blocked], check=True)
