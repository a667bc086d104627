"""Fits through a model of what engines run: constants, with the parameter sharing of an export."""

from pathlib import Path

import pytest
import torch
import transformers
from commands import call, refusal
from rule_families import GLOBAL, PER_HEAD, PER_LAYER
from test_model_fit import planted, through
from tiny_causal import causal_model, planted_examples, save

import calibrate
from calibrate.errors import CalibrateError
from calibrate.export.numerical_check import exportable
from calibrate.transformers import apply
from calibrate.transformers.folders import ModelFolder


def test_a_fit_for_export_is_saved_and_exported(here):
    planted("tiny-run", count=16)
    command = ("model", "fit", "tiny-run", "--name", "mine", "--for-export")
    assert "--kind" in refusal(*command, "--kind", "log-size")
    call(*command, "--steps", "4")
    fit = calibrate.load("mine")
    assert fit.source["options"]["for_export"] is True
    call("export", "mine", "--model", "tiny", "--out", "exported")
    model, exported_model = (
        transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in ("tiny", "exported")
    )
    tokens = torch.from_numpy(planted_examples((60,), count=4).examples[0].tokens)[None].long()
    with torch.no_grad():
        before, exported = model(tokens).logits, exported_model(tokens).logits
        ours = apply(model, fit)(tokens).logits
    torch.testing.assert_close(exported, ours, atol=1e-4, rtol=0)
    assert (before - ours).abs().max() > 0.05


@pytest.mark.slow
def test_constants_are_the_same_with_and_without_export(here):
    collection = planted("tiny-run")
    free, result = (through(collection, engines=x, max_steps=10) for x in (None, PER_HEAD))
    assert result.coefficients.entries == free.coefficients.entries
    assert "for_export" not in free.coefficients.source["options"]
    by_layer = through(collection, engines=PER_LAYER, max_steps=10)
    assert by_layer.solution.family.label == "constant, each layer"  # as Qwen3 has it
    betas_of = {e.layer: e.coefficients for e in by_layer.coefficients.entries}
    assert all(e.coefficients == betas_of[e.layer] for e in by_layer.coefficients.entries)


@pytest.mark.parametrize(
    ("kind", "expected"), [("llama", PER_HEAD), ("gemma2", GLOBAL), ("qwen3", PER_LAYER)]
)
def test_the_sharing_that_engines_run_is_known_before_a_fit(here, kind, expected):
    save(Path("model"), causal_model(kind), tokenizer=False)
    assert exportable(ModelFolder(Path("model"))) is expected


def test_a_model_that_no_engine_runs_is_refused(here):
    save(Path("bloom"), causal_model("bloom"), tokenizer=False)
    with pytest.raises(CalibrateError, match="'bloom'"):
        exportable(ModelFolder(Path("bloom")))
