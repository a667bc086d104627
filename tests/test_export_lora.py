"""Fits as LoRA: what stock PEFT makes of the exported folder."""

import errno
import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from commands import call, refusal
from guides import lines_of, section
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from syscalls import failing
from test_export import assert_alike, by_size, constants, logits, stock, tiny, under
from tiny_causal import causal_model, save
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from calibrate.core.rule import RuleForm
from calibrate.errors import CalibrateError
from calibrate.export import lora, numerical_check
from calibrate.export.architectures import ARCHITECTURES, Norm
from calibrate.export.configuration import soft_cap
from calibrate.export.plan import ExportPlan
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit, dumps
from calibrate.store.loading import read
from calibrate.store.saving import save_to_store
from calibrate.transformers.folders import ModelFolder

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's use of Transformers
RULE = RuleForm.constant(0.25, 16.0)
ALL_ALIKE = Fit(RULE, (Entry((1.3,)),), name="made")
ONE_HEAD = Fit(RULE, (Entry((1.7,), (), 1, 2),), name="made")
Q_PROJ = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
MODEL_TYPES = {*ARCHITECTURES}
QUICK = ("llama", "gpt_oss", "qwen2", "qwen3")  # plain; refused: sinks, biases, a norm


def export(fit, folder="m", out="out"):
    export = lora.prepare_lora(fit, ModelFolder(Path(folder)))
    return lora.write_lora(export, Path(out), "A card.")


def refusal_of(config, queries):
    """The reason why a LoRA cannot hold constants of a model; None if it can."""
    if soft_cap(config):
        return "softcapping "
    if queries.architecture.sinks:
        return r"\.(sinks|bias) "
    if any(isinstance(queries.source(layer), Norm) for layer in queries.layers):
        return "norm of layer "
    factors = {(layer, h): 1.3 for layer in queries.layers for h in range(queries.n_heads)}
    changed = queries.changes(ExportPlan(factors, 0.0))
    return r"\.bias " if any(role.name == "bias" for role in changed) else None


@pytest.mark.parametrize(
    "model_type",
    [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in sorted(MODEL_TYPES - {*QUICK}))],
)
def test_peft_gives_the_logits_of_our_runtime(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this version of Transformers does not have it")
    tiny(model_type).save_pretrained("m")
    model = stock("m")
    queries = numerical_check.find_queries(model.config, model)
    if match := refusal_of(model.config, queries):
        with pytest.raises(CalibrateError, match=match):
            export(ALL_ALIKE)
        return
    fit = constants(model.config, queries.layers)
    assert export(fit).problems == ()
    plain, ours = logits(model), under(fit, model)
    theirs = peft.PeftModel.from_pretrained(stock("m"), "out").eval()
    assert_alike(ours, logits(theirs), plain)
    assert_alike(ours, logits(theirs.merge_and_unload()), plain)


def test_rows_are_copies_and_the_rank_is_that_of_the_largest_layer(here):
    save(Path("m"), causal_model().to(torch.bfloat16), tokenizer=False)
    heads = (
        *ONE_HEAD.entries,
        Entry((0.5,), (), 0, 0),
        Entry((3,), (), 0, 3),
    )
    export(replace(ONE_HEAD, entries=heads))
    config = json.loads(Path("out/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (16, 16, {})
    tensors, weights = load_file("out/adapter_model.safetensors"), load_file("m/model.safetensors")
    a, b = (tensors[Q_PROJ.format(1, x)] for x in "AB")
    assert (a.dtype, b.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(a[:8], weights["model.layers.1.self_attn.q_proj.weight"][16:24])
    assert not a[8:].any()
    expected = torch.zeros(32, 16)
    expected[torch.arange(16, 24), torch.arange(8)] = 0.7
    torch.testing.assert_close(b, expected)
    values = tensors[Q_PROJ.format(1, "B").replace("q_proj", "v_proj")]
    assert values.shape == (16, 16)  # SGLang takes no LoRA of queries without values
    assert not values.any()


@pytest.mark.parametrize(
    ("fit", "match"),
    [
        (by_size(), r"\blog n\b"),
        (replace(ALL_ALIKE, entries=(Entry((1.0,)),)), r"\bbeta .*\b1,"),
        (
            replace(ALL_ALIKE, source={"fingerprint": "sha256:0"}),
            r"^made@1 .*sha256:0,.* m .*sha256:",
        ),
    ],
)
def test_fits_that_a_lora_cannot_hold(fit, match, here):
    save(Path("m"), causal_model(), tokenizer=False)
    with pytest.raises(CalibrateError, match=match):
        export(fit)
    assert [path.name for path in here.iterdir()] == ["m"]


EVIDENCE = {
    "held_out": [{"n": 256, "inputs": 40, "nll_before": 1.9, "nll_after": 1.5, "se": 0.05}],
    "verdict": "Use it [now](x) | <b>",
}


def published(folder="m", fit=None):
    """A fit of the model, with the evidence that its file holds."""
    fit = fit or constants(causal_model().config)
    options = {"interpolation": 0.5, "through": "model"}
    source = {"fingerprint": ModelFolder(Path(folder)).fingerprint(), "options": options}
    return save_to_store(replace(fit, source=source, evidence=EVIDENCE, name="mine"), Path("fits"))[
        0
    ]


COMMAND = ("export", "mine", "--model", "m", "--as", "lora", "--out")


def test_the_command_and_its_check(here):
    save(Path("m"), causal_model(), tokenizer=False)
    fit = published()
    shown = call(*COMMAND, "new/out").stdout
    out = here / "new/out"
    names = {"adapter_config.json", "adapter_model.safetensors", "fit.json", "README.md"}
    assert {path.name for path in out.iterdir()} == names
    kept = read(out / "fit.json")
    assert (kept, kept.evidence, kept.source) == (fit, fit.evidence, fit.source)
    assert call("export", "--check", "new/out", "--model", "m").stdout == shown
    assert "--model" in refusal("export", "--check", "new/out")
    assert "new/out " in refusal(*COMMAND, "new/out")


def test_the_card(here):
    source = save(Path("m"), causal_model(), tokenizer=False)
    fit = published()
    call(*COMMAND, "out")
    card = Path("out/README.md").read_text()
    data, base = ModelCard(card).data, str(source.resolve())
    assert (data.base_model, data.library_name) == (base, "peft")
    assert (data.base_model_relation, data.pipeline_tag) == ("adapter", "text-generation")
    assert data.tags == ["lora", "calibrate", "attention-temperature"]
    assert card.count(base) == 3
    assert "\n    Use it [now](x) | <b>" in card
    model = peft.PeftModel.from_pretrained(stock("m"), "out").merge_and_unload()
    assert_alike(under(fit, stock("m")), logits(model), logits(stock("m")))


def test_the_page_that_documents_it(here):
    published(save(Path("MODEL"), causal_model(), tokenizer=False))
    _, *lines = lines_of(section("serving.md", "A LoRA"))
    for line in lines:
        call(*shlex.split(line, comments=True)[1:])


def test_a_model_in_the_hubs_cache_is_named_with_its_revision(here):
    cached = Path("hub/models--some--tiny-llama/snapshots/0a1b")
    save(cached, causal_model(), tokenizer=False)
    published(cached)
    call("export", "mine", "--model", cached, "--as", "lora", "--out", "out")
    config = peft.PeftConfig.from_pretrained("out")
    assert (config.base_model_name_or_path, config.revision) == ("some/tiny-llama", "0a1b")
    assert "Before you publish it" not in Path("out/README.md").read_text()


def test_what_the_command_refuses(here, monkeypatch):
    published(save(Path("m"), causal_model(), tokenizer=False))
    refusal("export", "--check", "out", "--as", "lora", code=2)
    refusal(*COMMAND, "out.gguf", code=2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.ENOSPC))
        refusal(*COMMAND, "out")
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "needs the package peft: pip install -e '.[peft]'" in refusal(*COMMAND, "out")
    assert not [path for path in here.iterdir() if "out" in path.name]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with a model, m, and its LoRA, out."""
    folder = tmp_path_factory.mktemp("exported")
    source = save(folder / "m", causal_model(), tokenizer=False)
    export(constants(causal_model().config), source, folder / "out")
    return folder


def edit(name, change):
    path = Path("out") / name
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))


def weights(change):
    path = Path("out/adapter_model.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


A, B = Q_PROJ.format(1, "A"), Q_PROJ.format(1, "B")
DIFFERS = "adapter_model.safetensors differs from what fit.json asks for"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda: weights(lambda x: x[A].mul_(1.01)), DIFFERS),
        (lambda: weights(lambda x: x[B].mul_(1.000001)), DIFFERS),
        (lambda: weights(lambda x: x.pop(B)), DIFFERS),
        (lambda: Path("out/fit.json").write_text(
            dumps(replace(ALL_ALIKE, extra=read(Path("out/fit.json")).extra))), DIFFERS),
        (lambda: Path("out/adapter_model.bin").touch(), "adapter_model.bin was added"),
        (lambda: Path("out/adapter_config.json").write_text("[]"), "adapter_config.json is []"),
        (lambda: Path("out/adapter_model.safetensors").write_bytes(b"x" * 9), DIFFERS),
        (lambda: Path("out/adapter_model.safetensors").unlink(), "out/adapter_model"),
        (lambda: Path("out/fit.json").unlink(), "fit.json does not exist"),
        (lambda: edit("fit.json", lambda x: x.pop("x-adapter-model")), "x-adapter-model = null"),
        (lambda: edit("fit.json", lambda x: x.update({"x-adapter-model": 3})), "-model = 3"),
    ],
)  # fmt: skip
def test_what_was_tampered_with_is_named(change, fault, exported):
    shutil.copytree(exported / "out", "out")
    Path("out/README.md").write_text("Edited.")
    check = "export", "--check", "out", "--model", exported / "m"
    call(*check)
    change()
    assert fault in call(*check, code=1).stderr


def faults(model=None):
    """What a check of ./out finds, a line each."""
    return lora.check_lora(Path("out"), ModelFolder(model or Path("m"))).problems


def test_another_configuration_is_named(exported):
    """The name of the base model may be edited, and PEFT may be of another version."""
    shutil.copytree(exported, ".", dirs_exist_ok=True)
    edit("adapter_config.json", lambda x: x.update(base_model_name_or_path="some/m", revision="x"))
    edit("adapter_config.json", lambda x: x.update(peft_version="0.1"))
    assert faults() == ()
    for change in ({"lora_alpha": 9}, {"layers_pattern": "x"}, {"target_modules": ["another"]}):
        shutil.copytree(exported / "out", "out", dirs_exist_ok=True)
        edit("adapter_config.json", lambda x, change=change: x.update(change))
        (line,) = faults()
        assert line.startswith("adapter_config.json differs")


def test_a_lora_of_another_model_is_refused(exported):
    save(Path("other"), causal_model("bloom", vocab_size=99), tokenizer=False)
    line = refusal("export", "--check", exported / "out", "--model", "other")
    assert re.search(r"out was made for sha256:\w+, and other is sha256:\w+; give its own", line)


def test_a_lora_loads_its_model_wherever_it_is_loaded(here, monkeypatch):
    """A folder of the name that was typed, elsewhere, is another model."""
    for name, changes in (("mine", {}), ("other", {"initializer_range": 0.1})):
        save(here / name / "model", causal_model(**changes), tokenizer=False)
    monkeypatch.chdir(here / "mine")
    published(Path("model"))
    call("export", "mine", "--model", "model", "--as", "lora", "--out", "out")
    monkeypatch.chdir(here / "other")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained("../mine/out")
    expected = stock(here / "mine/model").lm_head.weight
    assert (loaded.base_model.model.lm_head.weight == expected).all()
    call("export", "--check", "../mine/out", "--model", "../mine/model")


def test_a_lora_is_not_written_into_its_model(here):
    published(save(Path("m"), causal_model(), tokenizer=False))
    Path("link").symlink_to("m")
    for out in ("m/new/x", "link/x"):
        assert refusal(*COMMAND, out).startswith(f"calibrate: {out} ")
    assert "new" not in os.listdir("m")
