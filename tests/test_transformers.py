"""Fits inside Hugging Face's models: tiny ones, with random weights large enough to matter."""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from attention_cases import BY_BOTH, BY_SIZE, expected
from tiny_families import FAMILIES, IDS, LENGTH, PADDED, POSITIONS, make_model
from tiny_models import tiny_albert, tiny_configuration, tiny_model
from transformers import AttentionInterface

import calibrate
from calibrate.core.rule import RuleForm
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit
from calibrate.transformers import apply
from calibrate.transformers.attention import NAME, attend_with

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PAPER = calibrate.load("paper")
BY_FIT = pytest.mark.parametrize("fit", [PAPER, BY_BOTH], ids=["paper", "by both"])


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param, make_model(request.param)


@pytest.fixture
def llama():
    return make_model("llama")


def use(model, attention):
    """Gives a model a fit, or attention of its own by name."""
    if isinstance(attention, str):
        model.set_attn_implementation(attention)
    else:
        apply(model, attention)


def logits(model, attention, ids=IDS, **inputs):
    use(model, attention)
    with torch.no_grad():
        return model(ids, **inputs).logits


@pytest.mark.parametrize("padded", [False, True])
def test_identity_is_the_models_own(family, padded):
    """Causality, padding, windows, groups, soft-cap and sinks survive."""
    _, model = family
    inputs = {"attention_mask": PADDED, "position_ids": POSITIONS} if padded else {}
    own, ours = (logits(model, name, **inputs) for name in ("eager", calibrate.identity()))
    real = PADDED.bool() if padded else slice(None)
    np.testing.assert_allclose(ours[real], own[real], atol=2e-4)


@BY_FIT
def test_a_fit_changes_it_and_no_token_sees_later_ones(family, fit):
    _, model = family
    plain, sharpened = (logits(model, name) for name in ("eager", fit))
    assert (plain - sharpened).abs().max() > 0.05
    later = IDS.clone()
    later[:, 15:] = 5
    np.testing.assert_allclose(logits(model, fit, later)[:, :15], sharpened[:, :15], atol=1e-4)
    assert (logits(model, fit, later)[:, 15:] - sharpened[:, 15:]).abs().max() > 0.05


def test_padding_changes_nothing(family):
    _, model = family
    padded = logits(model, BY_BOTH, attention_mask=PADDED, position_ids=POSITIONS)[0, 7:]
    alone = logits(model, BY_BOTH, IDS[:1, 7:])[0]
    np.testing.assert_allclose(padded, alone, atol=1e-4)


@pytest.mark.parametrize(
    ("cache", "padded"),
    [
        ("dynamic", True), ("static", False),
        *(pytest.param(*case, marks=pytest.mark.slow)
          for case in (("dynamic", False), ("static", True))),
    ],
)  # fmt: skip
def test_generation_with_a_cache_is_the_full_forward_pass(family, cache, padded):
    _, model = family
    prompt_mask = PADDED if padded else torch.ones_like(PADDED)
    apply(model, PAPER)
    # A cache of a fixed size is compiled where the model allows it; here it is to be checked.
    static = {"cache_implementation": "static", "disable_compile": True}
    options = static if cache == "static" else {}
    with torch.no_grad():
        out = model.generate(
            IDS, attention_mask=prompt_mask, max_new_tokens=4, do_sample=False, output_logits=True,
            return_dict_in_generate=True, **options,
        )  # fmt: skip
    ones = torch.ones(2, 4, dtype=torch.long)
    mask = torch.cat([prompt_mask, ones], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    full = logits(model, PAPER, out.sequences, attention_mask=mask, position_ids=positions)
    np.testing.assert_allclose(torch.stack(out.logits, 1), full[:, LENGTH - 1 : -1], atol=2e-4)


MASKS = {
    "none": lambda real: None,
    "bool": lambda real: real,
    **{
        f"{low:.3g}": lambda real, low=low: torch.where(real, 0.0, low)
        for low in (torch.finfo(torch.float32).min, -torch.inf, -10_000.0, -9_984.0)
    },
}


@BY_FIT
@pytest.mark.parametrize("kind", MASKS)
def test_masks_as_they_arrive(kind, fit, llama, monkeypatch):
    """Bool, additive, or not at all: causality holds, and masked keys do not count.

    A row of finite padding alone is one of keys that are all alike, as in stock softmax.
    """
    apply(llama, fit)  # before a spy takes the place of what is registered
    calls = []
    inner = AttentionInterface()[NAME]

    def spy(module, query, key, value, attention_mask, **options):
        out = inner(module, query, key, value, attention_mask, **options)
        calls.append((module, query, key, value, attention_mask, out[0]))
        return out

    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, spy)
    real = torch.ones(LENGTH, LENGTH, dtype=bool).tril().expand(2, 1, LENGTH, LENGTH)
    if kind != "none":
        real = real & PADDED.bool()[:, None, None]
    logits(llama, NAME, attention_mask=MASKS[kind](real))
    for module, query, key, value, mask, out in calls:
        assert (mask is None) == (kind == "none")
        arrays = [x.detach().transpose(1, 2) for x in (query, key, value)]
        finite = mask is not None and mask.is_floating_point() and bool(mask.isfinite().all())
        hidden = {"bias": mask} if finite else {"mask": real}
        exact = expected(*arrays, fit, scale=module.scaling, **hidden)
        sees = real[:, 0].any(-1)
        np.testing.assert_allclose(out[sees], exact[sees], atol=2e-5, rtol=1e-4)
        # Logits of some -10,000 have three digits less.
        np.testing.assert_allclose(out[~sees], exact[~sees], atol=5e-3)
    assert len(calls) == 2


def test_what_is_not_told_by_a_mask_is_refused(llama):
    attend, module = partial(attend_with, PAPER), llama.model.layers[0].self_attn
    x = torch.zeros(1, 4, 5, 8)
    for word in ("indices", "block_indices", "cache"):
        with pytest.raises(ValueError, match=f"'{word}'"):
            attend(module, x, x, x, None, **{word: x})
    del module.is_causal
    with pytest.raises(ValueError, match="is_causal"):
        attend(module, x, x, x, None)
    attend(module, x, x, x, None, is_causal=False)
    attend(module, x[:, :, :1], x, x, None)


LEAST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_additive_mask_is_relative_to_the_highest_number_of_its_row(dtype):
    from calibrate.transformers.attention import mask_and_bias

    least, none = torch.finfo(dtype).min, -torch.inf
    mask = torch.tensor(
        [[0, -8_960, -9_984, least], [4_096, -2_048, -9_984, -1e9], [least] * 4, [none] * 4],
        dtype=dtype,
    )
    expected = [[0, -8_960, none, none], [4_096, -2_048, none, none], [least] * 4, [none] * 4]
    assert mask_and_bias(mask, None).tolist() == expected


def test_differences_of_a_mask_in_bfloat16_are_not_rounded():
    """In bfloat16, whose numbers about 9,000 are 64 apart, 9,010 would be no more than 9,000."""
    from calibrate.transformers.attention import mask_and_bias

    mask = torch.tensor([[[[50, -8_896, -8_960]]]], dtype=torch.bfloat16)
    assert mask_and_bias(mask, None).isinf().tolist() == [[[[False, False, True]]]]


CONSTANT = Fit(RuleForm.constant(), (Entry((1.7,)),))


@pytest.mark.parametrize("fit", [CONSTANT, BY_SIZE, BY_BOTH], ids=["constant", "by size", "both"])
def test_heads_with_rules_count_as_the_fitted_ones_and_padding_alone_is_finite(fit):
    """Times a beta above 1 the least number overflows, and a row of it would be NaN."""
    from calibrate.torch import scaled_dot_product_attention
    from calibrate.transformers.betas import HeadBetas, HeadRules
    from calibrate.transformers.verification import AttentionModules

    q, k, v = (torch.randn(1, 2, 9, 8, generator=torch.manual_seed(i)) for i in range(3))
    mask = torch.where(torch.ones(9, 9, dtype=bool).tril(), 0.0, LEAST)[None, None]
    mask[0, 0, 0] = LEAST
    coefficients = torch.tensor(fit.only.coefficients)[:, None].expand(-1, 2)
    rules = HeadRules(fit.rule, coefficients, fit.only.domain)
    for bias in (None, mask):  # T5 may have the mask in its bias
        module = torch.nn.Module()
        module.layer_idx = 0
        heads = HeadBetas(AttentionModules("Model", {module: 2}, [], {module: "attention"}))
        heads.rules = rules
        given = (mask, None) if bias is None else (torch.zeros_like(mask), bias)
        out, _ = heads.attend(
            module, q, k, v, given[0], scaling=1.0, is_causal=False, position_bias=given[1]
        )
        exact = scaled_dot_product_attention(q, k, v, mask, scale=1.0, coefficients=fit)
        np.testing.assert_allclose(out, exact.transpose(1, 2), atol=1e-6)
        np.testing.assert_allclose(out[0, 0], v[0].mean(1), atol=1e-6)


@pytest.mark.parametrize("masked", ["no", "bool", "additive"])
def test_a_position_bias(masked, llama, paper):
    """As T5 has it: what is added to the logits, under the mask."""
    from calibrate.torch import scaled_dot_product_attention

    q, k, v = (torch.randn(2, 4, 9, 8, generator=torch.manual_seed(i)) for i in range(3))
    bias = torch.randn(1, 4, 9, 9, generator=torch.manual_seed(3))
    real = torch.ones(9, 9, dtype=bool).tril()[None, None]
    mask = {"no": None, "bool": real, "additive": torch.where(real, 0.0, -3e38)}[masked]
    module = llama.model.layers[0].self_attn
    out, _ = attend_with(paper, module, q, k, v, mask, scaling=1.0, position_bias=bias)
    exact = scaled_dot_product_attention(
        q, k, v, bias.masked_fill(~real, -torch.inf), scale=1.0, coefficients=paper
    )
    np.testing.assert_allclose(out, exact.transpose(1, 2), atol=1e-6)


# But for the first, they are for additive masks alone: one left out would mean another thing.
OTHERS = {
    "both ways": lambda: tiny_model("bert"),
    "encoder": lambda: tiny_model("splinter"),
    "decoder": lambda: transformers.BigBirdPegasusForCausalLM(
        tiny_configuration(transformers.BigBirdPegasusConfig)),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("mask", [None, torch.ones_like(IDS), PADDED], ids=["no", "ones", "padded"])
def test_encoders_and_models_that_would_misread_a_mask_left_out(kind, mask):
    torch.manual_seed(0)
    model, first = OTHERS[kind]().eval(), {}
    for fit in (None, calibrate.identity(), PAPER):
        if fit:
            apply(model, fit, part="self_attn" if kind == "decoder" else None)
        with torch.no_grad():
            first[fit] = model(IDS, attention_mask=mask)[0][PADDED.bool()]
    own, ours, sharpened = first.values()
    np.testing.assert_allclose(ours, own, atol=1e-4)
    assert (sharpened - own).abs().max() > 0.01


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_half_precision_and_autocast(family):
    """Norms of queries and keys leave them wider than values; PyTorch's attention takes that."""
    model = make_model(family)
    exact, plain = (logits(model, name) for name in (PAPER, "eager"))
    with torch.autocast("cpu", torch.bfloat16):
        found = [logits(model, PAPER)]
    found.append(logits(model.bfloat16(), PAPER))
    assert found[1].dtype == torch.bfloat16
    for rough in found:
        error = (rough.float() - exact).abs()
        assert error.median() < 0.1 * exact.std()
        assert error.mean() < 0.2 * (exact - plain).abs().mean()  # plain softmax must fail this


def test_training_reaches_every_weight(llama):
    apply(llama.requires_grad_(), PAPER)
    llama(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in llama.parameters())
    dropping = make_model("llama", attention_dropout=0.5)
    still = logits(dropping, PAPER)
    assert (logits(dropping, PAPER) == still).all()
    assert (logits(dropping.train(), PAPER) - still).abs().max() > 0.01


@pytest.mark.slow
@BY_FIT
def test_compiled_for_any_length(fit, llama):
    """The whole model has no more than one graph more than with the original attention."""
    ids = torch.randint(1, 60, (1, 70), generator=torch.manual_seed(0))

    def graphs_of(attention):
        use(llama, attention)
        torch.compiler.reset()
        graphs = []

        def keep(graph, _):
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(llama, backend=keep)
        for n in (*range(33, 45), 63, 64, 65, 70):
            with torch.no_grad():
                actual = compiled(ids[:, :n], use_cache=False).logits
            torch.testing.assert_close(
                actual, logits(llama, attention, ids[:, :n], use_cache=False), atol=1e-3, rtol=1e-3
            )
        return len(graphs)

    assert graphs_of(fit) <= graphs_of("sdpa") + 1


def test_compiled_layers_share_a_graph(paper):
    """Each is compiled alone, and takes the numbers of its own entry."""
    model = make_model("llama", num_hidden_layers=4)
    powers = paper.only.coefficients
    entries = tuple(
        replace(paper.only, coefficients=(*powers[:-1], powers[-1] + i), check=(), layer=i)
        for i in (0, 1, 3)
    )
    apply(model, replace(paper, entries=entries))
    torch.compiler.reset()
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend=keep)
        torch.testing.assert_close(model(IDS, use_cache=False).logits, expected)
    assert len(graphs) <= 2  # the third has plain softmax, and may have its own


def test_a_mask_of_whole_numbers_is_refused(llama):
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.long)
    with pytest.raises(TypeError, match="torch.int64"):
        logits(llama, PAPER, attention_mask=mask)


def shared_layers():
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 3}
    return tiny_albert(vocab_size=60, initializer_range=0.5, **sizes)


def constant_for(**place):
    return Fit(RuleForm.constant(), (Entry((2.0,), **place),), name="constant")


def test_a_fit_without_layer_and_head_applies_in_all_heads_of_shared_layers():
    """As doubled queries of the one module do, which is every layer."""
    model = shared_layers()
    with torch.no_grad():
        before = model(IDS).last_hidden_state
        apply(model, constant_for())
        ours = model(IDS).last_hidden_state
        model.set_attn_implementation("eager")
        (module,) = {x for x in model.modules() if hasattr(x, "query")}
        module.query.weight *= 2
        module.query.bias *= 2
        doubled = model(IDS).last_hidden_state
    torch.testing.assert_close(ours, doubled, atol=2e-4, rtol=0)
    assert (ours - before).abs().max() > 0.1


@pytest.mark.parametrize("place", [{"layer": 2}, {"layer": 2, "head": 1}])
def test_a_fit_for_one_of_several_shared_layers_is_refused(place):
    with pytest.raises(calibrate.CoefficientsError, match="layer_idx"):
        apply(shared_layers(), constant_for(**place))


@pytest.mark.slow
def test_it_is_an_attribute_of_the_package():
    """As guides write it, in a script that imported nothing else."""
    subprocess.run(
        [sys.executable, "-c", "import calibrate; calibrate.transformers.apply"], check=True
    )
