"""Fits as adapters: what stock PEFT makes of the exported folder."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
from safetensors.numpy import load_file, save_file
from test_cli import call, refusal
from test_export import assert_alike, by_size, constants, logits, stock, tiny, under
from tiny_causal import causal_model, save
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from calibrate.errors import CalibrateError
from calibrate.export import adapter, proof
from calibrate.export.checkpoint import prepare
from calibrate.export.queries import SUPPORTED
from calibrate.files.coefficient_file import dumps, read
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.files.publishing import publish
from calibrate.maths.rule import Rule
from calibrate.transformers.folders import ModelFolder

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's use of Transformers
ALL_ALIKE = Coefficients(Rule.log_size(0.25, 16.0), (Entry((0.0, 1.3), (0.0, 6.0)),), name="made")
NORM, CAP, SINKS = r"norm\.weight would have to", "softcapping is", r"\.sinks would have to"
WITH_NORM = """
    afmoe apertus dots1 exaone4 exaone_moe flex_olmo gemma3_text hunyuan_v1_dense hunyuan_v1_moe
    lfm2 lfm2_moe minimax_m2 olmo2 olmo3 olmoe persimmon qwen3 qwen3_5_text qwen3_moe qwen3_next
"""
REFUSED = dict.fromkeys(WITH_NORM.split(), NORM) | {
    "gemma2": CAP, "gpt_oss": SINKS, "vaultgemma": CAP,
}  # fmt: skip
SHORT = ("gpt2", "gpt_neox", "gpt_oss", "qwen3")  # as columns, fused by heads; refused


def export(fit, folder, out="out"):
    export = prepare(fit, ModelFolder(Path(folder)), False, adapter.by_adapter)
    return adapter.write_adapter(export, Path(out), "A card.")


@pytest.mark.parametrize(
    "model_type",
    [*SHORT, *(pytest.param(x, marks=pytest.mark.slow) for x in sorted(SUPPORTED - {*SHORT}))],
)
def test_adapters_are_our_runtime_or_are_refused(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this version of Transformers does not have it")
    tiny(model_type).save_pretrained("m")
    model = stock("m")
    if model_type in REFUSED:
        with pytest.raises(CalibrateError, match=REFUSED[model_type]):
            export(ALL_ALIKE, "m")
        return
    fit = constants(model.config, proof.queries_of(model.config, model).layers)
    assert export(fit, "m").faults == ()
    assert adapter.read_adapter(Path("out"), ModelFolder(Path("m"))).faults == ()
    plain = logits(model)
    ours = under(fit, model)
    theirs = peft.PeftModel.from_pretrained(stock("m"), "out").eval()
    assert_alike(ours, logits(theirs), plain)
    assert_alike(ours, logits(theirs.merge_and_unload()), plain)


QUALITY = {
    "held_out": [{"size": 256, "rows": 40, "before": -1.9, "after": -1.5, "error": 0.05}],
    "trade": [{"strength": 0.5, "gain": 0.2, "gain_error": 0.02, "kl": 0.001, "kl_error": 0.0002}],
    "verdict": "Use it [now](x) | <b>",
}


def published(folder):
    """A fit of the model, with what a file says of its worth."""
    fit = constants(causal_model().config)
    options = {"strength": 0.5, "through": "model"}
    source = {"fingerprint": ModelFolder(folder).fingerprint(), "options": options}
    return publish(replace(fit, source=source, quality=QUALITY, name="mine"), Path("fits"))[0]


def test_the_command_its_check_and_the_card(here):
    source = save(Path("model"), causal_model(), tokenizer=False)
    fit = published(source)
    arguments = ("export", "mine", "--model", "model", "--as", "adapter", "--out")
    shown = call(*arguments, "new/out").stdout
    out = here / "new/out"
    names = {"adapter_config.json", "adapter_model.safetensors", "fit.json", "README.md"}
    assert {path.name for path in out.iterdir()} == names
    kept = read(out / "fit.json")
    assert (kept, kept.quality, kept.source) == (fit, fit.quality, fit.source)
    assert call("export", "--check", "new/out", "--model", "model").stdout == shown
    assert "new/out is an adapter; give --model" in refusal("export", "--check", "new/out")
    call(*arguments, "out")
    assert all((here / "out" / name).read_bytes() == (out / name).read_bytes() for name in names)
    assert "exists already" in refusal(*arguments, "out")
    card = Path("out/README.md").read_text()
    front = '---\nbase_model: "model"\nbase_model_relation: adapter\nlibrary_name: peft\ntags: ['
    assert card.startswith(front)
    assert "Before you publish it" in card
    for told in (
        "8 of 8 heads", "| 256 | 40 | -1.900 | -1.500 | +0.400 ± 0.050 |", r"\[now\](x) \| \<b>",
        "| 0.5 | +0.200 ± 0.020 | 0.0010 ± 0.0002 | chosen |",
    ):  # fmt: skip
        assert told in card
    namespace = {}
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], namespace)
    assert_alike(under(fit, stock("model")), logits(namespace["merged"]), logits(stock("model")))


def test_the_page_that_documents_it(here):
    page = (Path(__file__).parents[1] / "fits" / "SERVE.md").read_text(encoding="utf-8")
    page = page.split("\n## An adapter for PEFT\n")[1].split("\n## ")[0]
    published(save(Path("model"), causal_model(), tokenizer=False))
    for line in re.search(r"```sh\n(.*?)```", page, re.DOTALL)[1].splitlines():
        call(*line.split("#")[0].split()[1:])
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})


def test_the_readmes_lines_of_peft(here):
    page = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = (x for x in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "peft" in x)
    published(save(Path("MODEL"), causal_model(), tokenizer=False))
    call("export", "mine", "--model", "MODEL", "--as", "adapter", "--out", "mine-adapter")
    found = {}
    exec(block, found)
    assert found["model"].peft_config["default"].peft_type == "IA3"


def test_a_model_in_the_hubs_cache_is_named_with_its_revision(here):
    cached = Path("hub/models--some--tiny-llama/snapshots/0a1b")
    save(cached, causal_model(), tokenizer=False)
    published(cached)
    call("export", "mine", "--model", cached, "--as", "adapter", "--out", "out")
    config = peft.PeftConfig.from_pretrained("out")
    assert (config.base_model_name_or_path, config.revision) == ("some/tiny-llama", "0a1b")
    card = Path("out/README.md").read_text()
    assert 'from_pretrained("some/tiny-llama", revision="0a1b")' in card
    assert "Before you publish it" not in card


def test_only_heads_with_another_beta_have_a_vector(here):
    save(Path("m"), causal_model(), tokenizer=False)
    one = Entry((0.0, 1.5), (0.0, 6.0), 1, 2)
    export(replace(ALL_ALIKE, entries=(one, Entry((0.0, 1.0), (0.0, 6.0), 0, 0))), "m")
    ((name, vector),) = load_file("out/adapter_model.safetensors").items()
    assert name == "base_model.model.model.layers.1.self_attn.q_proj.ia3_l"
    assert vector.shape == (32, 1)
    np.testing.assert_array_equal(vector[:, 0], np.array([1, 1, 1.5, 1], np.float32).repeat(8))


@pytest.mark.parametrize(
    ("fit", "match"),
    [
        (by_size(), "the fit goes by log n, and an adapter only multiplies .*; leave out --as"),
        (replace(ALL_ALIKE, entries=(Entry((0.0, 1.0), (0.0, 6.0)),)), "every beta .* is 1"),
        (replace(ALL_ALIKE, source={"fingerprint": "sha256:0"}), "was made for sha256:0, and m is"),
    ],
)
def test_fits_that_an_adapter_cannot_hold(fit, match, here):
    save(Path("m"), causal_model(), tokenizer=False)
    with pytest.raises(CalibrateError, match=match):
        export(fit, "m")
    assert [path.name for path in here.iterdir()] == ["m"]


def test_what_the_command_refuses(here, monkeypatch):
    published(save(Path("m"), causal_model(), tokenizer=False))
    arguments = ("export", "mine", "--model", "m", "--as", "adapter", "--out")
    refusal(*arguments, "out.gguf", code=2)
    refusal("export", "--check", "out", "--as", "adapter", code=2)
    call(*arguments[:4], "--out", "whole")
    assert "whole is not an adapter" in refusal("export", "--check", "whole", "--model", "m")
    monkeypatch.setattr(adapter, "dumps", lambda fit: "{}")  # a fault between the files
    refusal(*arguments, "out")
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "needs the package peft: pip install -e '.[peft]'" in refusal(*arguments, "out")
    assert not [path for path in here.iterdir() if "out" in path.name]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with a model, m, and its adapter, out."""
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


LAST = "base_model.model.model.layers.1.self_attn.q_proj.ia3_l"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda: weights(lambda x: x[LAST].__imul__(1.01)), f"{LAST} is not what fit.json asks"),
        (lambda: weights(lambda x: x.pop(LAST)), "safetensors has other tensors than fit.json"),
        (lambda: edit("adapter_config.json", lambda x: x["target_modules"].pop()),
         "adapter_config.json has another target_modules"),
        (lambda: edit("adapter_config.json", lambda x: x.update(feedforward_modules=["q_proj"])),
         "has another feedforward_modules"),
        (lambda: Path("out/fit.json").write_text(
            dumps(replace(ALL_ALIKE, extra=read(Path("out/fit.json")).extra))), "is not what fit"),
        (lambda: Path("out/adapter_model.bin").touch(), "adapter_model.bin was added"),
        (lambda: Path("out/adapter_config.json").write_text("[]"), "config.json: the file is []"),
        (lambda: Path("out/adapter_model.safetensors").write_bytes(b"x" * 9), "its header"),
        (lambda: Path("out/adapter_model.safetensors").unlink(), "cannot read out/adapter_model"),
        (lambda: Path("out/fit.json").unlink(), "fit.json does not exist"),
        (lambda: edit("fit.json", lambda x: x.pop("x-adapter-model")), "-model is absent"),
        (lambda: edit("fit.json", lambda x: x.update({"x-adapter-model": 3})), "-model is 3"),
    ],
)  # fmt: skip
def test_what_was_tampered_with_is_named(change, fault, exported):
    shutil.copytree(exported / "out", "out")
    edit("adapter_config.json", lambda x: x.update(base_model_name_or_path="some/model"))
    Path("out/README.md").write_text("Edited.")
    check = "export", "--check", "out", "--model", exported / "m"
    call(*check)
    change()
    assert fault in call(*check, code=1).stderr


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "bloom"])
def test_an_adapter_of_another_model_is_told(exported, model_type):
    save(Path("other"), causal_model(model_type, vocab_size=99), tokenizer=False)
    line = refusal("export", "--check", exported / "out", "--model", "other")
    assert re.search(r"out was made for sha256:\w+, and other is sha256:\w+; give its own", line)
