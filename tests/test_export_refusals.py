"""What cannot be exported exactly is refused, and exports that were changed are found out."""

import errno
import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from commands import call, refusal
from safetensors.torch import load_file, save_file
from syscalls import failing
from test_export import by_size, constants, export, tiny
from tiny_causal import causal_model, save

from calibrate.core.rule import RuleForm
from calibrate.errors import CalibrateError
from calibrate.export.folder import prepare_folder
from calibrate.export.lora import prepare_lora
from calibrate.export.numerical_check import (
    exportable,
    make_scaled_model,
    verify_numerically,
)
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit, dumps
from calibrate.store.saving import save_to_store
from calibrate.transformers.folders import ModelFolder


@pytest.fixture
def llama(here):
    return save(Path("m"), causal_model(), tokenizer=False)


ALL_ALIKE = Fit(RuleForm.constant(0.25, 16.0), (Entry((1.3,)),))
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", [(), ("--as", "lora")], ids=["folder", "lora"])
def test_weights_that_are_not_finite_are_refused_before_anything_is_written(llama, value, method):
    weights = load_file(llama / "model.safetensors")
    weights[Q_PROJ][3, 2] = value
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    Path("fit.json").write_text(dumps(replace(ALL_ALIKE, name="made", version=1)))
    line = refusal("export", "fit.json", "--model", llama, "--out", "out", *method)
    assert Q_PROJ in line
    assert not Path("out").exists()


def refused(fit, folder, match, **options):
    with pytest.raises(CalibrateError, match=match):
        export(fit, folder, **options)
    assert not [path for path in Path().iterdir() if "out" in path.name]


@pytest.mark.parametrize(
    ("model_type", "changes", "fit", "match"),
    [
        ("qwen3", {}, constants, r"layer 0 .*0\.9287 .*1\.712.* \(q_norm\)"),
        (
            "gemma2",
            {"attn_logit_softcapping": 2.0},
            constants,
            r"attn_logit_softcapping .*2\.0.* 1\.712",
        ),
        ("olmo", {"clip_qkv": 8.0}, constants, r"clip_qkv .*8\.0"),
        ("bloom", {}, constants, "'bloom'.* llama, "),
        ("gpt_neo", {}, constants, "'gpt_neo'.* llama, "),
        ("qwen2", {}, by_size, "qwen2.* --for-export --kind constant"),
        ("llama", {"attention_bias": True}, by_size, "Ministral 3.* biases;"),
        ("mistral", {"sliding_window": 100}, by_size, "Ministral 3.* 100 tokens"),
        ("llama", {"rope_parameters": DYNAMIC}, by_size, "Ministral 3.* 'dynamic'"),
    ],
)
def test_models_whose_queries_cannot_be_scaled_so(model_type, changes, fit, match, here):
    """Their weights are not read."""
    kind = transformers.CONFIG_MAPPING[model_type]
    sizes = {
        "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
        "max_position_embeddings": 128, "head_dim": 8, "intermediate_size": 48, "vocab_size": 64,
    }  # fmt: skip
    config = kind(**({} if model_type == "gpt_neo" else sizes) | changes)
    config.save_pretrained("m")
    save_file({f"x{i}": torch.ones(256) for i in range(24)}, "m/model.safetensors")
    refused(fit() if fit is by_size else fit(config), "m", match)


def test_rules_of_entropy_are_refused_with_what_would_do(llama, here):
    arguments = ("export", "paper", "--model", "m", "--out", "out")
    line = refusal(*arguments)
    assert "paper@1 is of kind 'polynomial': " in line
    assert line.endswith(" calibrate fit COLLECTION --kind constant")


def test_fits_of_other_models_need_a_word(llama, here):
    other = replace(ALL_ALIKE, source={"fingerprint": "sha256:" + "0" * 64}, name="other")
    Path("other.json").write_text(dumps(other))
    arguments = ("export", "./other.json", "--model", "m", "--out", "out")
    assert "sha256:000" in (line := refusal(*arguments))
    assert "--any-model" in line
    call(*arguments, "--any-model")
    assert json.loads(Path("out/config.json").read_text())["calibrate"]["fit"] == "other@1"


def test_layers_without_attention(here):
    folder = save(Path("m"), tiny("lfm2"), tokenizer=False)
    kinds = json.loads((folder / "config.json").read_text())["layer_types"]
    fit = replace(ALL_ALIKE, entries=(replace(ALL_ALIKE.only, layer=kinds.index("conv")),))
    refused(fit, folder, r"unnamed@1 .*layers \[\d\]")


def rewrite(folder, change):
    """The weights of a folder, with what a change makes of one tensor; None removes."""
    weights = load_file(folder / "model.safetensors")
    weights |= change(weights[Q_PROJ])
    weights = {name: x for name, x in weights.items() if x is not None}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


NOT_PLAIN = r"^q_proj\.\w+ .*layer 1 .*\bm\b.* config\.json"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x: {Q_PROJ.replace("weight", "qweight"): x, Q_PROJ: None}, NOT_PLAIN),
        (lambda x: {Q_PROJ: x.to(torch.float8_e4m3fn)}, NOT_PLAIN),
        (lambda x: {Q_PROJ + "_scale": torch.ones(1)}, NOT_PLAIN),
        (lambda x: {f"x.{Q_PROJ}": x[:8].clone(), Q_PROJ: None}, NOT_PLAIN),
        (lambda x: {Q_PROJ: x[:8].clone()}, r"q_proj\.weight .*\(8, 32\), .*\(32, 32\)"),
        (lambda x: {f"x.{Q_PROJ}": torch.ones(1)}, rf"^{Q_PROJ} .*x\.{Q_PROJ} .*layer 1\b"),
        (lambda x: {Q_PROJ: torch.full_like(x, 60_000).half()},
         r"layers\.1.*q_proj\.weight .*m/model\.safetensors .*F16 "),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_scaled(change, match, llama):
    rewrite(llama, change)
    refused(ALL_ALIKE, llama, match)


def test_damaged_files(llama):
    """Cut short, and of another format."""
    path = llama / "model.safetensors"
    whole = path.read_bytes()
    for data in (whole[:-1], b"", struct.pack("<Q", 2) + b"[]", whole[:8] + b"x" + whole[9:]):
        path.write_bytes(data)
        refused(ALL_ALIKE, llama, r"^m/model\.safetensors ")


@pytest.mark.parametrize("more", ['"more": [0.0, Infinity], ', '"model_type": "llama", ' * 2])
def test_configurations_that_could_not_be_written_back(more, llama):
    path = llama / "config.json"
    path.write_text(path.read_text().replace("{", "{" + more, 1))
    refused(ALL_ALIKE, llama, "config.json: ")


def saved_again(folder):
    """By Transformers, which keeps the key of config.json, and copies no other file."""
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained("again")
    return Path("again")


def without_its_key(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["calibrate"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("change", [lambda folder: folder, saved_again, without_its_key])
def test_a_model_that_carries_a_fit_takes_no_second_one(llama, change):
    """Its betas would be squares."""
    folder = ModelFolder(change(export(ALL_ALIKE, llama)))
    for prepare in (prepare_folder, prepare_lora):
        with pytest.raises(CalibrateError, match="carries the fit .* the original"):
            prepare(ALL_ALIKE, folder, any_model=True)
    with pytest.raises(CalibrateError, match="carries the fit"):
        exportable(folder)
    options = ("--engine", "http://localhost:1", "--model", folder.path)
    save_to_store(replace(ALL_ALIKE, name="made"), Path("fits"))
    call("export", "made", "--model", llama, "--out", "other")
    assert "carries the fit" in refusal("export", "--check", "other", *options)


def test_a_disk_that_fails_leaves_nothing(llama, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.ENOSPC))
        refused(ALL_ALIKE, llama, "out: No space left")
    Path("out").mkdir()
    assert (export(ALL_ALIKE, llama) / "config.json").exists()  # an empty folder is free
    with pytest.raises(CalibrateError, match="^out "):
        export(ALL_ALIKE, llama)


def without_biases(config, original, plan):
    """An export in which the biases of queries are those of the original."""
    exported = make_scaled_model(config, original, plan)
    for layer, kept in zip(exported.model.layers, original.model.layers, strict=True):
        layer.self_attn.q_proj.bias.copy_(kept.self_attn.q_proj.bias)
    return exported


def test_the_numerical_check_finds_a_bias_that_was_left_out():
    config = causal_model(attention_bias=True).config
    verify_numerically(config, by_size=False)
    with pytest.raises(CalibrateError, match=r"\bllama\b.* 0\.\d+ .* 0\.\d+ "):
        verify_numerically(config, by_size=False, export=without_biases)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    source = save(folder / "m", causal_model(), tokenizer=False)
    return export(by_size(0.2), source, folder / "out")


OTHER = replace(ALL_ALIKE, name="made")  # the name of the exported fit
NO_NAMES = b'"files": {"../out/config.json": "0", "tokenizer.json": "0", '


@pytest.mark.parametrize(
    ("name", "change", "faults"),
    [
        ("config.json", lambda x: x.replace(b'"files": {', NO_NAMES),
         ["../out/config.json is missing", "tokenizer.json is mis", "config.json was changed"]),
        ("config.json", lambda x: x.replace(b'scaling_beta": 0.2', b'scaling_beta": 0.1'),
         ["config.json was changed"]),
        ("model.safetensors", lambda x: x[:-5] + bytes([x[-5] ^ 1]) + x[-4:],
         ["model.safetensors was changed"]),
        ("calibrate-fit.json", lambda x: dumps(OTHER).encode(),
         ["calibrate-fit.json was changed", "and config.json says sha256:"]),
        ("calibrate-fit.json", None, ["calibrate-fit.json is missing"]),
    ],
)  # fmt: skip
def test_what_was_tampered_with_is_named(name, change, faults, exported):
    path = Path(shutil.copytree(exported, "out")) / name
    whole = path.read_bytes()
    path.unlink()
    if change:
        path.write_bytes(change(whole))
        assert path.read_bytes() != whole
    result = call("export", "--check", "out", code=1)
    for fault in faults:
        assert fault in result.stderr
    assert "FAILED" in result.stdout
    assert "as they were written" not in result.stdout
