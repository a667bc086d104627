"""Which attention scale a server applies to a stock model, asked by `calibrate check-engine`."""

import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from llama_cpp import LlamaCpp
from test_cli import call, refusal
from test_engine_check import completions, server
from test_export_gguf import WORDS
from test_model_examples import write_lines
from tiny_causal import causal_model, save
from tiny_gguf import small_model, write_gguf

from calibrate.export.engine_check import OTHER, UNKNOWN
from calibrate.export.stock_engine import AS_STATED
from calibrate.transformers.betas import head_betas

YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32,
}  # fmt: skip
A = 0.1 * math.log(8) + 1
BY_POSITION = YARN | {
    "rope_type": "default", "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16,
}  # fmt: skip


def yarn(**changes):
    return causal_model("llama", rope_parameters=YARN | changes)


def check(stated, answer, *options, code=0):
    """What the command finds, and its line on stderr."""
    save("model", stated)
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


def test_an_engine_that_agrees():
    record, _ = check(yarn(), completions(yarn()))
    assert record["applies"] == AS_STATED
    assert record["off"][AS_STATED] < 1e-4
    assert record["untold"] == []
    assert len(record["named"]) == 4


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize(
    ("factor", "name"),
    [
        (1.0, "without YaRN's attention factor"),
        (A**2, "YaRN's attention factor applied twice"),
    ],
)
def test_yarn(factor, name, noise):
    record, line = check(yarn(), completions(yarn(attention_factor=factor), noise=noise), code=3)
    assert record["applies"] == name
    assert " differs from model from 65 tokens on, by " in line
    assert f'; what explains it is the attention scale "{name}", which leaves ' in line


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_a_scale_of_the_head_in_place_of_that_of_the_configuration(kind):
    """Under a soft-cap too: the scale is of what is capped."""
    head_dim = causal_model(kind).config.head_dim
    stated = causal_model(kind, query_pre_attn_scalar=4 * head_dim)
    answer = completions(causal_model(kind, query_pre_attn_scalar=head_dim))
    record, _ = check(stated, answer, code=3)
    assert record["applies"] == "query_pre_attn_scalar ignored, 1 / sqrt(head_dim)"
    assert record["off"][record["applies"]] < 1e-4


def test_granite():
    stated = causal_model("granite", attention_multiplier=0.1)
    answer = completions(causal_model("granite", attention_multiplier=8**-0.5))
    assert check(stated, answer, code=3)[0]["applies"].startswith("attention_multiplier ignored")


def test_queries_that_are_not_scaled_by_position():
    stated = causal_model("ministral3", rope_parameters=BY_POSITION)
    flat = causal_model("ministral3", rope_parameters=BY_POSITION | {"llama_4_scaling_beta": 0.0})
    record, _ = check(stated, completions(flat), code=3)
    assert record["applies"] == "llama_4_scaling_beta unread"
    assert check(stated, completions(stated))[0]["applies"] == AS_STATED
    late = causal_model(
        "ministral3", rope_parameters=BY_POSITION | {"original_max_position_embeddings": 4096}
    )
    record, line = check(late, completions(late), code=1)
    assert (record["applies"], record["untold"]) == (UNKNOWN, ["llama_4_scaling_beta unread"])
    assert "is not told from llama_4_scaling_beta unread" in line


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_one_factor_is_estimated(noise):
    record, _ = check(
        causal_model(), completions(Scaled(causal_model(), lambda *_: 1.5), noise=noise), code=3
    )
    assert record["applies"] == "one factor for all layers"
    value, error = record["estimates"][record["applies"]]["factor"]
    assert value == pytest.approx(1.5, abs=max(4 * error, 1e-3))
    assert error < 0.1


@pytest.mark.slow
def test_a_factor_by_position_is_estimated():
    scaled = Scaled(causal_model(), lambda layer, n: 1 + 0.1 * np.log(n))
    record, _ = check(causal_model(), completions(scaled), code=3)
    assert record["applies"] == "a factor 1 + r log n"
    assert record["estimates"][record["applies"]]["r"][0] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.slow
def test_a_factor_of_one_type_of_layers_is_estimated():
    def model():
        return causal_model("gemma3", layer_types=["sliding_attention", "full_attention"])

    scaled = Scaled(model(), lambda layer, n: 0.6 if layer == 0 else 1.0)
    record, _ = check(model(), completions(scaled), code=3)
    assert record["applies"] == "a factor for each type of layers"
    values = record["estimates"][record["applies"]]
    assert values["sliding_attention"][0] == pytest.approx(0.6, abs=1e-2)
    assert values["full_attention"][0] == pytest.approx(1.0, abs=1e-2)


def test_another_model():
    torch.manual_seed(5)
    other = causal_model()
    for x in other.parameters():
        x.mul_(1.1)
    record, line = check(yarn(), completions(other), code=3)
    assert record["applies"] == OTHER
    assert "another attention scale does not explain it: the best" in line


def test_noise():
    """A quantised engine of the right scale agrees, or cannot be told; it never differs."""
    for noise in (0.01, 0.1):
        record, _ = check(yarn(), completions(yarn(), noise=noise))
        assert record["applies"] == AS_STATED
    record, line = check(yarn(), completions(yarn(), noise=3.0), code=1)
    assert record["applies"] == UNKNOWN
    assert line.endswith("give more or longer --prompts, or serve weights that are not quantised")


def test_a_file_whose_scales_are_not_read():
    line = refusal("check-engine", "--model", "m.gguf", "--engine", "http://localhost:1")
    assert "m.gguf is a .gguf file" in line
    assert "give --model the folder that it was made of" in line


def test_a_server_of_another_vocabulary():
    def answer(self):
        self.say({"choices": [{"logprobs": {"top_logprobs": [{"token_id:512": -0.1}]}}]})

    save("model", causal_model())
    with server(answer) as url:
        line = refusal("check-engine", "--model", "model", "--engine", url)
    assert "it lists token 512, and the model has 0 to 511; serve the same model" in line


def test_a_server_with_a_short_context():
    model = causal_model()
    answers = completions(model, takes=lambda body: len(body["prompt"]) < 120)
    save("model", model)
    with server(answers) as url:
        line = refusal("check-engine", "--model", "model", "--engine", url)
    assert "it has answered other prompts: give --prompts that it takes" in line


def yarn_keys(attention_factor=1.0):
    def add(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(YARN["factor"])
        writer.add_rope_scaling_orig_ctx_len(YARN["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(attention_factor)

    return add


def granite_keys(scale):
    def change(writer):
        del writer.kv_data[0]["granite.attention.scale"]
        if scale:
            writer.add_attention_scale(scale)

    return change


def position_keys(beta):
    def add(writer):
        writer.add_rope_scaling_orig_ctx_len(16)
        if beta:
            writer.add_attn_temperature_scale(beta)

    return add


BY_ENGINE = {
    "yarn": ("llama", {"rope_parameters": YARN}, yarn_keys(), AS_STATED),
    "yarn dropped": (
        "llama", {"rope_parameters": YARN}, yarn_keys(1 / A), "without YaRN's attention factor",
    ),
    "yarn twice": (
        "llama", {"rope_parameters": YARN}, yarn_keys(A), "YaRN's attention factor applied twice",
    ),
    "granite": ("granite", {"attention_multiplier": 0.1}, granite_keys(0.1), AS_STATED),
    "granite without its key": (
        "granite", {"attention_multiplier": 0.1}, granite_keys(None),
        "attention_multiplier ignored, 1 / sqrt(head_dim)",
    ),
    "granite with another key": (
        "granite", {"attention_multiplier": 0.1}, granite_keys(0.15), "one factor for all layers",
    ),
    "mistral3": ("mistral3", {"rope_parameters": BY_POSITION}, position_keys(0.5), AS_STATED),
    "mistral3 without its key": (
        "mistral3", {"rope_parameters": BY_POSITION}, position_keys(None),
        "llama_4_scaling_beta unread",
    ),
}  # fmt: skip
QUICK = ("yarn", "yarn dropped")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in BY_ENGINE if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_llama_cpp_and_files_whose_keys_are_changed(name):
    architecture, changes, add_keys, applies = BY_ENGINE[name]
    kind = "ministral3" if architecture == "mistral3" else architecture
    model = small_model(kind, vocab_size=len(WORDS), **changes)
    save("model", model, tokenizer=False)
    file = (
        write_gguf(Path("m"), model, architecture=architecture, tokens=WORDS, add_keys=add_keys)
        / "tiny.gguf"
    )
    prompts = [
        {"prompt_ids": np.random.default_rng(n).integers(3, len(WORDS), n).tolist(),
         "answer_ids": [1]}
        for n in (40, 80, 120, 180)
    ]  # fmt: skip
    write_lines("p.jsonl", prompts)
    engine = LlamaCpp(file)
    options = ("--model", "model", "--engine", engine.address, "--prompts", "p.jsonl")
    code = 0 if applies == AS_STATED else 3
    record = json.loads(call("check-engine", *options, "--json", code=code).stdout)
    assert record["applies"] == applies
    assert record["off"][applies] < 0.01
