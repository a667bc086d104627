"""`verify` proves by one forward pass that a fit reaches all attention; parts of a model."""

import inspect
import re
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from tiny_models import IDS, possible_inputs, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import calibrate
from calibrate.report import streams
from calibrate.transformers import capture, register, verify
from calibrate.transformers.folders import in_one_line

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
DECODED = IDS[:, :9]


@pytest.fixture(autouse=True)
def fits(make_fit):
    register("identity", calibrate.identity())
    register("sharp", make_fit((0.0, 0.0, 0.0, 0.0, 3.0)))


@pytest.fixture
def layered(make_fit):
    """beta = 3 in layer 0."""
    fit = make_fit((0.0, 0.0, 0.0, 0.0, 3.0))
    return replace(fit, entries=(replace(fit.only, layer=0),))


def with_fit(model_type, name):
    model = tiny_model(model_type)
    model.set_attn_implementation(name)
    return model


def outputs(model, name, **inputs):
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model(**inputs)


@pytest.mark.parametrize(
    ("model_type", "path", "name"),
    [
        ("pegasus_x", "encoder.layers.*.self_attn", "PegasusXGlobalLocalAttention"),
        ("longt5", "encoder.block.*.layer.*.LocalSelfAttention", "LongT5LocalAttention"),
        ("bigbird_pegasus", "encoder.layers.*.self_attn.self", "BigBirdPegasusSelfAttention"),
        ("siglip_vision_model", "head.attention", "MultiheadAttention"),
    ],
)
def test_attention_that_stays_plain_is_named(model_type, path, name):
    """Planted: models that look attention up in some modules, and not in these."""
    model = with_fit(model_type, "sharp")
    inputs = next(possible_inputs(model))
    outputs(model, "identity", **inputs)  # one of them replaces its modules at first
    model.set_attn_implementation("sharp")
    for run in (partial(verify, model), partial(outputs, model, "sharp")):
        with pytest.raises(calibrate.CoefficientsError) as failure:
            run(**inputs)
        named = f"{type(model).__name__} keeps plain softmax in {path} ({name}); "
        assert named in str(failure.value)
    verify(model, plain=[name], **inputs)
    outputs(model, "sharp", **inputs)


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


def test_attention_is_known_by_what_it_does():
    model = with_fit("phi3", "sharp")
    model.layers[0].mlp = Chooser()
    verify(model)
    model.layers[1].mlp = Mixer()
    with pytest.raises(calibrate.CoefficientsError, match="Mixer"):
        verify(model)


@pytest.mark.parametrize("model_type", ["mixtral", "albert", "t5", "bart"])
def test_models_of_which_all_attention_is_reached(model_type):
    verify(with_fit(model_type, "sharp"))


@contextmanager
def counted_calls(model):
    """A list with an item for each call of the model."""
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    yield calls
    hook.remove()


@pytest.mark.parametrize("training", [False, True])
def test_the_first_call_verifies_a_model(layered, training):
    """Nothing else is called, and what comes out is what a verified model gives, gradients too."""
    register("layered", layered)
    found = []
    for by_hand in (True, False):
        model = with_fit("llama", "layered").train(training)
        if by_hand:
            verify(model)
        with counted_calls(model) as calls:
            for _ in range(2):
                out = model(IDS).last_hidden_state
        assert len(calls) == (2 if by_hand else 3)
        assert model.training == training
        out.sum().backward()
        found.append((out, next(model.parameters()).grad))
    for verified, at_first in zip(*found, strict=True):
        assert torch.equal(verified, at_first)
    assert not torch.allclose(found[0][0], outputs(model, "identity", input_ids=IDS)[0])


def test_generation_verifies_a_model(layered):
    register("layered", layered)
    greedy = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    of_kind = transformers.LlamaForCausalLM
    models = [of_kind(tiny_model("llama").config).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model.set_attn_implementation("layered")
    verify(models[0])
    assert torch.equal(*(model.generate(IDS, **greedy) for model in models))


def test_a_model_is_verified_in_the_middle_of_a_text():
    """Its cache has keys of other calls, so that the call cannot be repeated."""
    for mixes in (False, True):
        model = with_fit("llama", "identity")
        if mixes:
            model.layers[1].mlp = Mixer()
        cache = model(IDS[:1, :5], use_cache=True).past_key_values
        model.set_attn_implementation("sharp")
        known = inspect.signature(inspect.unwrap(model.forward)).parameters
        name = "cache" if "cache" in known else "past_key_values"  # in older versions
        if mixes:
            with pytest.raises(calibrate.CoefficientsError, match="Mixer"):
                model(IDS[:1, 5:6], **{name: cache})
            continue
        with counted_calls(model) as calls:
            out = model(IDS[:1, 5:6], **{name: cache}).last_hidden_state
        assert len(calls) == 2
        assert cache.get_seq_length() == 6
        assert out.shape[1] == 1


def test_parts_that_run_later_are_verified_when_they_do():
    model = with_fit("llava", "sharp")
    image = torch.randn(1, 3, *[model.config.vision_config.image_size] * 2)
    model(input_ids=IDS)
    model.vision_tower(image)
    model = with_fit("llava", "sharp")
    model.vision_tower.encoder.layers[0].mlp = Mixer()
    model(input_ids=IDS)
    with pytest.raises(calibrate.CoefficientsError, match="Mixer"):
        model.vision_tower(image)


def test_attention_that_is_called_by_itself_is_not_verified():
    model = with_fit("llama", "sharp")
    x = torch.randn(1, 4, model.config.hidden_size)
    positions = model.rotary_emb(x, torch.arange(4)[None])
    out, _ = model.layers[0].self_attn(x, positions, attention_mask=None)
    assert out.isfinite().all()


@pytest.mark.slow
def test_a_compiled_model_is_not_verified_by_its_call(layered):
    register("layered", layered)
    model = torch.compile(with_fit("llama", "layered"), backend="eager")
    with torch.no_grad():
        with pytest.raises(Exception, match=r"call verify\(model\) first"):
            model(IDS)
        verify(model)
        model(IDS)


def test_what_does_not_run_is_named():
    model = with_fit("llava", "sharp")
    message = "vision_tower.encoder.layers.*CLIPAttention"
    with pytest.raises(calibrate.CoefficientsError, match=message):
        verify(model)
    verify(model, plain=["CLIPAttention"])
    verify(model, plain=["vision_tower"])
    verify(model, plain="vision_tower")
    with pytest.raises(calibrate.CoefficientsError, match=message):
        verify(model, plain="language_model")
    decoder = transformers.BartForCausalLM(tiny_model("bart").config)
    decoder.set_attn_implementation("sharp")
    with pytest.raises(calibrate.CoefficientsError, match="model.decoder.*encoder"):
        verify(decoder)
    verify(decoder, input_ids=DECODED, encoder_hidden_states=torch.randn(2, 5, 32))


class MyAttention(torch.nn.Module):
    """Attention that no forward pass reaches."""


def test_an_exception_is_a_whole_class_name_or_a_piece_of_a_path():
    model = with_fit("llama", "sharp")
    model.spare = MyAttention()
    for other in ("Attention", "My", "MyAttentionToo"):
        with pytest.raises(calibrate.CoefficientsError, match="spare"):
            verify(model, plain=[other])
    for exception in ("MyAttention", "spare", "par"):
        verify(model, plain=[exception])


@pytest.mark.parametrize(
    ("replace_function", "what"),
    [
        (lambda: AttentionInterface.register("taken", lambda *_, **__: None), "attention"),
        (lambda: AttentionInterface._global_mapping.pop("taken"), "attention"),
        (lambda: ALL_ATTENTION_FUNCTIONS.update(taken=lambda *_, **__: None), "attention"),
        (lambda: AttentionMaskInterface.register("taken", lambda *_, **__: None), "mask"),
        (lambda: ALL_MASK_ATTENTION_FUNCTIONS.update(taken=lambda *_, **__: None), "mask"),
    ],
)
def test_a_name_that_was_registered_anew_is_not_vouched_for(replace_function, what, monkeypatch):
    """Whether for all lookups of Transformers, or in the one mapping that models look into."""
    for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        monkeypatch.setattr(interface, "_local_mapping", {})
    register("taken", calibrate.load("paper"))
    model = with_fit("llama", "taken")
    verify(model)
    replace_function()
    message = rf"'taken' .*paper@1: .*\b{what} "
    with pytest.raises(calibrate.CoefficientsError, match=message):
        verify(model)
    with pytest.raises(calibrate.CoefficientsError, match=message), capture(model, "captured"):
        pass
    for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        interface._local_mapping.clear()
    register("taken", calibrate.load("paper"))  # the name is the fit's again
    verify(model)


def test_inputs_are_asked_for():
    model = with_fit("whisper", "sharp")
    with pytest.raises(calibrate.CoefficientsError, match="WhisperModel"):
        verify(model)
    verify(model, input_features=torch.randn(1, 80, 256), decoder_input_ids=DECODED[:1])
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'input_features'"):
        verify(model.encoder, nonsense=1)  # what is wrong with inputs that are given


def test_the_model_is_left_as_it_was():
    model = with_fit("mixtral", "sharp").train()
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before, state = dict(AttentionInterface._global_mapping), torch.get_rng_state()
    verify(model)
    with pytest.raises(IndexError):
        verify(model, input_ids=IDS + 99)  # beyond the vocabulary
    verify(torch.compile(model))  # compiles nothing
    assert modes == [module.training for module in model.modules()]
    assert before == dict(AttentionInterface._global_mapping)
    assert (state == torch.get_rng_state()).all()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


TEXT = {"input_ids": IDS, "decoder_input_ids": DECODED}
CROSS, DECODER = "decoder.layers.*.encoder_attn", "decoder.layers.*.self_attn"
ENCODER = "encoder.layers.*.self_attn"


def test_layer_numbers_that_mean_several_things_are_refused(layered):
    register("layered", layered)
    model = with_fit("bart", "layered")
    with pytest.raises(calibrate.CoefficientsError) as failure:
        verify(model)
    assert f"{CROSS}, {DECODER}, {ENCODER}; " in str(failure.value)
    with pytest.raises(calibrate.CoefficientsError, match=r"layer 0\b.*part="):
        outputs(model, "layered", **TEXT)  # though somebody caught the first error
    register("layered", layered, part="decoder")
    with pytest.raises(calibrate.CoefficientsError, match=re.escape(f"{CROSS}, {DECODER}; ")):
        verify(model)
    register("layered", layered, part="dec.self")
    with pytest.raises(calibrate.CoefficientsError, match="part 'dec.self'"):
        verify(model)
    verify(with_fit("llama", "identity"))


def test_a_layer_that_another_part_has_alone_is_absent(layered):
    second = replace(layered, entries=(replace(layered.entries[0], layer=1),))
    register("layered", second, part=DECODER)
    model = with_fit("bart", "layered")
    verify(model)
    model.decoder.layers = model.decoder.layers[:1]
    with pytest.raises(calibrate.CoefficientsError, match=r"\[1\].*Bart"):
        verify(model)


@pytest.mark.parametrize("part", [CROSS, DECODER, ENCODER])
def test_a_fit_of_one_part_leaves_the_others(part, layered):
    register("layered", layered, part=part)
    register("all-of-part", layered.layer(0), part=part)
    model = with_fit("bart", "layered")
    verify(model)
    ours = outputs(model, "layered", **TEXT)
    path, end = part.split(".layers.*.")
    sharp = getattr(model.get_submodule(path).layers[0], end)

    def by_hand(module, *arguments, **options):
        name = "sharp" if module is sharp else "identity"
        return AttentionInterface()[name](module, *arguments, **options)

    AttentionMaskInterface.register("of-modules", ALL_MASK_ATTENTION_FUNCTIONS["layered"])
    AttentionInterface.register("of-modules", by_hand)
    exact, plain = (outputs(model, name, **TEXT) for name in ("of-modules", "identity"))
    np.testing.assert_allclose(ours[0], exact[0], atol=1e-5)
    assert (ours[0] - plain[0]).abs().max() > 0.01
    assert (outputs(model, "all-of-part", **TEXT)[0] - ours[0]).abs().max() > 0.01
    unchanged = torch.equal(ours.encoder_last_hidden_state, plain.encoder_last_hidden_state)
    assert unchanged == ("encoder.layers" not in part)


def test_capture_asks_which_part(here):
    model = with_fit("bart", "sharp")

    def run(**options):
        with torch.no_grad(), capture(model, here / options.get("part", "all"), **options) as it:
            it.next(query=-1, target=3)
            model(**TEXT)

    message = rf"{DECODER}, {ENCODER}\b.*part="
    with pytest.raises(calibrate.CoefficientsError, match=message):
        run()
    for part, keys in (("encoder_attn", 20), ("encoder.layers", 20), (DECODER, 9)):
        run(part=part)
        arrays = np.load(here / part / "pass000000.npz")
        assert arrays["logits"].shape == (2 * 2 * 4, keys)
        assert set(arrays["layer"]) == {0, 1}
    model = with_fit("marian", "sharp")
    run(part="decoder.layers.*.encoder_attn")
    run(part=ENCODER)  # its modules have no layer_idx: they are counted as they run
    assert set(np.load(here / ENCODER / "pass000000.npz")["layer"]) == {0, 1}
    message = r"layer 0\b.*part="
    with pytest.raises(calibrate.CoefficientsError, match=message):
        run(part="layers")


def test_lines_of_other_threads_are_seen_while_a_model_loads(capsys):
    """`calibrate` says that it is still at work; bars and whatever loading prints stay quiet."""
    with in_one_line("cannot load"):
        print("a bar", file=sys.stderr)
        for write, text in ((sys.stderr.write, "\rbar"), (streams.stderr.print, "still at work")):
            thread = threading.Thread(target=write, args=(text,))
            thread.start()
            thread.join()
    assert capsys.readouterr().err.splitlines() == ["still at work"]
