"""Fits as LoRA: what stock PEFT and llama.cpp make of them."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from test_cli import call, refusal
from test_export import assert_alike, by_size, constants, logits, stock, tiny, under
from tiny_causal import causal_model, save

from calibrate.core.rule import Rule
from calibrate.errors import CalibrateError
from calibrate.export import adapter
from calibrate.export.lora import Lora
from calibrate.export.preparation import prepare
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry
from calibrate.store.publishing import publish
from calibrate.transformers.folders import ModelFolder

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's use of Transformers
ONE_HEAD = Coefficients(
    Rule.log_size(0.25, 16.0), (Entry((0.0, 1.7), (0.0, 6.0), 1, 2),), name="made"
)
Q_PROJ = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"


def export(fit, folder="m", out="out", max_rank=None):
    method = Lora(max_rank)
    export = prepare(fit, ModelFolder(Path(folder)), False, adapter.by_adapter(method))
    return adapter.write_adapter(export, Path(out), "A card.", method)


EXACT = ("llama", "phi3", "deepseek_v3")  # plain, fused, of low rank


@pytest.mark.parametrize(
    "model_type",
    ["llama", *(pytest.param(x, marks=pytest.mark.slow) for x in EXACT[1:])],
)
def test_peft_gives_the_logits_of_our_runtime(model_type, here):
    tiny(model_type).save_pretrained("m")
    model = stock("m")
    fit = constants(model.config)
    contents = export(fit)
    assert contents.problems == ()
    plain, ours = logits(model), under(fit, model)
    theirs = peft.PeftModel.from_pretrained(stock("m"), "out").eval()
    largest = 1e-5 * ours.abs().max()
    assert (logits(theirs) - ours).abs().max() < largest
    assert (logits(theirs.merge_and_unload()) - ours).abs().max() < largest
    assert (plain - ours).abs().max() > 1e4 * largest


def test_rows_are_copies_and_the_rank_is_that_of_the_largest_layer(here):
    save(Path("m"), causal_model().to(torch.bfloat16), tokenizer=False)
    heads = (
        *ONE_HEAD.entries,
        Entry((0.0, 0.5), (0.0, 6.0), 0, 0),
        Entry((0.0, 3), (0.0, 6), 0, 3),
    )
    contents = export(replace(ONE_HEAD, entries=heads))
    assert contents.notes == ("A LoRA of rank 16.",)
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
    assert values.shape == (16, 16)  # SGLang takes no adapter of queries without values
    assert not values.any()


@pytest.mark.parametrize(
    ("kind", "changes", "fit", "match"),
    [
        (
            "qwen2",
            {},
            ONE_HEAD,
            r"q_proj\.bias .*LoRA",
        ),
        ("qwen3", {}, "alike", r"q_norm\.weight "),
        ("gemma2", {}, "alike", r"softcapping .*2\.0"),
        ("gpt_oss", {}, ONE_HEAD, r"\.(sinks|bias) "),
        ("llama", {}, by_size(), r"\blog n\b"),
    ],
)
def test_what_a_lora_cannot_hold(kind, changes, fit, match, here):
    model = tiny(kind, **changes)
    model.save_pretrained("m")
    if fit == "alike":
        fit = replace(ONE_HEAD, entries=(Entry((0.0, 1.3), (0.0, 6.0)),))
    with pytest.raises(CalibrateError, match=match):
        export(fit)
    assert not Path("out").exists()


def published(fit=None):
    source = {"fingerprint": ModelFolder(Path("m")).fingerprint()}
    held_out = [{"size": 256, "rows": 40, "before": -1.9, "after": -1.5, "error": 0.05}]
    fit = replace(fit or constants(causal_model().config), source=source, name="mine")
    return publish(replace(fit, quality={"held_out": held_out}), Path("fits"))[0]


COMMAND = ("export", "mine", "--model", "m", "--as", "lora", "--out", "out")


def test_the_command_its_check_and_the_card(here):
    save(Path("m"), causal_model(), tokenizer=False)
    fit = published()
    line = refusal(*COMMAND, "--max-rank", "16")
    assert re.search(r"q_proj needs a LoRA of rank 32, and 16 is allowed; fit fewer heads", line)
    assert "calibrate model fit RUN --heads-per-layer N), give --max-rank 32 if your" in line
    shown = call(*COMMAND).stdout
    assert "A LoRA of rank 32." in shown
    assert call("export", "--check", "out", "--model", "m").stdout == shown
    data = ModelCard.load("out/README.md").data
    assert (data.base_model_relation, data.library_name) == ("adapter", "peft")
    assert data.tags == ["lora", "calibrate", "attention-temperature"]
    assert [x.metric_value for x in data.eval_results] == [1.5, 1.9]
    card = Path("out/README.md").read_text()
    assert data.pipeline_tag == "text-generation"
    base = str(Path("m").resolve())
    assert (
        f"in place of `{base}`,\nwherever that stands above and in `adapter_config.json`." in card
    )
    assert card.partition("Before you publish it")[0].count(base) == 3
    assert "--enable-lora --max-lora-rank 32 --lora-modules out=out`" in card
    merged = peft.PeftModel.from_pretrained(stock("m"), "out").merge_and_unload()
    assert_alike(under(fit, stock("m")), logits(merged), logits(stock("m")))
    wrong = call("export", "mine", "--model", "m", "--out", "x", "--max-rank", "3", code=2)
    assert "--max-rank" in wrong.stderr


def test_what_was_tampered_with_is_named(here):
    save(Path("m"), causal_model(), tokenizer=False)
    published(ONE_HEAD)
    call(*COMMAND)
    check = "export", "--check", "out", "--model", "m"
    file = "out/adapter_model.safetensors"
    tensors = load_file(file)
    for name in (Q_PROJ.format(1, "A"), Q_PROJ.format(1, "B")):
        changed = tensors[name].clone()
        changed[0, 0] += 1e-3
        save_file(tensors | {name: changed}, file)
        assert f"{name} " in call(*check, code=1).stderr
    save_file(tensors, file)
    config = Path("out/adapter_config.json")
    written = json.loads(config.read_text())
    for key, value in (("lora_alpha", 1), ("r", 9), ("use_dora", True), ("peft_type", "IA3")):
        config.write_text(json.dumps(written | {key: value}))
        assert f"adapter_config.json has another {key}" in call(*check, code=1).stderr
    config.write_text(json.dumps(written))
    call(*check)


def test_the_page_that_documents_it(here):
    page = (Path(__file__).parents[1] / "fits" / "serving.md").read_text(encoding="utf-8")
    page = page.split("\n## Export a LoRA\n")[1].split("\n## ")[0]
    save(Path("model"), causal_model(), tokenizer=False)
    save(Path("m"), causal_model(), tokenizer=False)
    published()
    for line in re.search(r"```sh\n(.*?)```", page, re.DOTALL)[1].splitlines():
        call(*shlex.split(line, comments=True)[1:])
