"""Which attention scale a server applies to a stock model, asked by `calibrate check-engine`."""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from commands import call, refusal
from llama_cpp import LlamaCpp
from safetensors.torch import load_file, save_file
from test_engine_check import completions, server, spelled
from test_export_gguf import FACTORS, WORDS, constants
from test_model_examples import write_lines
from tiny_causal import causal_model, save
from tiny_gguf import small_model, write_gguf
from transformers import AutoTokenizer

from calibrate.export.engine_check import OTHER, UNKNOWN
from calibrate.export.gguf_file import export_gguf
from calibrate.export.gguf_model import GgufModel
from calibrate.export.stock_engine import AS_STATED
from calibrate.store.publishing import publish
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


@pytest.mark.parametrize(
    ("factor", "name", "noise"),
    [
        (1.0, "without YaRN's attention factor", 0.0),
        (1.0, "without YaRN's attention factor", 0.01),
        (A**2, "YaRN's attention factor applied twice", 0.0),
        (A**2, "YaRN's attention factor applied twice", 0.01),
        (A**0.5, "YaRN's attention factor on queries alone", 0.0),
        (0.1 * math.log(A) + 1, "YaRN's attention factor logged twice", 0.0),
    ],
)
def test_yarn(factor, name, noise):
    record, line = check(yarn(), completions(yarn(attention_factor=factor), noise=noise), code=3)
    assert record["applies"] == name
    assert " 65 tokens " in line
    assert f'"{name}"' in line


def test_yarn_with_a_factor_of_its_own_in_place_of_that_of_the_file():
    """Engines compute 0.1 log(factor) + 1, whatever attention_factor says."""
    record, _ = check(yarn(attention_factor=1.6), completions(yarn()), code=3)
    assert record["applies"] == "YaRN's attention factor as 0.1 log(factor) + 1"
    assert len(record["named"]) == 5


LONGROPE = YARN | {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "attention_factor": 1.4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("factor", "name"),
    [
        (1.0, "without LongRoPE's attention factor"),
        (1.4**2, "LongRoPE's attention factor applied twice"),
    ],
)
def test_longrope(factor, name):
    stated = causal_model("phi3", rope_parameters=LONGROPE)
    served = causal_model("phi3", rope_parameters=LONGROPE | {"attention_factor": factor})
    record, _ = check(stated, completions(served), code=3)
    assert record["applies"] == name


def test_a_scale_of_deepseek():
    """Multi-head latent attention: its rotary part has no name, the scale of the whole has."""
    stated = YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    latent = {
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 2, "num_key_value_heads": 4,
    }  # fmt: skip
    model = causal_model("deepseek_v3", rope_parameters=stated, **latent)
    served = causal_model("deepseek_v3", rope_parameters=stated, **latent)
    assert served.model.layers[0].self_attn.scaling > 16**-0.5
    for layer in served.model.layers:
        layer.self_attn.scaling = 16**-0.5
    record, _ = check(model, completions(served), code=3)
    assert record["named"] == ["mscale_all_dim ignored, 1 / sqrt(head_dim)"]
    assert record["applies"] == record["named"][0]


def test_a_scale_by_layer_of_gpt2():
    stated = causal_model("gpt2", scale_attn_by_inverse_layer_idx=True, n_positions=256)
    served = causal_model("gpt2", n_positions=256)
    record, _ = check(stated, completions(served), code=3)
    assert record["applies"] == "scale_attn_by_inverse_layer_idx ignored, 1 / sqrt(head_dim)"
    assert check(stated, completions(stated))[0]["applies"] == AS_STATED


@pytest.mark.parametrize(
    ("kind", "said"), [("bert", "model"), ("bloom", "model")], ids=["encoder", "bias"]
)
def test_a_model_is_refused_before_a_server_is_asked(kind, said):
    save("model", causal_model(kind))
    line = refusal("check-engine", "--model", "model", "--engine", "http://localhost:1")
    assert said in line
    assert "localhost" not in line


def test_a_server_that_gives_texts_of_tokens():
    """SGLang's form: it takes ids, and lists log p by text."""
    save("model", yarn())
    tokenizer = AutoTokenizer.from_pretrained("model")
    answer = completions(
        yarn(), spelled, takes=lambda body: not isinstance(body["prompt"], str), tokenizer=tokenizer
    )
    record, _ = check(yarn(), answer)
    assert record["applies"] == AS_STATED
    twice = completions(yarn(attention_factor=A**2), spelled, tokenizer=tokenizer)
    assert check(yarn(), twice, code=3)[0]["applies"] == "YaRN's attention factor applied twice"


def with_a_tensor_of_nobody(folder):
    weights = load_file(folder / "model.safetensors")
    weights["lost.weight"] = torch.ones(2)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_a_remedy_is_an_option_of_the_command():
    """`check-engine` has no lengths, and takes no tensors that do not run."""
    save(Path("model"), causal_model(max_position_embeddings=24))
    line = refusal("check-engine", "--model", "model", "--engine", "http://localhost:1")
    assert line.endswith("give --prompts")
    assert "lengths" not in line
    save(Path("other"), causal_model())
    with_a_tensor_of_nobody(Path("other"))
    line = refusal("check-engine", "--model", "other", "--engine", "http://localhost:1")
    assert "lost.weight" in line
    assert "unexpected" not in line
    publish(replace(constants((1.5,) * 4), name="made"), Path("fits"))
    line = refusal("export", "made", "--model", "other", "--out", "out", "--any-model")
    assert line.endswith("or --allow-unexpected")


def test_no_server():
    save("model", yarn())
    line = refusal("check-engine", "--model", "model", "--engine", "http://localhost:1")
    assert "http://localhost:1: " in line


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
    assert "llama_4_scaling_beta unread" in line


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


@pytest.mark.parametrize(
    ("factor", "noise"),
    [
        (0.05, 0.0),
        pytest.param(0.05, 0.02, marks=pytest.mark.slow),
        pytest.param(0.15, 0.0, marks=pytest.mark.slow),
        (5.0, 0.0),
        pytest.param(5.0, 0.02, marks=pytest.mark.slow),
    ],
)
def test_a_factor_far_from_1_is_estimated(factor, noise):
    served = Scaled(causal_model(), lambda *_: factor)
    record, _ = check(causal_model(), completions(served, noise=noise), code=3)
    assert record["applies"] == "one factor for all layers"
    value, error = record["estimates"][record["applies"]]["factor"]
    assert value == pytest.approx(factor, abs=max(4 * error, 1e-3 * factor))
    assert error < 0.1 * factor + noise


@pytest.mark.parametrize(
    ("kind", "factor", "name"),
    [
        ("llama", 8**-0.5, "1 / sqrt(head_dim) applied once more"),
        ("llama", 8**0.5, "no attention scale"),
        ("granite", 8**-0.5, "1 / sqrt(head_dim) applied once more"),
        ("granite", 1 / 0.5, "no attention scale"),
    ],
)
def test_a_scale_applied_twice_and_none(kind, factor, name):
    served = Scaled(causal_model(kind), lambda *_: factor)
    record, line = check(causal_model(kind), completions(served), code=3)
    assert record["applies"] == name
    assert record["off"][name] < 1e-4
    assert f'"{name}"' in line


def test_a_soft_cap_that_is_dropped():
    record, _ = check(
        causal_model("gemma2"),
        completions(causal_model("gemma2", attn_logit_softcapping=None)),
        code=3,
    )
    assert record["applies"] == "attn_logit_softcapping ignored"
    assert record["off"][record["applies"]] < 1e-4


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "mistral"])
def test_a_window_that_is_dropped(kind):
    record, _ = check(
        causal_model(kind, sliding_window=8),
        completions(causal_model(kind, sliding_window=4096)),
        code=3,
    )
    assert record["applies"] == "sliding_window ignored"
    assert record["off"][record["applies"]] < 1e-4


def test_a_model_without_a_scale_of_attention():
    stated = causal_model("gpt2", scale_attn_weights=False, n_positions=256)
    served = causal_model("gpt2", n_positions=256)
    record, _ = check(stated, completions(served), code=3)
    assert record["applies"] == "scale_attn_weights ignored, 1 / sqrt(head_dim)"


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
    assert "factors may differ by head or layer" in line
    assert "else compare weights, tokenizer and rotary positions" in line


def test_noise():
    """A quantised engine of the right scale agrees, or cannot be told; it never differs."""
    for noise in (0.01, 0.1):
        record, _ = check(yarn(), completions(yarn(), noise=noise))
        assert record["applies"] == AS_STATED
    record, line = check(yarn(), completions(yarn(), noise=3.0), code=1)
    assert record["applies"] == UNKNOWN
    assert "--prompts" in line


def test_a_file_whose_scales_are_not_read():
    line = refusal("check-engine", "--model", "m.gguf", "--engine", "http://localhost:1")
    assert "m.gguf is a .gguf file" in line
    assert "--model" in line


def test_a_server_of_another_vocabulary():
    def answer(self):
        self.say({"choices": [{"logprobs": {"top_logprobs": [{"token_id:512": -0.1}]}}]})

    save("model", causal_model())
    with server(answer) as url:
        line = refusal("check-engine", "--model", "model", "--engine", url)
    assert " 512, " in line
    assert " 511;" in line


def test_a_server_with_a_short_context():
    model = causal_model()
    answers = completions(model, takes=lambda body: len(body["prompt"]) < 120)
    save("model", model)
    with server(answers) as url:
        line = refusal("check-engine", "--model", "model", "--engine", url)
    assert "--prompts" in line


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


def some_prompts():
    """The option for prompts of token ids."""
    prompts = [
        {"prompt_ids": np.random.default_rng(n).integers(3, len(WORDS), n).tolist(),
         "answer_ids": [1]}
        for n in (40, 80, 120, 180)
    ]  # fmt: skip
    write_lines("p.jsonl", prompts)
    return "--prompts", "p.jsonl"


def served(model, folder, keys):
    """A .gguf file of a model."""
    write_gguf(Path(folder), model, tokens=WORDS, add_keys=keys)
    return Path(folder) / "tiny.gguf"


@pytest.mark.slow
def test_llama_cpp_with_a_stock_file_a_changed_key_and_an_export_are_told_apart():
    yarn_model = small_model(vocab_size=len(WORDS), rope_parameters=YARN)
    save("yarn", yarn_model, tokenizer=False)
    changed = served(yarn_model, "changed", yarn_keys(A))
    model = small_model(vocab_size=len(WORDS))
    save("model", model, tokenizer=False)
    stock = served(model, "stock", lambda writer: None)
    fit = constants(FACTORS, FACTORS[::-1])
    export_gguf(fit, GgufModel(stock), Path("mine.gguf"))
    options = some_prompts()

    def asked(code, file, folder="model"):
        engine = LlamaCpp(file)
        of_server = ("--engine", engine.address, *options)
        result = call("check-engine", "--model", folder, *of_server, "--json", code=code)
        line = result.stderr.strip().splitlines()[-1]
        return json.loads(result.stdout)["applies"], line, (*of_server, engine)

    assert asked(0, stock)[0] == AS_STATED
    name, line, _ = asked(3, changed, folder="yarn")
    assert name == "YaRN's attention factor applied twice"
    assert name in line
    assert "by head or layer" not in line
    name, line, of_server = asked(3, "mine.gguf")
    assert name == OTHER
    assert "factors may differ by head or layer and not be one scale" in line
    (command,) = re.findall("(calibrate export --check) EXPORTED --engine http\\S+", line)
    shown = call(*command.split()[1:], "mine.gguf", *of_server[:-1]).stdout
    assert "applies the fit" in " ".join(shown.split())


def test_an_exported_file_whose_scales_transformers_does_not_read():
    model = small_model(vocab_size=len(WORDS), rope_parameters=YARN)
    export_gguf(constants(FACTORS), GgufModel(served(model, "m", yarn_keys())), Path("mine.gguf"))
    line = refusal("export", "--check", "mine.gguf", "--engine", "http://localhost:1")
    assert "mine.gguf has llama.rope.scaling.type, " in line


@pytest.mark.slow
def test_the_page_that_documents_it():
    """Its command, and its output for a file without YaRN's factor."""
    page = (Path(__file__).parents[1] / "fits" / "serving.md").read_text(encoding="utf-8")
    page = page.split("\n## Does the engine apply the model's own scale?\n")[1].split("\n## ")[0]
    command = re.search(r"```sh\n(.*?)\n```", page, re.DOTALL)[1]
    sample = re.search(r"```text\n(.*?)```", page, re.DOTALL)[1]
    model = small_model(vocab_size=len(WORDS), rope_parameters=YARN)
    save("MODEL", model, tokenizer=False)
    engine = LlamaCpp(served(model, "m", yarn_keys(1 / A)))
    options = [
        engine.address if word.startswith("http") else word for word in shlex.split(command)[1:]
    ]
    result = call(*options, *some_prompts(), code=3)
    shown = (result.stdout + result.stderr).replace(engine.address, "http://localhost:8000")
    table, line = sample.split("calibrate: ")
    for row in table.strip().splitlines()[1:]:
        name, *cells = re.split(r" {2,}", row.strip())
        (now,) = re.findall(f"{re.escape(name)} +([0-9. ]+)\n", shown)
        np.testing.assert_allclose(np.array(now.split(), float), np.array(cells, float), atol=2e-4)
    leaves = "leaves [0-9.e-]+"
    line = " ".join(re.sub(leaves, "leaves x", f"calibrate: {line}").split())
    assert line in " ".join(re.sub(leaves, "leaves x", shown).split())


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
    engine = LlamaCpp(file)
    options = ("--model", "model", "--engine", engine.address, *some_prompts())
    code = 0 if applies == AS_STATED else 3
    record = json.loads(call("check-engine", *options, "--json", code=code).stdout)
    assert record["applies"] == applies
    assert record["off"][applies] < 0.01
