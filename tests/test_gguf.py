"""Models in .gguf files, written by the package `gguf` as llama.cpp does."""

from pathlib import Path

import pytest
import torch
import transformers
from commands import refusal
from tiny_causal import save_tokenizer
from tiny_gguf import BASELINE, PACKED, TOKENS, small_model, write_gguf

from calibrate.errors import CalibrateError
from calibrate.transformers import folders
from calibrate.transformers.folders import ModelFolder


def logits_of(model):
    tokens = torch.arange(3, 43).reshape(2, 20) * 5
    return model(tokens, use_cache=False).logits


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
