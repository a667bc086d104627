"""The plug-in for vLLM, on a stand-in: which fits it applies, where, and what it refuses."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import fake_vllm
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from tiny_causal import causal_model, save

from calibrate import vllm
from calibrate.core.rule import RuleForm
from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit, digest, dumps
from calibrate.transformers import apply
from calibrate.transformers.folders import ModelFolder
from calibrate.vllm.backend import ANY_MODEL_VARIABLE, QueryBeta

SEQUENCES = [torch.randint(3, 500, (n,), generator=torch.manual_seed(n)) for n in (1, 7, 30)]


def by_head(kappa, layers=(0, 1), heads=4, **source):
    """A rule of log n for each head, with bounds that some of them reach."""
    rng = np.random.default_rng(0)
    entries = tuple(
        Entry((float(kappa * rng.uniform(-0.3, 1)), float(rng.uniform(0.7, 2))), (0.0, 2.5),
              layer=layer, head=head)
        for layer in layers for head in range(heads)
    )  # fmt: skip
    return Fit(RuleForm.log_size(0.5, 2.4), entries, name="mine", source=source)


ALIKE = Fit(RuleForm(0.0, 0.5, 4.0), (Entry((0.0, 0.0, 0.0, 0.0, 1.7), (0.1, 2.0)),))
# Of both kinds of variables, but its entropy takes no part.
LINE = Fit(
    RuleForm(0.0, 0.5, 4.0, "clamp", "entropy-and-size"),
    (Entry((0.0, 0.0, 0.0, 0.0, 0.8, 0.0, 0.0, 0.4), (0.1, 2.0, 0.0, 2.5)),),
)
CONSTANTS = Fit(
    RuleForm.constant(0.5, 2.4),
    tuple(Entry(e.coefficients[1:], (), e.layer, e.head) for e in by_head(0.0).entries),
)
FITS = {
    "constants": CONSTANTS,
    "lines without a slope": by_head(0.0),
    "one constant": Fit(RuleForm.constant(0.5, 4.0), (Entry((1.7,)),)),
    "log n": by_head(0.6),
    "one layer": by_head(0.6, layers=[1]),
    "alike": ALIKE,
    "line": LINE,
}


@pytest.fixture
def plugged(monkeypatch, tmp_path):
    """Plugs a fit in; returns the stand-in's registry."""

    def plug(fit, any_model=True):
        (tmp_path / "fit.json").write_text(dumps(fit))
        monkeypatch.setenv(vllm.FIT_VARIABLE, str(tmp_path / "fit.json"))
        monkeypatch.setenv(vllm.FIT_ID_VARIABLE, digest(fit))
        monkeypatch.setenv(ANY_MODEL_VARIABLE, str(int(any_model)))
        registry = fake_vllm.install(monkeypatch.setitem)
        vllm.plug_in()
        return registry

    return plug


def started(registry, config, folder="nowhere", architecture="Backend", **options):
    """The model that vLLM would make; of the weights, whatever it starts with."""
    of_vllm = fake_vllm.configuration(folder, config, **options)
    found, _ = registry.resolve_model_cls([architecture], model_config=of_vllm.model_config)
    return found(vllm_config=of_vllm, prefix="")


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("name", FITS)
def test_queries_of_joined_sequences_have_the_betas_of_our_runtime(plugged, name, kind):
    """Gemma 3 has layers with a sliding window, in which n is at most the window."""
    ours = causal_model(kind, attn_logit_softcapping=None) if kind == "gemma3" else causal_model()
    theirs = started(plugged(FITS[name]), type(ours.config)(**ours.config.to_dict()))
    theirs.load_weights((k.removeprefix("model."), x) for k, x in ours.state_dict().items())
    tokens, positions = fake_vllm.joined(SEQUENCES)
    plain = torch.cat([ours.model(x[None], use_cache=False)[0][0] for x in SEQUENCES])
    apply(ours, FITS[name])
    expected = torch.cat([ours.model(x[None], use_cache=False)[0][0] for x in SEQUENCES])
    found = theirs(tokens, positions)
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    assert float((plain - expected).abs().max()) > 1e-2 * float(expected.abs().max())


def test_a_rank_applies_the_rules_of_its_own_heads(plugged):
    fit = FITS["log n"]
    query, positions = torch.zeros(1, 4, 9, 8), torch.arange(9)[None]
    whole = QueryBeta(fit.layer(1), 4, slice(0, 4), None)(query, positions)
    second = QueryBeta(fit.layer(1), 4, slice(2, 4), None)(query[:, :2], positions)
    assert torch.equal(second, whole[:, 2:])
    assert not torch.allclose(second, whole[:, :2])
    model = started(plugged(fit), causal_model().config, rank=1, n_ranks=2)
    with pytest.raises(CalibrateError, match=r"\b4 heads .*\b2 "):
        model(*fake_vllm.joined(SEQUENCES))  # the stand-in does not divide heads


def test_a_process_that_is_asked_twice_applies_the_fit_once(plugged):
    registry = plugged(FITS["constants"])
    found, _ = registry.resolve_model_cls(["Backend"], model_config=None)
    vllm.plug_in()
    again, _ = registry.resolve_model_cls(["Backend"], model_config=None)
    assert found.__mro__[1:] == again.__mro__[1:]


def test_what_vllm_compiled_without_the_fit_is_not_used_again(plugged):
    registry, of_vllm = plugged(FITS["log n"]), fake_vllm.configuration("x", causal_model().config)
    found, _ = registry.resolve_model_cls(["Backend"], model_config=of_vllm.model_config)
    found(vllm_config=of_vllm)
    assert digest(FITS["log n"]) in of_vllm.additional_config.values()


@pytest.mark.parametrize(
    ("fit", "options", "reason"),
    [
        (FITS["log n"], {"architecture": "LlamaForCausalLM"}, "mine@1 .*--model-impl transformers"),
        (FITS["log n"], {"attention": "vllm_mla"}, "'vllm_mla'"),
        (FITS["log n"], {"n_ranks": 3}, r"\b4 heads .*\b3 ranks"),
        (by_head(0.6, layers=[2]), {}, "layer 2"),
        (by_head(0.6, heads=5), {}, "head 4"),
    ],
)
def test_a_model_that_cannot_be_served_exactly_stops_the_start(plugged, fit, options, reason):
    with pytest.raises(CalibrateError, match=reason):
        started(plugged(fit), causal_model().config, **options)


def test_an_export_takes_no_second_fit(plugged):
    config = causal_model().config
    config.calibrate = {"fit": "first@1"}
    with pytest.raises(CoefficientsError, match="first@1"):
        started(plugged(ALIKE), config)


def test_soft_caps_and_sinks_stop_the_start(plugged):
    with pytest.raises(CalibrateError, match=r"attn_logit_softcapping .*2\.0"):
        started(plugged(ALIKE), causal_model("gemma2").config)
    model = started(plugged(ALIKE), causal_model("gpt_oss").config)
    with pytest.raises(CalibrateError, match="sinks"):
        model(*fake_vllm.joined(SEQUENCES))


def test_a_rule_of_log_n_needs_positions(plugged):
    beta = QueryBeta(FITS["log n"].layer(0), 4, slice(0, 4), None)
    with pytest.raises(CalibrateError, match="log n"):
        beta(torch.zeros(1, 4, 9, 8), torch.zeros(3, 1, 9))


def test_a_rule_of_the_entropy_is_refused(plugged):
    with pytest.raises(CalibrateError, match="polynomial"):
        plugged(replace(ALIKE, entries=(Entry((0.0, 0.0, 0.0, 0.5, 1.0), (0.1, 2.0)),)))


@pytest.mark.parametrize("fit_id", [None, "", "sha256:0"])
def test_the_id_must_be_given(plugged, monkeypatch, tmp_path, fit_id):
    """A fit without an id is not applied, and none is guessed."""
    plugged(ALIKE)
    monkeypatch.delenv(vllm.FIT_ID_VARIABLE)
    if fit_id is not None:
        monkeypatch.setenv(vllm.FIT_ID_VARIABLE, fit_id)
    registry = fake_vllm.install(monkeypatch.setitem)
    with pytest.raises(CoefficientsError, match=f"{vllm.FIT_ID_VARIABLE} .*{fit_id!r};"):
        vllm.plug_in()
    found, _ = registry.resolve_model_cls(["Backend"], model_config=None)
    assert found is fake_vllm.TransformersForCausalLM


def test_an_empty_name_of_a_fit_is_none(plugged, monkeypatch):
    monkeypatch.setenv(vllm.FIT_VARIABLE, "")
    registry = fake_vllm.install(monkeypatch.setitem)
    vllm.plug_in()
    found, _ = registry.resolve_model_cls(["Backend"], model_config=None)
    assert found is fake_vllm.TransformersForCausalLM


def test_an_encoder_takes_constants_alone(plugged):
    """Its queries see later keys, so that n is not their position."""
    with pytest.raises(CalibrateError, match=r"\bn .*calibrate\.transformers"):
        started(plugged(FITS["log n"]), causal_model().config, is_causal=False)
    started(plugged(FITS["constants"]), causal_model().config, is_causal=False)


@pytest.mark.parametrize("architecture", ["Backend", "LlamaForCausalLM"])
def test_a_draft_model_stays_as_it_is(plugged, architecture):
    """By whichever implementation: its guesses are checked by the model with the fit."""
    registry = plugged(FITS["log n"])
    config = fake_vllm.configuration("x", causal_model().config, runner="draft").model_config
    found, _ = registry.resolve_model_cls([architecture], model_config=config)
    assert found in (fake_vllm.TransformersForCausalLM, fake_vllm.LlamaForCausalLM)


OTHER_MODEL = "sha256:" + "0" * 64


@pytest.mark.parametrize("options", [{"is_first_stage": False}, {"rank": 1, "n_ranks": 2}])
def test_later_ranks_and_stages_do_not_compare_the_files(plugged, options):
    registry = plugged(by_head(0.6, fingerprint=OTHER_MODEL), any_model=False)
    started(registry, causal_model().config, "nowhere", **options).load_weights([])


def test_a_model_named_on_the_hub_is_read_from_its_cache(plugged, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshots = tmp_path / "hub/models--some--tiny/snapshots"
    for revision in ("0" * 40, "1" * 40):
        save(snapshots / revision, causal_model(initializer_range=0.3 + int(revision[0]) / 10))
    fit = by_head(0.6, fingerprint=ModelFolder(snapshots / ("1" * 40)).fingerprint())
    registry, config = plugged(fit, any_model=False), causal_model().config
    started(registry, config, "some/tiny", revision="1" * 40).load_weights([])
    with pytest.raises(CoefficientsError, match=ANY_MODEL_VARIABLE):
        started(registry, config, "some/tiny", revision="0" * 40).load_weights([])


@pytest.mark.parametrize("has_directory", [True, False])
def test_files_that_vllm_does_not_fetch_are_not_asked_for(
    has_directory, plugged, tmp_path, monkeypatch
):
    """The Hub's cache lists all files of the repository; the configuration is in it, always."""
    commit, weights = "1" * 40, tmp_path / ("weights" if has_directory else "hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for cache in (tmp_path / "hub", weights):
        repository = cache / "models--some--tiny"
        for name, text in (
            ("refs/main", commit),
            (f"trees/{commit}.json", json.dumps({"format_version": 1, "files": {
                name: {"size": 9, "blob_id": commit}
                for name in ("README.md", "config.json", "model.safetensors", "pytorch_model.bin")
            }})),
        ):  # fmt: skip
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            (repository / name).write_text(text)
    snapshot = weights / "models--some--tiny/snapshots" / commit
    save(snapshot, causal_model(), tokenizer=False)
    fit = by_head(0.6, fingerprint=ModelFolder(snapshot).fingerprint())
    if has_directory:
        own = tmp_path / "hub/models--some--tiny/snapshots" / commit
        own.mkdir(parents=True)
        (snapshot / "config.json").rename(own / "config.json")
    options = {"download_dir": str(weights) if has_directory else None}
    for of, accepted in ((fit, True), (by_head(0.6, fingerprint=OTHER_MODEL), False)):
        served = started(
            plugged(of, any_model=False), causal_model().config, "some/tiny", **options
        )
        with (
            nullcontext()
            if accepted
            else pytest.raises(CoefficientsError, match=ANY_MODEL_VARIABLE)
        ):
            served.load_weights([])


def test_the_fit_must_be_of_the_very_model(plugged, tmp_path):
    model = causal_model()
    save(tmp_path / "model", model)
    own = ModelFolder(tmp_path / "model").fingerprint()
    for fingerprint, accepted in ((own, True), (OTHER_MODEL, False)):
        fit = by_head(0.6, fingerprint=fingerprint)
        served = started(plugged(fit, any_model=False), model.config, tmp_path / "model")
        if accepted:
            served.load_weights([])
        else:
            with pytest.raises(CalibrateError, match=ANY_MODEL_VARIABLE):
                served.load_weights([])
    started(plugged(fit), model.config, tmp_path / "model").load_weights([])


SCRIPT = """
import sys
import fake_vllm
from calibrate.vllm import plug_in
before = set(sys.modules)
plug_in()
assert set(sys.modules) == before, set(sys.modules) - before
import os
from calibrate.vllm import FIT_ID_VARIABLE, FIT_VARIABLE
os.environ |= {FIT_VARIABLE: sys.argv[1], FIT_ID_VARIABLE: sys.argv[2]}
fake_vllm.install()
plug_in()
assert "calibrate.vllm.backend" in sys.modules
assert "jax" not in sys.modules
"""


@pytest.mark.slow
def test_nothing_is_imported_without_a_fit_and_never_jax(tmp_path):
    (tmp_path / "fit.json").write_text(dumps(ALIKE))
    tests = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, str(Path(tests).parent)])}
    environment.pop(vllm.FIT_VARIABLE, None)
    command = [sys.executable, "-c", SCRIPT, tmp_path / "fit.json", digest(ALIKE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
