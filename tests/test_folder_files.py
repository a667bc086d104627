"""What runs of a model's folder: the files that Transformers loads, and nothing else."""

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
import transformers
from commands import refusal
from safetensors.torch import load_file, save_file
from test_model_examples import write_lines
from tiny_causal import causal_model, save, save_tokenizer
from tiny_gguf import BASELINE, PACKED, TOKENS, logits_of, small_model, write_gguf

from calibrate.errors import CalibrateError
from calibrate.transformers import folders
from calibrate.transformers.folders import ModelFolder

TEXT = torch.arange(3, 27)[None]
UP, Q = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"
PROMPTS = [{"prompt_ids": [4, 5, 6], "answer_ids": [7, i]} for i in range(3)]


def logits(model):
    with torch.no_grad():
        return model(TEXT, use_cache=False).logits


def stock(folder):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return logits(loaded.eval())


def configure(folder, **changes):
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder, change):
    """The weights of a folder, with what a change returns of them: tensors by name."""
    weights = load_file(folder / "model.safetensors")
    save_file(weights | change(weights), folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def llama(here):
    return save(Path("m"), causal_model(), tokenizer=False)


def digests(folder, *names):
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["one file", "shards"])
def test_a_fingerprint_is_of_weights_index_and_configuration(options):
    """Published fits are bound to it: it never changes, whatever else lies in the folder."""
    folder = save(Path("m"), causal_model(), **options)
    shards = sorted(path.name for path in folder.glob("model*.safetensors*"))
    found = digests(folder, "config.json", *shards)
    assert len(found) == (8 if options else 2)
    text = json.dumps(found, sort_keys=True).encode()
    (folder / "README.md").write_text("x")
    (folder / "adapter_model.safetensors").write_bytes(b"x")  # nothing loads it alone
    assert ModelFolder(folder).fingerprint() == "sha256:" + hashlib.sha256(text).hexdigest()


def adapter(folder):
    (folder / "adapter_config.json").write_text("{}")


def other_file(folder):
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    configure(folder, transformers_weights="other.safetensors")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (adapter, r"^m/adapter_config\.json .*merge_and_unload"),
        (other_file, r"^m/config\.json .*'other\.safetensors'"),
    ],
)
def test_what_transformers_would_load_besides_is_refused_by_name(change, match, llama):
    change(llama)
    with pytest.raises(CalibrateError, match=match):
        ModelFolder(llama)
    write_lines("p.jsonl", PROMPTS)
    line = refusal(
        "model", "collect", "--model", llama, "--prompts", "p.jsonl", "--no-retention-text"
    )
    assert str(llama) in line
    assert not Path("runs").exists()


def test_an_adapter_beside_a_gguf_file_is_refused(here):
    folder = write_gguf(Path("m"), small_model())
    ModelFolder(folder)
    adapter(folder)
    with pytest.raises(CalibrateError, match="^m/adapter_config.json"):
        ModelFolder(folder)


def with_scale(weights):
    scale = weights[Q].abs().max() / 448
    scaled = (weights[Q] / scale).to(torch.float8_e4m3fn)
    return {Q: scaled, Q.replace("weight", "weight_scale"): scale}


IGNORED = [
    (
        lambda x: {Q.replace("weight", "bias"): torch.ones(32)},
        r"^m: .*LlamaForCausalLM .*\([\w.]*q_proj\.bias\)",
    ),
    (
        lambda x: {f"value_head.{i}": torch.ones(3) for i in range(5)},
        r"\b5 tensors .*\(value_head\.0, value_head\.1, value_head\.2, \.\.\.\)",
    ),
    (lambda x: {UP: x[UP].to(torch.int8)}, r"\bI8 .*\(.*up_proj"),
    (lambda x: {UP: x[UP].to(torch.uint8)}, r"\bU8 .*\(.*up_proj"),
    (lambda x: {UP: x[UP].to(torch.float8_e5m2)}, r"\bF8_E5M2 .*\(.*up_proj"),
    (with_scale, r"\bF8_E4M3 .*\(.*q_proj\.weight\).*\(.*q_proj\.weight_scale\)"),
]


@pytest.mark.parametrize(("change", "match"), IGNORED)
def test_tensors_that_do_not_run_as_they_are_stored_are_refused(change, match, llama):
    rewrite(llama, change)
    folder = ModelFolder(llama)
    with pytest.raises(CalibrateError, match=match):
        folder.load("float32")
    with pytest.raises(CalibrateError, match=match):
        folder.require_whole()


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q.bias"])
def test_a_tensor_of_a_gguf_file_that_does_not_run_is_refused(name, here, monkeypatch):
    """Files of Llama 3 have rope_freqs.weight, the factors of its rotary positions."""
    real = gguf.GGUFWriter.write_header_to_file

    def write_header(self, *arguments):
        self.add_tensor(name, np.full(32, 8.0, np.float32))
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", write_header)
        folder = ModelFolder(write_gguf(Path("m"), small_model()))
    with pytest.raises(CalibrateError, match=rf"LlamaForCausalLM .*\({name}\)"):
        folder.load("float32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool])
def test_buffers_that_the_class_ignores_are_not_refused(dtype, here):
    folder = save(Path("m"), causal_model("gpt2"), tokenizer=False)
    mask = torch.ones(1, 1, 8, 8).tril()
    rewrite(folder, lambda x: {"transformer.h.0.attn.bias": mask.to(dtype)})
    assert torch.equal(logits(ModelFolder(folder).load("float32")), stock(folder))


def test_quantised_weights_whose_scales_transformers_applies(here):
    """They are plain again where there is no GPU."""
    pytest.importorskip("accelerate")
    folder = save(Path("m"), causal_model(), tokenizer=False)
    right = load_file(folder / "model.safetensors")

    def quantise(weights):
        changed = {}
        for name in (name for name in weights if "_proj" in name):
            scale = weights[name].abs().max() / 448
            changed[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
            changed[f"{name}_scale_inv"] = scale.reshape(1, 1)
            right[name] = changed[name].float() * scale
        return changed

    rewrite(folder, quantise)
    configure(
        folder,
        quantization_config={
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head"],
        },
    )
    loaded = ModelFolder(folder).load("float32").state_dict()
    for name, weight in right.items():
        assert (loaded[name] - weight).abs().max() <= 0.01 * weight.abs().max(), name
    configure(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(CalibrateError, match="F8_E4M3"):
        ModelFolder(folder).load("float32")


@pytest.mark.parametrize("has_accelerate", [True, False])
def test_missing_weights_are_named_without_reading_any(has_accelerate, llama, monkeypatch):
    if has_accelerate:
        pytest.importorskip("accelerate")
    monkeypatch.setattr(folders, "is_accelerate_available", lambda: has_accelerate)
    ModelFolder(llama).require_whole()
    configure(llama, attention_bias=True)
    with pytest.raises(CalibrateError, match=r"LlamaForCausalLM: [\w.]*k_proj\.bias"):
        ModelFolder(llama).require_whole()


class Unmasked(torch.nn.Module):
    """Logits that depend on all tokens, by a share of their size."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, size, share):
        super().__init__()
        self.size, self.share = size, share

    def forward(self, input_ids, use_cache):
        x = (
            torch.nn.functional.one_hot(input_ids, 16)
            + self.share * input_ids.sum(-1)[:, None, None]
        )
        return SimpleNamespace(logits=self.size * x)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_whether_a_model_is_causal_does_not_depend_on_the_size_of_its_logits(size):
    require_causal = folders._require_causal
    require_causal(Unmasked(size, 1e-7))  # rounding
    with pytest.raises(CalibrateError, match="Unmasked"):
        require_causal(Unmasked(size, 1e-3))


@pytest.mark.parametrize(("packing", "error"), [(BASELINE, 1e-5), (PACKED, 0.1)])
def test_the_model_of_a_file_is_that_of_its_weights(packing, error, capfd):
    model = small_model()
    folder = ModelFolder(write_gguf(Path("m"), model, packing))
    assert (folder.name, folder.context, folder.vocabulary) == ("m", 256, len(TOKENS))
    assert folder.dtype() == "float32"
    found, plain = logits_of(folder.load("float32")), logits_of(model)
    assert (found - plain).abs().max() < error * plain.abs().max()
    assert found.dtype == torch.float32
    assert folder.load("bfloat16").dtype == torch.bfloat16
    assert capfd.readouterr().err == ""
    other = write_gguf(Path("other"), small_model(initializer_range=0.2))
    assert ModelFolder(other).fingerprint() != folder.fingerprint()


def test_the_tokenizer_of_a_file_or_beside_it():
    folder = write_gguf(Path("m"), small_model())
    text = "the theme\n is Ünïcode"
    first = ModelFolder(folder).tokenizer()
    assert first.convert_ids_to_tokens(first(text)["input_ids"])[3:6] == ["Ġthe", "m", "e"]
    assert first.decode(first(text)["input_ids"]) == text
    save_tokenizer(folder)  # of whole words
    assert len(ModelFolder(folder).tokenizer()("where the bell")["input_ids"]) == 3


def test_files_that_lack_something():
    Path("cut").mkdir()
    Path("cut/a.gguf").write_bytes(b"GGUF")
    with pytest.raises(CalibrateError, match=r"^cut/a\.gguf .*\b4 bytes"):
        ModelFolder("cut")
    arguments = ("--task", "retrieval:towns", "--lengths", "250", "--examples", "1")
    bare = write_gguf(Path("bare"), small_model(), tokenizer=False)
    line = refusal("model", "collect", "--model", bare, *arguments)
    assert "bare has no tokenizer" in line
    weight = "model.layers.1.mlp.up_proj.weight"
    lacking = write_gguf(Path("lacking"), small_model(), without=[weight])
    assert f"LlamaForCausalLM: {weight}" in refusal(
        "model", "collect", "--model", lacking, *arguments
    )


def test_weights_are_unpacked_so_that_no_kernel_is_fetched(monkeypatch):
    if not hasattr(transformers, "GgufConfig"):
        pytest.skip("this version of Transformers unpacks all weights")
    options = {}
    real = folders.AutoModelForCausalLM.from_pretrained

    def load(*arguments, **given):
        options.update(given)
        return real(*arguments, **given)

    folder = ModelFolder(write_gguf(Path("m"), small_model(), PACKED))
    monkeypatch.setattr(folders.AutoModelForCausalLM, "from_pretrained", load)
    model = folder.load("float32")
    assert options["quantization_config"].dequantize
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
