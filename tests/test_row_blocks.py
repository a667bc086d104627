"""JAX's softmax of many rows, in blocks: as the whole, and in bounded memory."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMOOTH_FITS, per_head

import calibrate
from calibrate.jax import row_blocks

WHOLE = row_blocks.RowBlockSizes(in_gradients=1 << 60)
ROWS = (2, 4, 6, 30)
MASKS = {
    "none": None,
    "of items": np.arange(30) < 20,
    "of rows": np.arange(6)[:, None] < 3,
    "of each": np.random.default_rng(0).random((2, 1, 6, 30)) < 0.7,
}


@pytest.fixture
def computed(monkeypatch):
    """Computes anew by blocks of some sizes."""

    def compute(sizes, function, *arguments):
        monkeypatch.setattr(row_blocks, "SIZES", sizes)
        jax.clear_caches()
        return function(*arguments)

    yield compute
    jax.clear_caches()


def of_six_rows(in_results):
    return row_blocks.RowBlockSizes(items=200, in_gradients=1, in_results=in_results)


def arrays(dtype, shape=ROWS):
    rng = np.random.default_rng(1)
    z, direction = rng.normal(0, 3, (2, *shape))
    z[..., 0, 3:5] = -np.inf
    return jnp.asarray(z, dtype), jnp.asarray(direction, dtype)


def check(fit, dtype, mask, computed):
    """Results alone, with their gradient, and with their derivative along a direction."""
    z, direction = arrays(dtype)

    @jax.jit
    def results(z, direction):
        def softmax(z):
            return calibrate.adaptive_softmax(z, fit, where=MASKS[mask])

        probs, backward = jax.vjp(softmax, z)
        return softmax(z), probs, backward(direction)[0], *jax.jvp(softmax, (z,), (direction,))

    exact = computed(WHOLE, results, z, direction)
    found = computed(of_six_rows(in_results=1), results, z, direction)
    tolerance = {"rtol": 1e-5, "atol": 4e-6} if dtype == "float32" else {"atol": 2e-2}
    for x, y in zip(found, exact, strict=True):
        np.testing.assert_allclose(x.astype("float32"), y.astype("float32"), **tolerance)


@pytest.mark.parametrize("heads", [False, True], ids=["one rule", "by head"])
@pytest.mark.parametrize("kind", SMOOTH_FITS)
def test_blocks_are_as_the_whole(kind, heads, computed):
    fit = per_head(kind)[0] if heads else SMOOTH_FITS[kind]
    check(fit, "float32", "of each", computed)


@pytest.mark.parametrize("mask", ["none", "of items", "of rows"])
def test_blocks_of_each_mask(mask, computed):
    check(SMOOTH_FITS["both"], "bfloat16", mask, computed)


def test_blocks_within_other_transformations(paper, computed):
    z, direction = arrays("float32")

    def curvature(z, direction):
        def gain(z):
            return jnp.sum(calibrate.adaptive_softmax(z, paper) * direction)

        return jax.jvp(jax.grad(gain), (z,), (direction,))[1]

    def of_each(z, direction):
        return jax.vmap(jax.grad(lambda z: jnp.sum(calibrate.adaptive_softmax(z, paper) ** 2)))(z)

    z = jnp.where(jnp.isfinite(z), z, -3)
    for function in (curvature, of_each):
        whole = computed(WHOLE, function, z, direction)
        found = computed(of_six_rows(1), function, z, direction)
        np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(64, 16384), (2, 8, 256, 256)])
def test_gradients_of_many_rows_need_the_memory_of_a_block(shape, paper, computed):
    def gradient(z, direction):
        return jax.vjp(lambda z: calibrate.adaptive_softmax(z, paper), z)[1](direction)

    def memory():
        z = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jax.jit(gradient).lower(z, z).compile().memory_analysis().temp_size_in_bytes

    size = 4 * np.prod(shape)
    assert computed(WHOLE, memory) > 2 * size
    assert computed(row_blocks.RowBlockSizes(items=1 << 15), memory) < size / 4


@pytest.mark.parametrize(
    ("shape", "dtype", "axis"),
    [
        ((64, 1024), "float32", -1),  # few items
        ((1 << 20,), "float32", -1),  # one row
        ((1031, 1024), "float32", -1),  # a prime number of rows: a block would be a row
        ((1024, 1024), "int32", -1),
        ((1024, 1024), "float32", 0),
    ],
)
def test_what_has_no_blocks(shape, dtype, axis, paper):
    x = jax.ShapeDtypeStruct(shape, dtype)
    program = jax.make_jaxpr(lambda z: calibrate.adaptive_softmax(z, paper, axis=axis))(x)
    assert "scan" not in str(program)


def test_many_rows_have_blocks(paper):
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    program = jax.make_jaxpr(lambda z: calibrate.adaptive_softmax(z, paper))(x)
    assert "scan" in str(program)


@pytest.mark.parametrize("shape", ["b, 512", "b, t, 512", "b, 4, 512, 512"])
def test_programs_for_any_number_of_rows_are_exported(shape, paper):
    sizes = jax.export.symbolic_shape(shape)
    softmax = jax.jit(lambda z: calibrate.adaptive_softmax(z, paper))
    exported = jax.export.export(softmax)(jax.ShapeDtypeStruct(sizes, jnp.float32))
    z = jnp.zeros([n if isinstance(n, int) else 3 for n in sizes])
    np.testing.assert_allclose(exported.call(z), softmax(z), rtol=1e-6)


def test_a_mask_of_more_axes_has_no_blocks(paper):
    """It gives the result the mask's axes, at any size."""
    mask = np.ones((2, 1, 1), bool)
    for n in (4, 1024):
        x = jax.ShapeDtypeStruct((n, 1024), jnp.float32)
        softmax = jax.grad(lambda z: calibrate.adaptive_softmax(z, paper, where=mask).sum())
        assert jax.eval_shape(softmax, x).shape == x.shape
