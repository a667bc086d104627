"""The attention function inside Flax's own modules, nnx and linen."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import calibrate
from calibrate.jax.flax import attention_fn

# nnx says so of its own way to sow weights.
pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")

SLOW = pytest.mark.slow
T, FEATURES, HEADS = 12, 16, 4
X = np.random.default_rng(0).standard_normal((2, T, FEATURES)).astype(np.float32) * 3
CAUSAL = np.tril(np.ones((2, 1, T, T), bool))


def in_nnx(fit, x=X, sow=False, make_attention=attention_fn, **options):
    """The output of an nnx module with that fit; None is Flax's own attention."""
    call = {k: options.pop(k) for k in ("mask", "is_causal") if k in options}
    attention = {} if fit is None else {"attention_fn": make_attention(fit)}
    module = nnx.MultiHeadAttention(
        HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0), **attention, **options
    )
    out = module(x, rngs=nnx.Rngs(dropout=5), sow_weights=sow, **call)
    return (out, module) if sow else out


def in_linen(fit, x=X, sow=False, mask=None, make_attention=attention_fn, **options):
    attention = {} if fit is None else {"attention_fn": make_attention(fit)}
    options = {"deterministic": True} | options
    module = nn.MultiHeadDotProductAttention(HEADS, **attention, **options)
    variables = module.init(jax.random.key(0), x)
    call = partial(module.apply, variables, x, mask=mask, rngs={"dropout": jax.random.key(5)})
    return call(sow_weights=True, mutable=["intermediates"]) if sow else call()


def softmax_of_the_matrix(fit):

    def attend(query, key, value, mask=None, **_):
        z = jnp.einsum("...qhd,...khd->...hqk", query, key) / query.shape[-1] ** 0.5
        weights = calibrate.adaptive_softmax(z, fit, where=mask)
        return jnp.einsum("...hqk,...khd->...qhd", weights, value)

    return attend


@pytest.mark.parametrize("module", [in_nnx, in_linen])
@pytest.mark.parametrize("mask", [None, CAUSAL], ids=["all", "causal"])
@pytest.mark.slow
def test_identity_gives_flaxs_own_result(module, mask):
    ours = module(calibrate.identity(), mask=mask)
    np.testing.assert_allclose(ours, module(None, mask=mask), atol=2e-6)


@pytest.mark.parametrize(
    ("module", "kind"), [pytest.param(in_nnx, "by_both", marks=SLOW), (in_linen, "by_size")]
)
def test_a_fit_changes_it_as_the_whole_matrix_would(module, kind, request):
    """The feature is on, and causality survives: both modules route arguments by signature."""
    fit = request.getfixturevalue(kind)
    ours = module(fit, mask=CAUSAL)
    if module is in_nnx:
        np.testing.assert_allclose(module(fit, is_causal=True), ours, atol=2e-6)
        sown, _ = module(fit, is_causal=True, sow=True)
        np.testing.assert_allclose(sown, ours, atol=2e-6)
    assert np.abs(ours - module(None, mask=CAUSAL)).max() > 1e-3
    whole = module(fit, mask=CAUSAL, make_attention=softmax_of_the_matrix)
    np.testing.assert_allclose(ours, whole, atol=2e-6)


@pytest.mark.parametrize("module", [in_nnx, pytest.param(in_linen, marks=SLOW)])
def test_sown_weights_are_those_applied(module, paper):
    out, sown = module(paper, mask=CAUSAL, sow=True)
    state = nnx.pop(sown, nnx.Intermediate) if module is in_nnx else sown["intermediates"]
    weights = np.asarray(state["attention_weights"][0])
    assert weights.shape == (2, HEADS, T, T)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert (weights[~np.broadcast_to(CAUSAL, weights.shape)] == 0).all()
    np.testing.assert_allclose(out, module(paper, mask=CAUSAL), atol=2e-6)


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.slow
def test_dropout_comes_after_the_entropy(paper, broadcast):
    options = {"dropout_rate": 0.5, "broadcast_dropout": broadcast, "deterministic": False}
    identity = in_nnx(calibrate.identity(), **options)
    np.testing.assert_allclose(identity, in_nnx(None, **options), atol=2e-6)
    identity = in_linen(calibrate.identity(), **options)
    np.testing.assert_allclose(identity, in_linen(None, **options), atol=2e-6)
    _, module = in_nnx(paper, sow=True, **options)
    sown = np.asarray(nnx.pop(module, nnx.Intermediate)["attention_weights"][0])
    np.testing.assert_allclose(sown.sum(-1), 1, atol=1e-6)  # before dropout


@pytest.mark.parametrize(
    ("module", "dtype"), [pytest.param(in_nnx, jnp.bfloat16, marks=SLOW), (in_linen, jnp.float16)]
)
def test_dtype_is_honoured(paper, module, dtype):
    actual = module(paper, dtype=dtype)
    assert actual.dtype == dtype
    np.testing.assert_allclose(actual.astype(np.float32), module(paper), atol=0.1, rtol=0.05)


@pytest.mark.parametrize("kind", ["paper", "by_size", "by_both"])
@pytest.mark.slow
def test_bias_batch_axes_and_groups(kind, request):
    rng = np.random.default_rng(1)
    q = rng.standard_normal((3, 2, T, 4, 8)).astype(np.float32) * 2
    k, v = rng.standard_normal((2, 3, 2, T, 2, 8)).astype(np.float32)
    bias = rng.standard_normal((2, 4, T, T)).astype(np.float32)
    mask = rng.random((3, 1, 1, T, T)) < 0.7
    attend = attention_fn(request.getfixturevalue(kind))
    for options in ({}, {"is_causal": True}):
        by_blocks = attend(q, k, v, bias=bias, mask=mask, **options)
        by_matrix = attend(q, k, v, bias=bias, mask=mask, precision="highest", **options)
        assert by_blocks.shape == q.shape
        np.testing.assert_allclose(by_blocks, by_matrix, atol=3e-6)
    alone = attend(q[0, 0], k[0, 0], v[0, 0], bias=bias[0], mask=mask[0, 0])
    one = attend(q[:1, 0], k[:1, 0], v[:1, 0], bias=bias[:1], mask=mask[:1, 0])
    np.testing.assert_allclose(alone, one[0], atol=3e-6)


@pytest.mark.parametrize("drops", [pytest.param(True, marks=SLOW), False])
def test_causality_counts_from_the_first_key(drops):
    """As in Flax, where there are more keys than queries too."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, n, 4, 8)).astype(np.float32) for n in (5, T, T))
    options = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(5)} if drops else {}
    ours = attention_fn(calibrate.identity())(q, k, v, is_causal=True, **options)
    theirs = nnx.dot_product_attention(q, k, v, is_causal=True, **options)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_queries_without_keys_are_0_on_both_paths(paper):
    q = np.random.default_rng(2).standard_normal((1, 5, 4, 8)).astype(np.float32)
    bias = np.zeros((1, 1, 5, 5), np.float32)
    bias[:, :, 2] = -np.inf
    for options in ({}, {"precision": "highest"}):
        out = attention_fn(paper)(q, q, q, bias=bias, **options)
        assert (np.asarray(out)[:, 2] == 0).all()
        assert np.isfinite(out).all()


SHAPES = (
    [(2, 6, 4, 8), (6, 4, 8), (6, 4, 8)],
    [(4, 1, 6, 4, 8), (1, 4, 6, 4, 8), (1, 4, 6, 4, 8)],
    [(2, 6, 4, 8), (2, 6, 4, 8), (2, 5, 4, 8)],
    [(2, 6, 4, 8), (2, 6, 4, 7), (2, 6, 4, 8)],
    [(1, 6, 5, 8), (1, 6, 2, 8), (1, 6, 2, 8)],
)


def test_what_is_refused_and_what_is_not(paper):
    """Integers become floats as in Flax."""
    whole, q = np.arange(40).reshape(1, 5, 2, 4), np.ones((1, 5, 2, 4), np.float32)
    assert attention_fn(paper)(whole, whole, whole).dtype == jnp.float32
    einsum = {f"{x}_einsum_cls": lambda: jnp.einsum
              for x in ("qk_attn_weights", "attn_weights_value")}  # fmt: skip
    wrong = r"^query, key, value .*\d, 8\).*\(\.\.\., T, N, H\)"
    for call, error, message in (
        *((partial(attention_fn(paper), *map(np.ones, x)), ValueError, wrong) for x in SHAPES),
        (lambda: attention_fn("paper"), calibrate.CoefficientsError, "^coefficients .*'paper'"),
        (lambda: attention_fn(paper)(1j * q, q, q), TypeError, "^query, key or value .*complex"),
        (lambda: attention_fn(paper)(q, q, q, dropout_rate=0.5), ValueError, "dropout_rng"),
        (lambda: in_linen(paper, **einsum), ValueError, "custom einsum"),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("forced", [True, False])
def test_softmax_in_float32_can_be_forced(forced, paper):
    _, sown = in_linen(paper, sow=True, dtype=jnp.bfloat16, force_fp32_for_softmax=forced)
    expected = jnp.float32 if forced else jnp.bfloat16
    assert sown["intermediates"]["attention_weights"][0].dtype == expected
    q = jnp.ones((1, 5, 2, 4), jnp.bfloat16)
    assert attention_fn(paper)(q, q, q, force_fp32_for_softmax=forced).dtype == expected


def test_a_decoding_cache(paper):
    module = nnx.MultiHeadAttention(
        HEADS, FEATURES, decode=True, attention_fn=attention_fn(paper), rngs=nnx.Rngs(0)
    )
    module.init_cache(X.shape)
    steps = [module(X[:, [t]]) for t in range(T)]
    np.testing.assert_allclose(jnp.concatenate(steps, 1), in_nnx(paper, mask=CAUSAL), atol=3e-6)


class Model(nnx.Module):
    """Two layers of attention, the second with grouped queries and a fit."""

    def __init__(self, fit):
        rngs = nnx.Rngs(0)
        options = {"decode": False, "rngs": rngs}
        self.first = nnx.MultiHeadAttention(HEADS, FEATURES, **options)
        self.second = nnx.MultiHeadAttention(
            HEADS, FEATURES, num_kv_heads=2, attention_fn=attention_fn(fit), **options
        )

    def __call__(self, x, mask=None, is_causal=False, sow=False):
        x = self.first(x, mask=mask, sow_weights=sow)
        return self.second(x, mask=mask, is_causal=is_causal, sow_weights=sow)


@pytest.mark.parametrize("masked", ["mask", "is_causal"])
@pytest.mark.slow
def test_captured_logits_are_those_behind_the_weights(masked, here):
    model = Model(calibrate.identity())
    options = {"mask": {"mask": CAUSAL}, "is_causal": {"is_causal": True}}[masked]
    own = [model.first.attention_fn, model.second.attention_fn]
    exact = model(X, sow=True, **options)
    weights = [
        nnx.pop(m, nnx.Intermediate)["attention_weights"][0] for m in (model.first, model.second)
    ]
    with calibrate.capture(model, here / "captured") as recorder:
        recorder.next(query=[7, -1], target=[[2, 5], 3])
        np.testing.assert_allclose(model(X, **options), exact, atol=2e-6)
        recorder.next(query=0, target=0)
        model(X[:1])
    assert [model.first.attention_fn, model.second.attention_fn] == own
    arrays = np.load(here / "captured" / "pass000000.npz")
    assert len(arrays["logits"]) == 2 * 2 * HEADS
    for row, (z, layer, head) in enumerate(
        zip(arrays["logits"], arrays["layer"], arrays["head"], strict=True)
    ):
        sequence = row // HEADS % 2
        expected = weights[layer][sequence, head, (7, 11)[sequence]]
        np.testing.assert_allclose(jax.nn.softmax(z), expected, atol=1e-5)
        assert arrays["target"][row].nonzero()[0].tolist() == [[2, 5], [3]][sequence]


def test_capture_under_jit_or_without_attention_is_refused(here):
    model = Model(calibrate.identity())

    def run():
        with calibrate.capture(model, here / "captured") as recorder:
            recorder.next(query=0, target=0)
            nnx.jit(lambda model, x: model(x))(model, X)

    with pytest.raises(calibrate.CalibrateError, match=r"\bjit\b"):
        run()
    assert model.first.attention_fn is nnx.dot_product_attention
    for other, message in (
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "^Linear .*nnx.MultiHeadAttention"),
        ("model", "^model .*str; .*Transformers .*Flax nnx"),
    ):
        with pytest.raises(calibrate.CalibrateError, match=message):
            calibrate.capture(other, here / "other").__enter__()
