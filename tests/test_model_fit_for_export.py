"""Fits through a model under what engines run: one kappa / b for all heads, and no bounds."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from commands import call
from rule_families import GLOBAL, HEADS, PER_HEAD, PER_LAYER, family, some_parameters
from test_model_examples import collected, write_lines
from test_model_fit import planted, through
from tiny_causal import causal_model, planted_examples, planted_model, save

from calibrate.core.rule import CONSTANT, LOG_SIZE, beta_of
from calibrate.errors import CalibrateError
from calibrate.export.numerical_check import exportable
from calibrate.export.plan import Exportable, make_plan
from calibrate.model.parameters import SHARED_SLOPE
from calibrate.store.saving import save_to_store
from calibrate.transformers import apply
from calibrate.transformers.folders import ModelFolder

SLOPES = [family(SHARED_SLOPE, sharing, 6.0, 7.0) for sharing in (PER_HEAD, PER_LAYER, GLOBAL)]
ANY = Exportable(PER_HEAD)
LOG_N = np.linspace(0, 20, 50)


def betas(fit, log_n=LOG_N):
    """(heads, sizes) by the file's own rule, with its bounds."""
    entries = [fit.entry_of(*name) for name in HEADS]
    return np.array([
        (beta_of(None, log_n, e.coefficients, e.domain, fit.rule, np) if e else 1) + 0 * log_n
        for e in entries
    ])  # fmt: skip


def ratios(fit):
    return np.array([e.coefficients[0] / e.coefficients[1] for e in fit.entries])


@pytest.mark.parametrize("slopes", SLOPES, ids=lambda slopes: slopes.sharing.name)
@pytest.mark.parametrize("scale", [0.1, 1.0, 100.0])
def test_beta_is_a_factor_times_one_line_at_every_n(slopes, scale):
    """For a step of any length, each head has a factor, and no bound is reached."""
    fit = some_parameters(slopes, scale).rules(HEADS)
    ratio, b = ratios(fit), np.array([e.coefficients[1] for e in fit.entries])
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-12)
    assert ratio[0] >= 0
    assert (b > 0).all()
    b = np.broadcast_to(b, len(HEADS))
    np.testing.assert_allclose(betas(fit), b[:, None] * (1 + ratio[0] * LOG_N), rtol=1e-12)
    plan = make_plan(fit, 2, 4, context=1 << 20)
    assert plan.ratio == pytest.approx(ratio[0])
    np.testing.assert_allclose([plan.factors[name] for name in HEADS], b)


def test_heads_without_a_factor_have_the_line_of_all_heads():
    parameters = SLOPES[0].baseline(HEADS)
    parameters.numbers[0, [2, -2, -1]] = 0.5, 0.1, 0.05
    fit = parameters.rules(HEADS)
    assert len(fit.entries) == 8
    assert parameters.heads_changed(HEADS) == [(0, 2)]
    at_center = betas(fit, np.array([6.0]))[:, 0]
    np.testing.assert_allclose(at_center, [1.1, 1.1, 1.65, *[1.1] * 5])
    parameters.numbers[0, -2:] = 0  # the baseline: those heads have no entry
    assert [(e.layer, e.head) for e in parameters.rules(HEADS).entries] == [(0, 2)]


@pytest.mark.parametrize("sharing", [GLOBAL, PER_LAYER, PER_HEAD])
@pytest.mark.parametrize("kind", [CONSTANT, LOG_SIZE, SHARED_SLOPE])
@pytest.mark.parametrize("slopes", SLOPES, ids=lambda slopes: slopes.sharing.name)
def test_a_simpler_rule_is_the_same_in_the_numbers_of_a_shared_slope(slopes, kind, sharing):
    simpler = some_parameters(family(kind, sharing, 6.0, 7.0), 0.5)
    same = slopes.embed(simpler, HEADS)
    contained = sharing is GLOBAL or (sharing is slopes.sharing and kind == CONSTANT)
    assert (same is not None) == contained
    if contained:
        sizes = LOG_N[simpler.family.basis.largest > LOG_N]
        np.testing.assert_allclose(
            betas(same.rules(HEADS), sizes), betas(simpler.rules(HEADS), sizes)
        )


def planted_for_size(folder):
    """Examples that gain by sharpening at 62 tokens, and lose by it at 5."""
    save(Path(folder), planted_model(), tokenizer=False)
    examples = planted_examples((3, 60), count=16).examples
    asked = [(f"n{e.cell}", e, e.tokens[-1]) for e in examples]
    asked += [("wrong", e, 10 + (e.tokens[-1] - 7) % 8) for e in examples if e.cell == 0]
    lines = [
        {"prompt_ids": e.tokens[: e.start].tolist(), "answer_ids": [int(answer)], "template": name}
        for name, e, answer in asked
    ]
    return collected(folder, f"{folder}-run", prompts=write_lines("p.jsonl", lines), templates=())


def test_a_fit_for_export_is_saved_and_exported(here):
    collection = planted_for_size("tiny")
    result = through(
        collection, max_steps=5, kind=LOG_SIZE, trained_up_to=5, max_kl=0.1, engines=ANY
    )
    fit = result.coefficients
    np.testing.assert_allclose(ratios(fit), ratios(fit)[0], rtol=1e-9)
    assert len(fit.entries) == 8
    assert ratios(fit)[0] > 0
    at_62 = betas(fit, np.log([62.0]))[:, 0]
    assert at_62[0] == at_62.max() > 1.1
    assert at_62[2] == at_62.min()
    assert fit.source["options"]["for_export"] is True
    assert result.solution.family.label == "log-size-one-ratio, each head"
    save_to_store(fit, Path("fits"))
    call("export", "x", "--model", "tiny", "--out", "exported")
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
    options = {"max_steps": 10, "kind": CONSTANT}
    free, result = (through(collection, engines=x, **options) for x in (None, ANY))
    assert result.coefficients.entries == free.coefficients.entries
    assert "for_export" not in free.coefficients.source["options"]
    by_layer = through(collection, engines=Exportable(PER_LAYER, "it is not a Llama"), **options)
    assert by_layer.solution.family.label == "constant, each layer"  # as Qwen3 has it
    betas_of = {e.layer: e.coefficients for e in by_layer.coefficients.entries}
    assert all(e.coefficients == betas_of[e.layer] for e in by_layer.coefficients.entries)


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {}, Exportable(PER_HEAD)),
        ("llama", {"attention_bias": True}, Exportable(PER_HEAD, "its projections have biases")),
        ("gemma2", {}, Exportable(GLOBAL, "it is a gemma2, and not a Llama or a Mistral")),
        ("qwen3", {}, Exportable(PER_LAYER, "it is a qwen3, and not a Llama or a Mistral")),
    ],
)
def test_the_rules_that_engines_run_are_known_before_a_fit(here, kind, changes, expected):
    save(Path("model"), causal_model(kind, **changes), tokenizer=False)
    assert exportable(ModelFolder(Path("model"))) == expected


def test_a_model_that_no_engine_runs_is_refused(here):
    save(Path("bloom"), causal_model("bloom"), tokenizer=False)
    with pytest.raises(CalibrateError, match="'bloom'"):
        exportable(ModelFolder(Path("bloom")))
