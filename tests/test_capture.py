"""Capture of the logits of a model's heads, and the way from them to a fit."""

from inspect import signature

import numpy as np
import pytest
import reference
import torch
from attention_cases import BY_BOTH
from commands import call
from tiny_families import FAMILIES, IDS, LENGTH, PADDED, POSITIONS, make_model
from tiny_models import IDS as FEW
from tiny_models import tiny_albert, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface

import calibrate
from calibrate.rows.logits_files import Arrays
from calibrate.transformers import apply, capture
from calibrate.transformers.attention import NAME

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TEXT = {"input_ids": FEW, "decoder_input_ids": FEW[:, :9]}
DECODER, ENCODER = "decoder.layers.*.self_attn", "encoder.layers.*.self_attn"


@pytest.fixture
def llama():
    return make_model("llama")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_captured_logits_are_those_behind_the_models_own_weights(family, padded, here):
    model = make_model(family)
    inputs = {"attention_mask": PADDED, "position_ids": POSITIONS} if padded else {}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(IDS, output_attentions=True, **inputs).attentions
        with capture(model, here / "captured") as recorder:
            recorder.next(query=[30, -1], target=[30, 38])
            ours = model(IDS, **inputs).logits
        np.testing.assert_allclose(ours[1], model(IDS, **inputs).logits[1], atol=2e-4)
    assert model.config._attn_implementation == "eager"
    (file,) = (here / "captured").iterdir()
    arrays = np.load(file)
    assert len(arrays["logits"]) + recorder.left_out == 2 * 4 * len(own)
    assert recorder.left_out == 0
    row = 0
    for layer, weights in enumerate(own):
        for sequence, query in ((0, 30), (1, 39)):
            for head in range(4):
                probs = reference.softmax(arrays["logits"][row])[:LENGTH]
                exact = weights[sequence, head, query, : len(probs)]
                np.testing.assert_allclose(probs[: len(exact)], exact, atol=2e-5)
                assert (arrays["layer"][row], arrays["head"][row]) == (layer, head)
                assert arrays["target"][row].nonzero()[0] == [(30, 38)[sequence]]
                row += 1


def test_layers_that_share_one_module_are_captured_by_the_order_of_its_calls(here):
    model = tiny_albert(vocab_size=60, num_attention_heads=4, num_hidden_layers=3)
    with torch.no_grad():
        own = model(IDS, output_attentions=True).attentions
        with capture(model, here / "captured", heads=[2]) as recorder:
            for query in (5, 7):  # the count begins anew in each forward pass
                recorder.next(query=query, target=3)
                model(IDS)
    for path, query in zip(sorted((here / "captured").iterdir()), (5, 7), strict=True):
        arrays = np.load(path)
        assert arrays["layer"].tolist() == [0, 0, 1, 1, 2, 2]
        for row, layer in enumerate(arrays["layer"]):
            probs = reference.softmax(arrays["logits"][row])
            np.testing.assert_allclose(probs, own[layer][row % 2, 2, query], atol=2e-6)


def test_from_a_model_to_a_fit_of_its_heads(llama, here):
    """Capture, collect, fit; with targets that are drawn at beta = 0.3."""
    rng = np.random.default_rng(0)
    with torch.no_grad(), capture(llama, here / "captured", layers=[1], heads=[0, 3]) as recorder:
        for length in rng.choice([10, 20], 60):
            recorder.next(query=-1, target=rng.integers(0, length, 4).tolist())
            llama(torch.tensor(rng.integers(1, 60, (4, length))))
    arrays = Arrays.read(here / "captured")
    assert arrays.heads == [(1, 0), (1, 3)]
    assert not arrays.sets_of_targets
    assert sum(map(arrays.count, arrays.sizes)) == 60 * 4 * 2
    for path in (here / "captured").iterdir():
        columns = dict(np.load(path))
        drawn = (0.3 * columns["logits"] + rng.gumbel(size=columns["logits"].shape)).argmax(1)
        columns |= {"target": drawn, "weight": np.ones(len(drawn), np.float32)}
        np.savez(path, **columns)
    call("collect", "--logits", "captured")
    call("fit", "runs/captured", "--name", "mine", "--kind", "constant")
    fit = calibrate.load("mine")
    assert [(entry.layer, entry.head) for entry in fit.entries] == arrays.heads
    betas = [entry.coefficients[0] for entry in fit.entries]
    np.testing.assert_allclose(betas, 0.3, rtol=0.2)
    apply(llama, fit)


def test_targets_out_of_sight_are_left_out_and_lost_keys_refused(here):
    model = make_model("mistral")  # with a window of 6
    with torch.no_grad(), capture(model, here / "captured") as recorder:
        recorder.next(query=20, target=[[3, 18], [3, 4]])
        model(IDS)
    assert recorder.left_out == 2 * 4
    (file,) = (here / "captured").iterdir()
    targets = np.load(file)["target"]
    assert all(row.nonzero()[0].tolist() == [18] for row in targets)
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"

    def run_on_the_last_token():
        cache = {name: getattr(model(IDS[:, :-1], use_cache=True), name)}
        with capture(model, here / "more") as recorder:
            recorder.next(query=-1, target=3)
            model(IDS[:, -1:], **cache)

    with torch.no_grad(), pytest.raises(calibrate.CalibrateError, match="6 keys at position 39"):
        run_on_the_last_token()


def test_a_calibrated_model_is_captured_as_it_runs_and_is_left_so_after_an_error(llama, here):
    apply(llama, BY_BOTH)
    with torch.no_grad():
        exact = llama(IDS).logits
    registers = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    before = [dict(register) for register in registers]

    def run():
        with torch.no_grad(), capture(llama, here / "captured") as recorder:
            recorder.next(query=-1, target=0)
            np.testing.assert_allclose(llama(IDS).logits, exact, atol=1e-5)
            raise RuntimeError("of the user's")

    with pytest.raises(RuntimeError, match="of the user's"):
        run()
    assert before == [dict(register) for register in registers]
    assert llama.config._attn_implementation == NAME
    with torch.no_grad():
        assert torch.equal(llama(IDS).logits, exact)


def test_capture_asks_which_part(here):
    model = apply(tiny_model("bart"), BY_BOTH)

    def captured(**options):
        with torch.no_grad(), capture(model, here / options.get("part", "all"), **options) as it:
            it.next(query=-1, target=3)
            model(**TEXT)

    message = rf"{DECODER}, {ENCODER}\b.*part="
    with pytest.raises(calibrate.CoefficientsError, match=message):
        captured()
    for part, keys in (("encoder_attn", 20), ("encoder.layers", 20), (DECODER, 9)):
        captured(part=part)
        arrays = np.load(here / part / "pass000000.npz")
        assert arrays["logits"].shape == (2 * 2 * 4, keys)
        assert set(arrays["layer"]) == {0, 1}
    model = apply(tiny_model("marian"), BY_BOTH)
    captured(part="decoder.layers.*.encoder_attn")
    captured(part=ENCODER)  # its modules have no layer_idx: they are counted as they run
    assert set(np.load(here / ENCODER / "pass000000.npz")["layer"]) == {0, 1}
    message = r"layer 0\b.*part="
    with pytest.raises(calibrate.CoefficientsError, match=message):
        captured(part="layers")
