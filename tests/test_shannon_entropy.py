"""Entropy against the float64 reference, its closed forms and its derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from backends import BACKENDS, values
from cases import CASES

import calibrate


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param()


def test_agrees_on_the_table_of_cases(backend):
    for case in CASES:
        actual = values(backend.entropy(case.logits, where=case.where))
        exact = reference.entropy(case.logits.astype(np.float64), where=case.where)
        np.testing.assert_allclose(actual, exact, atol=1e-5, rtol=0, err_msg=case.name)


def test_closed_forms():
    assert float(calibrate.entropy(jnp.zeros(64))) == pytest.approx(np.log(64), abs=1e-6)
    assert float(calibrate.entropy(jnp.array([1e4, 0.0, -1e4]))) == 0


def test_rows_without_a_distribution():
    nothing = jnp.full(4, -jnp.inf)
    assert np.isnan(calibrate.entropy(nothing))
    assert float(calibrate.entropy(nothing, where=jnp.zeros(4, bool))) == 0
    assert np.isnan(calibrate.entropy(jnp.array([1.0, jnp.nan])))
    # XLA's maximum may pass over a NaN in arrays large enough to be vectorised.
    large = np.zeros((512, 64), np.float32)
    large[7, 3] = np.nan
    np.testing.assert_array_equal(np.isnan(calibrate.entropy(large)), np.arange(512) == 7)


@pytest.mark.parametrize("axis", [0, -1, (1, 2)])
def test_axes(axis):
    rng = np.random.default_rng(1)
    logits, where = rng.standard_normal((3, 4, 5)).astype(np.float32), rng.random((3, 4, 5)) < 0.7

    def rows(x):
        moved = np.moveaxis(x, axis, range(-np.size(axis), 0))
        return moved.reshape(*moved.shape[: 3 - np.size(axis)], -1)

    for real in (None, where):
        exact = reference.entropy(rows(logits), where=None if real is None else rows(real))
        np.testing.assert_allclose(calibrate.entropy(logits, axis, real), exact, atol=1e-5)


def test_derivative_in_beta_is_minus_beta_times_the_variance():
    """Proposition 3.2: dH/dbeta = -beta Var_beta(z)."""
    z = jnp.asarray(np.random.default_rng(2).standard_normal(50), jnp.float32) * 2
    for beta in (0.5, 1.0, 3.0):
        p = reference.softmax(z, beta=beta)
        variance = p @ np.asarray(z, float) ** 2 - (p @ np.asarray(z, float)) ** 2
        slope = jax.grad(lambda b: calibrate.entropy(b * z))(beta)
        assert float(slope) == pytest.approx(-beta * variance, rel=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32"])
def test_at_least_float32(dtype):
    logits = jnp.arange(8).astype(dtype)
    H = calibrate.entropy(logits)
    assert H.dtype == jnp.float32
    assert float(H) == pytest.approx(float(reference.entropy(np.arange(8))), abs=1e-6)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        logits = np.random.default_rng(3).standard_normal(1000) * 4
        H = calibrate.entropy(logits)
        assert H.dtype == jnp.float64
        assert float(H) == pytest.approx(float(reference.entropy(logits)), abs=1e-12)
