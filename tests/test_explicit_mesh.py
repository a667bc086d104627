"""Attention in JAX over explicit meshes, in a process of its own, which has four devices."""

import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import ATTENTION_CASES, BY_BOTH, BY_SIZE, expected, qkv
from attention_cases import in_words_of_the_reference as in_words
from backends import forget_attention
from cases import per_head
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import calibrate
from calibrate.jax.attention import dot_product_attention
from calibrate.jax.flax import attention_fn

FITS = {
    "identity": calibrate.identity(),
    "paper": calibrate.load("paper"),
    "log size": BY_SIZE,
    "both": BY_BOTH,
    "heads": per_head("both")[0],
}
LAYOUTS = {
    "batch": P("x"),
    "heads": P(None, None, "y"),
    "batch and heads": P("x", None, "y"),
    "neither": P(),
}


@pytest.fixture(scope="module")
def on_four_devices():
    """Calls a function of this module in a process in which JAX has four devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("XLA_FLAGS", flags)
            pool.submit(len, "the process starts").result()
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def mesh_of(kinds=(AxisType.Explicit, AxisType.Explicit)):
    return jax.set_mesh(jax.make_mesh((2, 2), ("x", "y"), axis_types=kinds))


def with_gradients(attend, arrays):
    """The result, and gradients of the sum of squares for queries, keys and values."""

    def loss(q, k, v):
        out = attend(q, k, v)
        return (out**2).sum(), out

    (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arrays)
    return out, *gradients


def same_as_on_one_device(layout, by, case, K=2, jit=False, heads_at_once=False):
    """Values, gradients, and the shardings of the original's."""
    arrays, fit, options = qkv(K=K), FITS[by], ATTENTION_CASES[case]
    jax.default_backend = lambda: "gpu" if heads_at_once else "cpu"  # of this process alone
    forget_attention()
    attend = partial(dot_product_attention, coefficients=fit, **options)
    original = partial(jax.nn.dot_product_attention, **options)
    alone = with_gradients(original if by == "identity" else attend, arrays)
    run = jax.jit(with_gradients, static_argnums=0) if jit else with_gradients
    with mesh_of():
        splits = LAYOUTS[layout]
        of_keys = splits if K > 1 else P(*splits[:1])
        split = [*map(jax.device_put, arrays, (splits, of_keys, of_keys))]
        actual, like = run(attend, split), with_gradients(original, split)
        assert [x.sharding for x in actual] == [x.sharding for x in like]
    for x, exact in zip(actual, alone, strict=True):
        np.testing.assert_allclose(x, exact, atol=2e-5, rtol=1e-4)
    if by != "heads":
        exact = expected(*arrays, fit, **in_words(options))
        np.testing.assert_allclose(actual[0], exact, atol=3e-6, rtol=1e-5)


def test_attention_is_that_of_one_device(on_four_devices):
    on_four_devices(same_as_on_one_device, "batch and heads", "identity", "causal")


SHARDED_HEADS = ("heads", "batch and heads")
EVERY_FIT = [(layout, by, "all", False) for layout in LAYOUTS for by in FITS]
EVERY_CASE = [
    ("batch and heads", "heads", case, True) for case in ("plain", "causal", "bias", "lengths")
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "by", "case", "jit"), EVERY_FIT + EVERY_CASE)
def test_attention_of_every_layout(layout, by, case, jit, on_four_devices):
    on_four_devices(same_as_on_one_device, layout, by, case, 2, jit)


@pytest.mark.slow
@pytest.mark.parametrize("heads_at_once", [False, True])
@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("layout", SHARDED_HEADS)
def test_groups_and_heads_at_once_as_on_an_accelerator(layout, K, heads_at_once, on_four_devices):
    case = "plain" if K == 1 else "mask"  # the original refuses sharded heads of one key and a mask
    on_four_devices(same_as_on_one_device, layout, "heads", case, K, False, heads_at_once)


def same_in_flax(layout, by, options, batch_axes=1):
    """Blocks, and with a precision the whole matrix."""
    arrays, attend = qkv(), attention_fn(FITS[by])
    arrays = [x if batch_axes == 1 else np.stack([x, x]) for x in arrays]
    alone = attend(*arrays, **options)
    with mesh_of():
        splits = LAYOUTS[layout] if batch_axes == 1 else P("x", None, None, "y")
        split = [jax.device_put(x, splits) for x in arrays]
        actual = attend(*split, **options)
        like = nnx.dot_product_attention(*split, **options)
        assert actual.sharding == like.sharding
    np.testing.assert_allclose(actual, alone, atol=3e-6)


@pytest.mark.parametrize("options", [{}, {"precision": "highest"}], ids=["blocks", "matrix"])
def test_flax_with_a_fit_per_head(options, on_four_devices):
    on_four_devices(same_in_flax, "batch and heads", "heads", options)


@pytest.mark.slow
@pytest.mark.parametrize("batch_axes", [1, 2])
@pytest.mark.parametrize("options", [{}, {"precision": "highest"}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize("by", ["log size", "heads"])
@pytest.mark.parametrize("layout", SHARDED_HEADS)
def test_attention_of_flax(layout, by, options, batch_axes, on_four_devices):
    on_four_devices(same_in_flax, layout, by, options, batch_axes)


def same_of_other_shardings(of_query, of_key, of_value):
    """Or the original's refusal."""
    arrays = [x[:, :8] for x in qkv(K=4)]
    attend = partial(dot_product_attention, coefficients=FITS["heads"])
    alone = attend(*arrays)
    with mesh_of():
        split = [*map(jax.device_put, arrays, (of_query, of_key, of_value))]
        try:
            like = jax.nn.dot_product_attention(*split)
        except Exception as refusal:
            with pytest.raises(type(refusal)):
                attend(*split)
            return "refused"
        actual = attend(*split)
        assert actual.sharding == like.sharding
    np.testing.assert_allclose(actual, alone, atol=3e-6)
    return "taken"


OTHER_SHARDINGS = [
    ((P("x"), P(), P()), "taken"),
    ((P(), P("x"), P("x")), "taken"),
    ((P(), P(), P("x", None, "y")), "taken"),
    ((P(), P(), P(None, None, None, "x")), "taken"),
    ((P(None, "x"), P(), P()), "taken"),
    ((P("x", "y"), P("x"), P("x")), "taken"),
    ((P(None, "x"), P(None, "x"), P(None, "x")), "refused"),
    ((P(None, None, None, "x"), P(None, None, None, "x"), P()), "refused"),
    ((P("x"), P("y"), P("y")), "refused"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shardings", "what_happens"), OTHER_SHARDINGS)
def test_arrays_that_are_sharded_unlike_each_other(shardings, what_happens, on_four_devices):
    assert on_four_devices(same_of_other_shardings, *shardings) == what_happens


def same_of_mapped_and_mixed_axes():
    """A mapped axis that is sharded, an automatic axis, no mesh in context, and manual axes."""
    q, k, v = arrays = qkv(N=4, K=4)
    attend = partial(dot_product_attention, coefficients=FITS["heads"], is_causal=True)
    alone, splits = attend(*arrays), P("x", None, "y")
    close = partial(np.testing.assert_allclose, atol=3e-6)
    with mesh_of():
        split = [jax.device_put(x, splits) for x in arrays]
        close(jax.vmap(attend)(*(x[:, None] for x in split))[:, 0], alone)
        one_axis = jax.shard_map(attend, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
        close(one_axis(*split), alone)
        gradient = jax.grad(lambda q: (attend(q, *split[1:]) ** 2).sum())
        product = jax.jvp(gradient, split[:1], split[:1])[1]
        assert jax.typeof(product).sharding == jax.typeof(split[0]).sharding
    exact = jax.jvp(jax.grad(lambda q: (attend(q, k, v) ** 2).sum()), (q,), (q,))[1]
    np.testing.assert_allclose(product, exact, atol=1e-4, rtol=1e-3)
    without_context = NamedSharding(jax.make_mesh((2, 2), ("x", "y")), splits)
    close(attend(*(jax.device_put(x, without_context) for x in arrays)), alone)
    for kinds in ((AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)):
        with mesh_of(kinds):
            split = [jax.device_put(x, splits) for x in map(jnp.asarray, arrays)]
            close(attend(*split), alone)


@pytest.mark.slow
def test_mapped_and_mixed_axes(on_four_devices):
    on_four_devices(same_of_mapped_and_mixed_axes)
