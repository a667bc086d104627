"""`apply` verifies by one forward pass that a fit reaches all attention; parts of a model."""

import copy
import io
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from commands import call
from tiny_causal import causal_model, save
from tiny_gguf import small_model, write_gguf
from tiny_models import IDS, possible_inputs, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface

import calibrate
from calibrate.core.rule import RuleForm
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit
from calibrate.transformers import apply, capture
from calibrate.transformers.applying import applied_fit
from calibrate.transformers.attention import NAME, attend_with, get_module_fit, register
from calibrate.transformers.betas import head_betas
from calibrate.transformers.folders import ModelFolder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
DECODED = IDS[:, :9]
TEXT = {"input_ids": IDS, "decoder_input_ids": DECODED}
CROSS, DECODER = "decoder.layers.*.encoder_attn", "decoder.layers.*.self_attn"
ENCODER = "encoder.layers.*.self_attn"


@pytest.fixture
def sharp(make_fit):
    return make_fit((0.0, 0.0, 0.0, 0.0, 3.0))


@pytest.fixture
def layered(sharp):
    """beta = 3 in layer 0."""
    return replace(sharp, entries=(replace(sharp.only, layer=0),))


def run(model, **inputs):
    with torch.no_grad():
        return model(**inputs or {"input_ids": IDS})[0]


def refused(match, model, fit, error=calibrate.CoefficientsError, **options):
    """Asserts that a fit is refused, and that the model is as before."""
    models = [x for x in model.modules() if isinstance(x, transformers.PreTrainedModel)]
    before = [x.config._attn_implementation for x in models]
    names = set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)
    with pytest.raises(error, match=match):
        apply(model, fit, **options)
    assert before == [x.config._attn_implementation for x in models]
    assert names == (
        set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "path", "name", "part"),
    [
        ("pegasus_x", "encoder.layers.*.self_attn", "PegasusXGlobalLocalAttention", "decoder"),
        ("longt5", "encoder.block.*.layer.*.LocalSelfAttention", "LongT5LocalAttention", "decoder"),
        ("bigbird_pegasus", "encoder.layers.*.self_attn.self", "BigBirdPegasusSelfAttention",
         "decoder"),
        ("siglip_vision_model", "head.attention", "MultiheadAttention", "encoder"),
    ],
)  # fmt: skip
def test_attention_that_stays_plain_is_named(model_type, path, name, part, sharp):
    """Planted: models that look attention up in some modules, and not in these."""
    model = tiny_model(model_type)
    inputs = next(possible_inputs(model))
    before = run(model, **inputs)
    model_name = type(model).__name__
    message = rf"^{model_name} .*{re.escape(path)} \({name}\)"
    refused(message, model, sharp, **inputs)
    assert torch.equal(run(model, **inputs), before)
    apply(model, sharp, part=part, **inputs)
    assert (run(model, **inputs) - before).abs().max() > 0.01


class Mixer(torch.nn.Module):
    """Attention by another name, whose weights are masked, cast and cut before they weigh."""

    def forward(self, x):
        weights = (x @ x.mT).softmax(-1).double()
        return (weights * (weights > 1e-3))[..., :4].float() @ x[:, :4]


class Chooser(torch.nn.Module):
    """No attention: softmax chooses and scales."""

    def forward(self, x):
        weights, at = x[..., :4].softmax(-1).topk(2)
        return x.gather(-1, at).repeat(1, 1, 16) * weights[..., :1]


def test_attention_is_known_by_what_it_does(sharp):
    model = tiny_model("phi3")
    model.layers[0].mlp = Chooser()
    apply(model, sharp)
    model.layers[1].mlp = Mixer()
    refused("Mixer", model, sharp)
    apply(model, sharp, part="self_attn")  # of which the mixer is not


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "bert", "vit", "albert", "t5", "bart"])
def test_models_of_which_all_attention_is_reached(model_type, sharp):
    model = tiny_model(model_type)
    inputs = {} if "input_ids" in model.main_input_name else next(possible_inputs(model))
    given = inputs or (TEXT if model.config.is_encoder_decoder else {})
    before = run(model, **given)
    assert apply(model, sharp, **inputs) is model
    sharpened = run(model, **given)
    assert (sharpened - before).abs().max() > 0.01
    apply(model, calibrate.identity(), **inputs)  # takes the place of the other fit
    torch.testing.assert_close(run(model, **given), before, atol=1e-3, rtol=0)
    model.set_attn_implementation("eager")
    assert torch.equal(run(model, **given), before)


def test_a_model_that_was_not_verified_raises(sharp):
    model = tiny_model("llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(calibrate.CoefficientsError, match=r"LlamaAttention .*apply\("):
        run(model)
    with pytest.raises(calibrate.CoefficientsError, match="LlamaAttention"):
        causal_model(attn_implementation=NAME).generate(IDS, max_new_tokens=2)
    attention, x = model.layers[0].self_attn, torch.randn(1, 4, model.config.hidden_size)
    positions = model.rotary_emb(x, torch.arange(4)[None])
    with pytest.raises(calibrate.CoefficientsError, match="LlamaAttention"):
        attention(x, positions, attention_mask=None)
    apply(model, sharp)
    assert attention(x, positions, attention_mask=None)[0].isfinite().all()


@pytest.mark.slow
def test_a_compiled_model_is_verified_too(sharp):
    model = tiny_model("llama")
    model.set_attn_implementation(NAME)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), pytest.raises(calibrate.CoefficientsError, match="LlamaAttention"):
        compiled(IDS)
    torch.compiler.reset()
    for fit in (sharp, calibrate.identity()):
        assert apply(compiled, fit) is compiled
        torch.testing.assert_close(run(compiled), run(model))


def test_copies_and_pickles_keep_the_fit(layered):
    model = tiny_model("llama")
    plain, ours = run(model), run(apply(model, layered))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(run(other), ours)
        apply(other, calibrate.identity())
        torch.testing.assert_close(run(other), plain, atol=1e-4, rtol=0)
    assert torch.equal(run(model), ours)


def test_a_saved_model_is_loaded_without_the_fit(here, layered):
    """Whoever loads it applies the fit anew, or is told to."""
    model = tiny_model("llama")
    plain = run(model)
    apply(model, layered).save_pretrained(here / "saved")
    load = type(model).from_pretrained
    torch.testing.assert_close(run(load(here / "saved")), plain)
    loaded = load(here / "saved", attn_implementation=NAME)
    with pytest.raises(calibrate.CoefficientsError, match="LlamaAttention"):
        run(loaded)
    assert torch.equal(run(apply(loaded, layered)), run(model))


def test_what_does_not_run_is_named(sharp):
    model = tiny_model("llava")
    image = torch.randn(1, 3, *[model.config.vision_config.image_size] * 2)
    message = r"vision_tower.encoder.layers.*CLIPAttention.*\*\*inputs"
    refused(message, model, sharp)
    refused(message, model, sharp, part="vision_tower")
    before = model.vision_tower(image)[0]
    apply(model, sharp, part="language_model")
    assert torch.equal(run(model), run(apply(copy.deepcopy(model.language_model), sharp)))
    torch.testing.assert_close(model.vision_tower(image)[0], before, atol=1e-4, rtol=0)
    decoder = transformers.BartForCausalLM(tiny_model("bart").config)
    refused("model.decoder.*encoder", decoder, sharp)
    apply(decoder, sharp, input_ids=DECODED, encoder_hidden_states=torch.randn(2, 5, 32))


class MyAttention(torch.nn.Module):
    """Attention that no forward pass reaches."""


def test_attention_that_no_pass_reaches_is_named(sharp):
    model = tiny_model("llama")
    model.spare = MyAttention()
    refused("spare.*MyAttention", model, sharp)
    apply(model, sharp, part="layers")


def test_attention_that_replaces_a_verified_module_raises(sharp):
    model = apply(tiny_model("llama"), sharp)
    layer = model.layers[1]
    layer.self_attn = type(layer.self_attn)(model.config, 1)
    with pytest.raises(calibrate.CoefficientsError, match="LlamaAttention"):
        run(model)


def test_models_without_attention_that_could_take_a_fit(sharp):
    """Planted: Bloom takes any registered name, and looks none up."""
    refused("^BloomForCausalLM ", causal_model("bloom"), sharp)
    mamba = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=9)
    refused("MambaModel", transformers.MambaModel(mamba), sharp)
    refused("'paper'", tiny_model("llama"), "paper")


def test_every_part_of_a_model_is_verified(sharp):
    """Planted: of a vision encoder and a text decoder, the latter falls back to its own code."""
    encoder = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=16, patch_size=8,
    )  # fmt: skip
    decoder = transformers.TrOCRConfig(
        d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16, vocab_size=9
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = transformers.VisionEncoderDecoderModel(config).eval()
    image, ids = torch.randn(1, 3, 16, 16), torch.arange(5)[None]
    inputs = {"pixel_values": image, "decoder_input_ids": ids}
    refused("TrOCRForCausalLM", model, sharp, **inputs)
    refused("TrOCRForCausalLM", model, sharp, part="decoder.", **inputs)
    apply(model.encoder, sharp, pixel_values=image)
    before = run(model.encoder, pixel_values=image)
    apply(model, sharp, part="encoder.", **inputs)
    assert torch.equal(run(model.encoder, pixel_values=image), before)


def test_inputs_are_asked_for(sharp):
    model = tiny_model("whisper")
    refused(r"WhisperModel .*\*\*inputs", model, sharp)
    sound = {"input_features": torch.randn(1, 80, 256), "decoder_input_ids": DECODED[:1]}
    apply(model, sharp, **sound)
    # What is wrong with inputs that are given is said by the model.
    refused("input_features", model.encoder, sharp, TypeError, nonsense=1)


def test_the_model_is_left_as_it_was(sharp):
    model = tiny_model("mixtral").train()
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before, state = dict(AttentionInterface._global_mapping), torch.get_rng_state()
    apply(model, sharp)
    refused("index", model, sharp, IndexError, input_ids=IDS + 99)  # beyond the vocabulary
    refused(r"\[7\]", model, replace(sharp, entries=(replace(sharp.only, layer=7),)))
    apply(torch.compile(model), sharp)  # compiles nothing
    assert modes == [module.training for module in model.modules()]
    assert before == dict(AttentionInterface._global_mapping)
    assert (state == torch.get_rng_state()).all()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert {get_module_fit(layer.self_attn) for layer in model.layers} == {
        sharp
    }  # not that of layer 7


def test_a_fit_that_fails_leaves_the_one_before(sharp, layered):
    model = apply(tiny_model("llama"), sharp)
    before = run(model)
    refused(r"\[2\].*Llama", model, replace(sharp, entries=(replace(sharp.only, layer=2),)))
    refused("head 4", model, replace(sharp, entries=(replace(sharp.only, head=4),)))
    assert torch.equal(run(model), before)
    apply(model, layered)
    assert not torch.equal(run(model), before)
    del model.layers[0].self_attn.layer_idx
    refused("layer_idx", model, layered)


def test_heads_of_layers_take_their_own_entries(sharp):
    """beta = 3 in one head multiplies its queries by 3."""
    model = causal_model()
    entry = replace(sharp.only, layer=1, head=2)
    apply(model, replace(sharp, rule=RuleForm(min_entropy=0.0), entries=(entry,)))
    found, by_hand = run(model), causal_model()
    by_hand.model.layers[1].self_attn.q_proj.weight[2 * 8 : 3 * 8] *= 3
    torch.testing.assert_close(found, run(by_hand), atol=1e-4, rtol=0)


@pytest.mark.parametrize("distributed", [True, False])
def test_heads_that_are_a_part_of_the_models_have_no_names(distributed, sharp, monkeypatch, here):
    """Each process counts its own from 0; in one process, a layer may have fewer than others."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: distributed)
    model, entry = causal_model(), replace(sharp.only, head=0)
    model.config.num_attention_heads = 8  # its queries have four

    def captured():
        with capture(model, here / "captured") as recorder:
            recorder.next(query=-1, target=3)
            run(model)

    def with_head_betas():
        with head_betas(model):
            pass

    apply(model, sharp)
    for name_heads in (
        partial(apply, model, replace(sharp, entries=(entry,))), with_head_betas, captured
    ):  # fmt: skip
        refusal = pytest.raises(calibrate.CoefficientsError, match="4 of 8 .*tensor parallelism")
        with refusal if distributed else nullcontext():
            name_heads()


SHARDED = """
import sys, torch
from dataclasses import replace
import calibrate
from calibrate.transformers import apply
from transformers import AutoModelForCausalLM

folder, rank = sys.argv[1], sys.argv[2]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2
)
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
fit = calibrate.load(f"{folder}/fit.json")
try:
    apply(model, replace(fit, entries=tuple(replace(fit.only, head=i) for i in (0, 1))))
except calibrate.CoefficientsError as refusal:
    assert "tensor parallelism" in str(refusal), refusal
else:
    raise AssertionError("a fit per head was applied")
apply(model, fit)
with torch.no_grad():
    torch.save(model(torch.arange(20)[None]).logits, f"{folder}/{rank}.pt")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="gloo")
def test_two_processes_with_half_the_heads_each(sharp, here):
    """A fit of all heads alike is applied to each half; one that names heads is refused."""
    model = causal_model()
    model.save_pretrained(here)
    sharp.save(here / "fit.json")
    command = [sys.executable, "-c", SHARDED, str(here)]
    ranks = {str(i): os.environ | {"RANK": str(i), "LOCAL_RANK": str(i), "WORLD_SIZE": "2"}
             for i in (0, 1)}  # fmt: skip
    running = [subprocess.Popen([*command, rank], env=env) for rank, env in ranks.items()]
    assert [process.wait(120) for process in running] == [0, 0]
    expected = run(apply(model, sharp), input_ids=torch.arange(20)[None])
    for rank in ranks:
        torch.testing.assert_close(torch.load(here / f"{rank}.pt"), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["folder", ".gguf"])
def test_an_export_takes_no_second_fit(kind, here):
    fit = Fit(RuleForm.constant(0.5, 4.0), (Entry((2.0,)),), name="first")
    fit.save(here / "fit.json")
    if kind == "folder":
        model, out = save(here / "model", causal_model()), here / "out"
    else:
        model, out = write_gguf(here / "model", small_model()) / "tiny.gguf", here / "out.gguf"
    call("export", here / "fit.json", "--model", model, "--out", out)
    exported = ModelFolder(out).load("float32")
    before = run(exported)
    with pytest.raises(calibrate.CoefficientsError, match="first@1"):
        apply(exported, fit)
    with (
        head_betas(exported) as heads,
        pytest.raises(calibrate.CoefficientsError, match="first@1"),
        applied_fit(exported, fit, heads.modules),
    ):
        pass
    apply(exported, calibrate.identity())
    torch.testing.assert_close(run(exported), before, atol=1e-3, rtol=0)


def test_layer_numbers_that_mean_several_things_are_refused(layered):
    model = tiny_model("bart")
    refused(re.escape(f"{CROSS}, {DECODER}, {ENCODER}; "), model, layered)
    refused(re.escape(f"{CROSS}, {DECODER}; "), model, layered, part="decoder")
    refused("'dec.self'", model, layered, part="dec.self")


def test_a_layer_that_another_part_has_alone_is_absent(layered):
    second = replace(layered, entries=(replace(layered.entries[0], layer=1),))
    model = apply(tiny_model("bart"), second, part=DECODER)
    model.decoder.layers = model.decoder.layers[:1]
    refused(r"\[1\].*Bart", model, second, part=DECODER)


def by_module(fits):
    """Attention with a fit for each of some modules."""

    def attend(module, *arguments, **options):
        return attend_with(fits.get(module, calibrate.identity()), module, *arguments, **options)

    return attend


@pytest.mark.parametrize("part", [CROSS, DECODER, ENCODER])
def test_a_get_module_fit_one_part_leaves_the_others(part, layered, sharp):
    model = tiny_model("bart")
    plain = run(apply(model, calibrate.identity()), **TEXT)
    ours = run(apply(model, layered, part=part), **TEXT)
    path, end = part.split(".layers.*.")
    module = getattr(model.get_submodule(path).layers[0], end)
    register("of-modules", by_module({module: sharp}))
    model.set_attn_implementation("of-modules")
    np.testing.assert_allclose(ours, run(model, **TEXT), atol=1e-5)
    assert (ours - plain).abs().max() > 0.01
    model.set_attn_implementation(NAME)
    whole_part = run(apply(model, sharp, part=part), **TEXT)
    assert (whole_part - ours).abs().max() > 0.01
    model.set_attn_implementation("eager")
    encoded = run(model.encoder, input_ids=IDS)
    apply(model, layered, part=part)
    same = torch.allclose(run(model.encoder, input_ids=IDS), encoded, atol=1e-4)
    assert same == ("encoder.layers" not in part)


def test_parts_take_fits_of_their_own(layered, sharp, make_fit):
    soft = make_fit((0.0, 0.0, 0.0, 0.0, 0.5))
    model = apply(tiny_model("bart"), layered, part=DECODER)
    apply(model, soft, part="encoder_attn")
    both = run(model, **TEXT)
    cross = {layer.encoder_attn: soft for layer in model.decoder.layers}
    register("of-modules", by_module(cross | {model.decoder.layers[0].self_attn: sharp}))
    model.set_attn_implementation("of-modules")
    np.testing.assert_allclose(both, run(model, **TEXT), atol=1e-5)
    # After stock attention no part has a fit but the one that is given.
    apply(model, soft, part="encoder_attn")
    register("of-modules", by_module(cross))
    alone = run(model, **TEXT)
    model.set_attn_implementation("of-modules")
    np.testing.assert_allclose(alone, run(model, **TEXT), atol=1e-5)
    whole = run(apply(model, sharp), **TEXT)
    assert torch.equal(whole, run(apply(tiny_model("bart"), sharp), **TEXT))
