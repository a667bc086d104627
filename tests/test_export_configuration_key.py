"""Fits as keys of a configuration: what stock Transformers makes of the model under the keys."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from llama_cpp import LlamaCpp
from test_cli import call, refusal
from test_engine_check import check, completions
from test_export import assert_alike, by_size, constants, logits, stock, tiny, under
from test_export_gguf import PROMPT, VOCABULARY, make, our_log_p
from tiny_causal import causal_model, save
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, Gemma3Config

from calibrate.core.rule import Rule
from calibrate.errors import CalibrateError
from calibrate.export.architectures import architectures_with_key
from calibrate.export.configuration_key import export_key, read_key
from calibrate.export.logit_scale import scaled_model
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry
from calibrate.store.publishing import publish

WITH_KEY = [x.model_type for x in architectures_with_key() if x.model_type in CONFIG_MAPPING]
QUICK = ("granite", "gemma2", "gemma3_text")


def constant(beta=1.5):
    """One constant of all heads."""
    return Coefficients(Rule.log_size(0.1, 16.0), (Entry((0.0, beta), (0.0, 6.0)),), name="mine")


def export(fit, folder="m", out="mine.json", **options):
    return export_key(fit, scaled_model(Path(folder)), Path(out), **options)


def overridden(folder="m", file="mine.json"):
    """The model as Transformers loads it with the keys of a file."""
    config = AutoConfig.from_pretrained(folder, **json.loads(Path(file).read_text()))
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize(
    "model_type",
    [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in WITH_KEY if x not in QUICK)],
)
def test_the_key_is_our_runtime(model_type):
    tiny(model_type, query_pre_attn_scalar=300).save_pretrained("m")
    written = export(constant())
    assert written.problems == ()
    assert read_key(Path("mine.json"), scaled_model(Path("m"))).notes == written.notes
    (beta,) = {written.plan.factors[head] for head in written.plan.factors} - {1.0}
    assert beta == pytest.approx(1.5, rel=2**-8)
    plain = logits(stock("m"))
    assert_alike(under(constant(beta), stock("m")), logits(overridden()), plain)


def test_a_soft_cap_grows_with_beta():
    tiny("gemma2", query_pre_attn_scalar=64).save_pretrained("m")
    export(constant(2.0))
    stored = json.loads(Path("mine.json").read_text())
    assert (stored["query_pre_attn_scalar"], stored["attn_logit_softcapping"]) == (16, 4.0)
    export(constant(1.01), out="near.json")
    near = json.loads(Path("near.json").read_text())
    assert near["query_pre_attn_scalar"] == 63  # an integer, as Transformers requires
    assert near["attn_logit_softcapping"] == pytest.approx(2 * (64 / 63) ** 0.5)


def test_a_container_has_the_key_where_its_configuration_has_it():
    text = tiny("gemma3_text", query_pre_attn_scalar=300)
    text.save_pretrained("m")
    config = Gemma3Config(text_config=text.config.to_dict(), vision_config={"hidden_size": 16})
    config.save_pretrained("m")
    written = export(constant())
    assert written.metadata["overrides"] == {"text_config": {"query_pre_attn_scalar": 133}}
    nested = AutoConfig.from_pretrained("m", **json.loads(Path("mine.json").read_text()))
    assert nested.text_config.query_pre_attn_scalar == 133
    assert written.notes[0] == (
        "text_config.query_pre_attn_scalar: 300 in the model, 133 with the fit."
    )


YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.2, "mscale": 0.7,
    "mscale_all_dim": 0.7, "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize("model_type", QUICK)
def test_keys_of_rotary_positions_are_never_written(model_type):
    """YaRN's factors scale logits too, but of rotated parts alone, and engines differ in them."""
    model = tiny(model_type, query_pre_attn_scalar=300)
    types = set(getattr(model.config, "layer_types", None) or ())
    nested = "sliding_attention" in types and model_type.startswith("gemma3")
    model.config.rope_parameters = dict.fromkeys(types, YARN) if nested else YARN
    model.save_pretrained("m")
    overrides = export(constant()).metadata["overrides"]
    named = {scaled_model(Path("m")).scale.key.name, "attn_logit_softcapping"}
    assert overrides.keys() <= named
    stored = json.loads(Path("mine.json").read_text())
    assert stored.keys() <= named | {"calibrate"}
    assert stored.keys().isdisjoint(YARN.keys() | {"rope_parameters", "rope_scaling"})


@pytest.mark.parametrize(("kind", "changes"), [("llama", {}), ("deepseek_v3", {})])
def test_a_model_with_no_key_but_of_rotary_positions_is_refused(kind, changes, here):
    save(Path("m"), causal_model(kind, rope_parameters=YARN, **changes), tokenizer=False)
    publish(constant(), here / "fits")
    line = refusal("export", "mine", "--model", "m", "--as", "config", "--out", "mine.json")
    assert f" {kind} " in line


def test_quantised_weights_need_no_change():
    folder = save(Path("m"), causal_model("granite"), tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    assert export(constant()).metadata["overrides"] == {"attention_multiplier": 0.75}


@pytest.mark.parametrize(
    ("kind", "fit", "match"),
    [
        ("granite", constants(causal_model("granite").config),
         r"^made@1 .*0\.\d+ .*1\.\d+, .*attention_multiplier .*--kind constant --sharing global"),
        ("granite", by_size(), "^made@1 .*log n, .*attention_multiplier "),
        ("granite", constant(1.0), r"\bbeta .*\b1,"),
        ("granite", replace(constant(), source={"fingerprint": "sha256:0"}), "sha256:0"),
        ("llama", constant(), r"\bllama\b.* gemma2, .*granite"),
        ("gemma3", constant(1.3), r"query_pre_attn_scalar .*\b8 .*1\.3 .*1\.265"),
    ],
)  # fmt: skip
def test_what_no_key_can_hold(kind, fit, match, here):
    save(Path("m"), causal_model(kind), tokenizer=False)
    with pytest.raises(CalibrateError, match=match):
        export(fit)
    assert not Path("mine.json").exists()


def test_sinks_would_stay_as_they_are():
    tiny("granite_swa").save_pretrained("m")
    with pytest.raises(CalibrateError, match="granite_swa"):
        export(constant())


def test_the_command_and_its_check(here):
    save(Path("m"), causal_model("granite"), tokenizer=False)
    publish(constant(), here / "fits")
    arguments = ("export", "mine", "--model", "m", "--as", "config", "--out")
    shown = call(*arguments, "mine.json").stdout
    assert "attention_multiplier: 0.5 in the model, 0.75 with the fit." in shown
    flat = " ".join(shown.split())
    assert 'vllm serve m --hf-overrides "$(cat mine.json)"' in flat
    assert 'sglang.launch_server --model-path m --json-model-override-args "$(cat mine' in flat
    assert call("export", "--check", "mine.json", "--model", "m").stdout == shown
    assert "--model" in refusal("export", "--check", "mine.json")
    assert "exists already" in refusal(*arguments, "mine.json")
    refusal(*arguments, "out.gguf", code=2)
    refusal(*arguments, "out", code=2)
    refusal(*arguments, "x.json", "--allow-unexpected", code=2)
    assert "m/x.json " in refusal(*arguments, "m/x.json")


def test_a_server_is_asked_whether_it_applies_the_key(here):
    save(Path("m"), causal_model("granite"))
    export(constant(2.0))
    record, _ = check("mine.json", completions(overridden()), "--model", "m")
    assert record["applies"] == "fit"
    assert record["overrides"] == {"attention_multiplier": 1.0}
    record, line = check("mine.json", completions(stock("m")), "--model", "m", code=3)
    assert record["applies"] == "plain"
    assert "serve mine.json as fits/serving.md says" in line


def test_a_fit_that_is_long_is_not_an_argument(here):
    save(Path("m"), causal_model("granite"), tokenizer=False)
    many = replace(constant(), quality={"verdict": "x" * 200_000})
    vllm = export(many).notes[1]
    assert vllm == """vLLM: vllm serve m --hf-overrides '{"attention_multiplier": 0.75}'"""


def test_the_page_that_documents_it(here):
    page = (Path(__file__).parents[1] / "fits" / "serving.md").read_text(encoding="utf-8")
    page = page.split("\n## Export a configuration key\n")[1].split("\n## ")[0]
    save(Path("model"), causal_model("granite"), tokenizer=False)
    publish(constant(), here / "fits")
    for line in re.search(r"```sh\n(.*?)```", page, re.DOTALL)[1].splitlines():
        call(*shlex.split(line, comments=True)[1:])
    namespace = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], namespace)
    assert namespace["model"].config.attention_multiplier == 0.75
    of_key = {x.scale_key.name: [] for x in architectures_with_key()}
    for architecture in architectures_with_key():
        of_key[architecture.scale_key.name].append(f"`{architecture.model_type}`")
    for key, types in of_key.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{key}`"))
        assert set(re.findall("`\\w+`", row.split("|")[3])) == set(types)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda x: x.update(attention_multiplier=0.8), "mine.json was changed; its fit asks for"),
        (lambda x: x.update(residual_multiplier=2.0), "mine.json was changed; its fit asks for"),
        (lambda x: x["calibrate"].update(fit="other@1"), "mine.json was changed"),
        (lambda x: x["calibrate"].update(id="sha256:0"), "the fit in it is sha256:"),
        (lambda x: x["calibrate"].update(model="sha256:0"), "was made for sha256:0, and m is"),
        (lambda x: x["calibrate"].pop("coefficients"), "is not an exported key"),
        (lambda x: x["calibrate"]["coefficients"].pop("rule"), "rule"),
    ],
)
def test_what_was_tampered_with_is_named(change, fault, here):
    save(Path("m"), causal_model("granite"), tokenizer=False)
    export(constant())
    stored = json.loads(Path("mine.json").read_text())
    change(stored)
    Path("mine.json").write_text(json.dumps(stored))
    assert fault in call("export", "--check", "mine.json", "--model", "m", code=1).stderr


def test_llama_cpp_under_the_key_is_our_runtime(here):
    model, file = make("granite")
    publish(constant(2.5), here / "fits")
    shown = call("export", "mine", "--model", file, "--as", "config", "--out", "mine.json").stdout
    (value,) = re.findall(r"--override-kv granite.attention.scale=float:(\S+)", shown)
    assert float(value) == 1.25
    assert call("export", "--check", "mine.json", "--model", file).stdout == shown
    # What the option does when the file is loaded: another value of that key.
    make("granite", "scaled", attention_multiplier=float(value))
    theirs = LlamaCpp("scaled/tiny.gguf").log_p(PROMPT, VOCABULARY)
    ours = our_log_p(model, constant(2.5), PROMPT)[-1]
    np.testing.assert_allclose(theirs, ours, atol=1e-4)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, -1], -1).numpy()
    assert np.abs(plain - ours).max() > 0.01


def test_a_graph_without_a_key():
    _, file = make("llama")
    with pytest.raises(CalibrateError, match=r"\bllama\b.* gemma2, .*granite"):
        scaled_model(file)
