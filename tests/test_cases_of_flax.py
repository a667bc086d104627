"""The cases of Flax's attention tests, nnx and linen; test_cases_of_others has the table."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import jax_utils, nnx
from jax.lax import Precision

import calibrate
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.flax import attention_fn
from calibrate.maths.rule import ENTROPY_AND_SIZE, Rule

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning"),
]
PAPER = calibrate.load("paper")
BY_SIZE = Coefficients(Rule.log_size(), (Entry((0.5, 1.2), (1.0, 7.0)),))
BY_BOTH = Coefficients(
    Rule(0.0, kind=ENTROPY_AND_SIZE),
    (Entry((0.0, 0.02, -0.1, 0.4, 0.8, 0.05, -0.02, 0.4), (0.1, 5.0, 1.0, 3.0)),),
)
# None is Flax's own attention, which identity must equal.
ACTING = {"paper": PAPER, "by size": BY_SIZE, "by both": BY_BOTH}
FIT = {"flax": None, "identity": calibrate.identity(), **ACTING}


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 2


def own(fit):
    return {} if fit is None else {"attention_fn": attention_fn(fit)}


def nnx_module(fit, heads=2, features=6, **options):
    options = {"decode": False, "rngs": nnx.Rngs(0)} | options
    return nnx.MultiHeadAttention(heads, features, **own(fit), **options)


def linen_module(fit, heads=2, **options):
    return nn.MultiHeadDotProductAttention(heads, **own(fit), **options)


def check_every_fit(run, atol=3e-6):
    """Identity gives what Flax's own attention gives, and a fit something else; all outputs."""
    out = {name: np.asarray(run(fit), np.float32) for name, fit in FIT.items()}
    np.testing.assert_allclose(out["identity"], out["flax"], atol=atol)
    for name in ACTING:
        assert out[name].shape == out["flax"].shape
        assert np.isfinite(out[name]).all()
        assert np.abs(out[name] - out["flax"]).max() > 10 * atol, name
    return out


def test_widths_of_inputs_and_outputs_may_differ():
    x, y = normal(0, 1, 7, 3), normal(1, 1, 9, 4)
    widths = {"features": 3, "qkv_features": 6, "out_features": 5}
    assert check_every_fit(lambda fit: nnx_module(fit, **widths)(x))["paper"].shape == (1, 7, 5)
    check_every_fit(lambda fit: nnx_module(fit, in_kv_features=4, **widths)(x, y))


class Three(nnx.Module):
    def __init__(self, fit):
        self.layers = nnx.List([nnx_module(fit, 8, 8) for _ in range(3)])

    def __call__(self, x, sow):
        for layer, sows in zip(self.layers, (sow, False, sow), strict=True):
            x = layer(x, sow_weights=sows)
        return x


class ThreeInLinen(nn.Module):
    fit: object

    @nn.compact
    def __call__(self, x, sow):
        for layer, sows in enumerate((sow, False, sow)):
            x = linen_module(self.fit, 8, name=f"{layer}")(x, sow_weights=sows)
        return x


@pytest.mark.parametrize("fit", FIT.values(), ids=FIT)
def test_only_the_layers_that_are_asked_sow(fit):
    x, model, in_linen = normal(0, 4, 6, 8), Three(fit), ThreeInLinen(fit)
    variables = in_linen.init(jax.random.key(0), x, False)
    for sow in (True, False):
        model(x, sow)
        in_nnx = nnx.pop(model, nnx.Intermediate)
        _, state = in_linen.apply(variables, x, sow, mutable=["intermediates"])
        found = in_nnx["layers"] if sow else in_nnx, state.get("intermediates", {})
        for layers in found:
            assert {int(name) for name in layers} == ({0, 2} if sow else set())
            for layer in layers.values():
                weights = np.asarray(layer["attention_weights"][0])
                assert weights.shape == (4, 8, 6, 6)
                np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("fit", ACTING.values(), ids=ACTING)
def test_decoding_in_float64(fit):
    """Token by token equals all at once, in both kinds of module."""
    with jax.enable_x64():
        x, causal = jnp.asarray(normal(0, 1, 4, 6), float), jnp.tril(jnp.ones((1, 1, 4, 4), bool))
        module = nnx_module(fit, dtype=jnp.float64)
        expected = module(x, mask=causal)
        module.init_cache(x.shape, dtype=x.dtype)
        steps = [module(x[:, [t]], decode=True) for t in range(4)]
        np.testing.assert_allclose(jnp.concatenate(steps, 1), expected, atol=1e-12)
        check_decoding_in_linen(linen_module(fit, dtype=jnp.float64), x, (1,), 1e-12)


def check_decoding_in_linen(module, x, axes, atol):
    decoder = module.clone(decode=True)
    variables = dict(decoder.init(jax.random.key(0), x))
    params = variables.pop("params")
    mask = nn.make_causal_mask(jnp.ones(x.shape[:-1]))
    expected = module.apply({"params": params}, x, mask=mask)

    def step(cache, token):
        out, cache = decoder.apply({"params": params, **cache}, token, mutable=["cache"])
        return cache, out

    _, out = jax_utils.scan_in_dim(step, variables, x, axis=axes, keepdims=True)
    np.testing.assert_allclose(out, expected, atol=atol)


@pytest.mark.parametrize(("shape", "axes"), [((5,), (1,)), ((6, 5), (2,))])
@pytest.mark.parametrize("fit", ACTING.values(), ids=ACTING)
def test_decoding_in_linen(fit, shape, axes):
    check_decoding_in_linen(linen_module(fit, 3), jnp.asarray(normal(0, 2, *shape, 12)), axes, 1e-5)


DROPOUT = {"dropout_rate": 0.5, "deterministic": False}


@pytest.mark.parametrize("kept", [True, False])
def test_dropout_keys_come_from_the_module_or_the_call(kept):
    x = normal(0, 2, 3, 5, 6)

    def run(fit, **call):
        return nnx_module(fit, keep_rngs=kept, **DROPOUT)(x, **call)

    check_every_fit(lambda fit: run(fit, **({} if kept else {"rngs": nnx.Rngs(dropout=5)})))
    check_every_fit(lambda fit: run(fit, deterministic=True))


def test_dropout_keys_come_from_linens_rngs_or_the_call():
    x, keys = normal(0, 2, 3, 5, 6), jax.random.split(jax.random.key(0), 3)

    def run(fit, **call):
        module = linen_module(fit, **DROPOUT)
        variables = module.init({"params": keys[0], "dropout": keys[1]}, x)
        return module.apply(variables, x, **call)

    by_call = check_every_fit(lambda fit: run(fit, dropout_rng=keys[1]))
    by_module = check_every_fit(lambda fit: run(fit, rngs={"dropout": keys[2]}))
    for name, fit in FIT.items():
        np.testing.assert_array_equal(run(fit, dropout_rng=keys[1]), by_call[name])
        assert np.abs(by_module[name] - by_call[name]).max() > 1e-2


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("n_keys", [2, 4])
def test_causality_and_padding_with_two_batch_axes(padded, n_keys):
    q, k, v = (normal(seed, 1, 1, n, 2, 4) for seed, n in enumerate((2, n_keys, n_keys)))
    padding = np.ones((1, 1, 1, 2, n_keys), bool)
    padding[..., -1:] = not padded
    both = padding & np.tril(np.ones((2, n_keys), bool))
    for fit in ACTING.values():
        attend = attention_fn(fit)
        expected = attend(q, k, v, mask=both)
        for options in ({}, {"precision": "highest"}):
            actual = attend(q, k, v, mask=padding, is_causal=True, **options)
            np.testing.assert_allclose(actual, expected, atol=2e-6)
    for options in ({}, {"precision": "highest"}):
        identity = attention_fn(calibrate.identity())(q, k, v, mask=both, **options)
        np.testing.assert_allclose(
            identity, nnx.dot_product_attention(q, k, v, mask=both), atol=2e-6
        )


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("precision", [Precision.DEFAULT, Precision.HIGH, Precision.HIGHEST])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("biased", [True, False])
def test_nnx_and_linen_agree(biased, dtype, precision, normalised):
    """Without a batch axis; all at once and token by token."""
    x = normal(0, 5, 3)
    atol = 3e-6 if dtype == "float32" else 0.02
    causal = np.tril(np.ones((1, 5, 5), bool))
    for stored, (name, fit) in [(s, f) for s in ("float32", "float16") for f in FIT.items()]:
        options = {
            "use_bias": biased, "dtype": dtype, "param_dtype": stored, "precision": precision,
            "normalize_qk": normalised, "qkv_features": 6, "out_features": 6,
        }  # fmt: skip
        linen, module = linen_module(fit, **options), nnx_module(fit, features=3, **options)
        params = linen.init(jax.random.key(0), x)["params"]
        for part in ("query", "key", "value", "out"):
            for kind in ("kernel", "bias") if biased else ("kernel",):
                getattr(getattr(module, part), kind)[...] = params[part][kind]
        out = linen.apply({"params": params}, x, mask=causal)
        assert out.dtype == dtype
        np.testing.assert_allclose(module(x, mask=causal), out, atol=atol)
        module.init_cache(x.shape, dtype=dtype)
        steps = [module(x[[t]], decode=True) for t in range(5)]
        np.testing.assert_allclose(jnp.concatenate(steps), out, atol=atol)
        if name == "flax":
            plain = out
        elif name == "identity":
            np.testing.assert_allclose(out, plain, atol=atol)


def test_grouped_heads_in_nnx():
    options = {"heads": 8, "features": 16, "qkv_features": 64, "num_kv_heads": 2}
    x = normal(0, 1, 10, 16)
    expected = check_every_fit(lambda fit: nnx_module(fit, **options)(x, is_causal=True), 1e-5)
    for name, fit in FIT.items():
        module = nnx_module(fit, **options)
        module.init_cache(x.shape)
        assert module.cached_key.shape == (1, 10, 2, 8)
        steps = [module(x[:, [t]], decode=True) for t in range(10)]
        np.testing.assert_allclose(jnp.concatenate(steps, 1), expected[name], atol=1e-5)
        assert module.cache_index[...] == 10


def test_any_batch_axes_and_lengths():
    """Self- and cross-attention, with none, one or two batch axes."""
    for batch in ((), (4,), (4, 2)):
        x, y = normal(0, *batch, 3, 5), normal(1, *batch, 9, 5)

        def run(fit, *inputs):
            module = linen_module(fit, 8, qkv_features=16)
            return module.apply(module.init(jax.random.key(0), *inputs), *inputs)

        for inputs in ((x,), (x, y), (x, y, y)):
            out = check_every_fit(partial(lambda given, fit: run(fit, *given), inputs))
            assert out["paper"].shape == x.shape


@pytest.mark.parametrize("fit", FIT.values(), ids=FIT)
def test_gradients_reach_earlier_tokens_only(fit):
    x = normal(0, 1, 10, 1) / 10
    module = linen_module(fit, 1)
    variables = module.init(jax.random.key(0), x)
    mask = nn.make_causal_mask(jnp.ones(x.shape[:-1]))
    reach = jax.jacrev(lambda x: module.apply(variables, x, mask=mask)[0, :, 0])(x)[:, 0, :, 0]
    reach = np.abs(reach)
    assert (reach[np.tril_indices(10)] > 1e-5).all()
    assert (reach[np.triu_indices(10, 1)] == 0).all()
