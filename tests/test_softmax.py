"""The drop-in softmax against the float64 reference, jax.nn.softmax and the paper's snippet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import calibrate
from calibrate.maths import reference


def rows(n, scale, seed=0, count=16):
    rng = np.random.default_rng([seed, n])
    return (rng.standard_normal((count, n)) * scale).astype(np.float32)


def expected(logits, fit, where=None):
    entry = fit.only
    return reference.adaptive_softmax(
        logits, entry.coefficients, entry.domain, fit.rule, where=where
    )


@pytest.mark.parametrize("n", [1, 2, 64, 1_024, 65_536])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 5.0, 1e4])
def test_agrees_with_the_reference(n, scale, paper):
    logits = rows(n, scale, count=4)
    actual = calibrate.adaptive_softmax(logits, paper)
    np.testing.assert_allclose(actual, expected(logits, paper), atol=2e-6, rtol=2e-5)


def test_the_feature_is_on(paper):
    """Trap 5: plain softmax must fail this."""
    logits = rows(256, 2.0)
    assert (np.asarray(calibrate.inverse_temperature(calibrate.entropy(logits), paper)) > 1).all()
    sharper = calibrate.adaptive_softmax(logits, paper).max(axis=1)
    assert (sharper > 1.5 * jax.nn.softmax(logits).max(axis=1)).all()


def published_procedure(logits):
    """The paper's published procedure (section 3), in words of this test: two softmax calls."""
    probs = jax.nn.softmax(logits)
    H = -(probs * jnp.log(probs + 1e-9)).sum(-1, keepdims=True)
    p = -0.037 * H**4 + 0.481 * H**3 - 2.3 * H**2 + 4.917 * H - 1.791
    return jax.nn.softmax(logits * jnp.where(H > 0.5, jnp.maximum(p, 1.0), 1.0))


@pytest.mark.parametrize("n", [4, 64, 512, 16_384])
@pytest.mark.parametrize("scale", [0.3, 2.0, 6.0])
def test_the_papers_fit_equals_the_papers_procedure(n, scale, paper):
    logits = rows(n, scale, seed=1)
    actual = calibrate.adaptive_softmax(logits, paper)
    np.testing.assert_allclose(actual, published_procedure(logits), atol=1e-6, rtol=2e-4)


@pytest.mark.parametrize("axis", [0, 1, -1, (0, 2), (0, 1, 2)])
def test_identity_is_jax_softmax(axis):
    logits = np.random.default_rng(5).standard_normal((3, 4, 5)).astype(np.float32)
    actual = calibrate.adaptive_softmax(logits, calibrate.identity(), axis=axis)
    np.testing.assert_allclose(actual, jax.nn.softmax(logits, axis=axis), rtol=1e-6)


def test_masks_are_structural(paper):
    """Trap 3: any kind of mask gives softmax over the real items, and 0 elsewhere."""
    logits, where = rows(200, 2.0), np.arange(200) < 150
    short = np.asarray(calibrate.adaptive_softmax(logits[:, :150], paper))
    for mask in (-np.inf, np.finfo(np.float32).min, -1e9):
        masked = np.where(where, logits, np.float32(mask))
        actual = np.asarray(calibrate.adaptive_softmax(masked, paper))
        np.testing.assert_allclose(actual[:, :150], short, atol=1e-7, rtol=1e-5)
        assert (actual[:, 150:] == 0).all()
    hot = np.where(where, logits, np.float32(1e4))
    actual = np.asarray(calibrate.adaptive_softmax(hot, paper, where=where))
    np.testing.assert_allclose(actual[:, :150], short, atol=1e-7, rtol=1e-5)
    assert (actual[:, 150:] == 0).all()


def test_empty_rows_as_in_jax(paper):
    logits = jnp.array([[-jnp.inf] * 3, [1.0, 2.0, 3.0], [-jnp.inf, 0.0, 1.0]])
    where = jnp.array([[True] * 3, [False] * 3, [True] * 3])
    for kwargs in ({}, {"where": where}):
        ours = calibrate.adaptive_softmax(logits, calibrate.identity(), **kwargs)
        np.testing.assert_allclose(ours, jax.nn.softmax(logits, **kwargs), rtol=1e-6)
    assert calibrate.adaptive_softmax(jnp.zeros((2, 0)), paper).shape == (2, 0)


def test_logits_at_the_ends_of_float32(paper):
    """The difference overflows; the probabilities are still 1 and 0."""
    logits = jnp.array([[3e38, -3e38, -3e38], [0.0, 0.0, -3e38]])
    probs = calibrate.adaptive_softmax(logits, paper)
    np.testing.assert_allclose(probs, [[1, 0, 0], [0.5, 0.5, 0]], atol=1e-6)
    assert np.isfinite(calibrate.entropy(logits)).all()


def test_no_nan_in_gradients_of_masked_rows(paper):
    logits = jnp.array([[1.0, -jnp.inf, 0.5, 2.0], [1.0, 1e4, 0.5, 2.0], [3.0, 1.0, 2.0, 0.0]])
    where = jnp.array([[True] * 4, [True, False, True, True], [False] * 4])

    def loss(z):
        return (calibrate.adaptive_softmax(z, paper, where=where) * jnp.arange(4.0)).sum()

    gradient = jax.grad(loss)(logits)
    assert np.isfinite(gradient).all()
    assert (np.asarray(gradient)[~np.asarray(where)] == 0).all()


def test_gradient_flows_through_the_entropy(paper):
    with jax.enable_x64(True):
        z = np.random.default_rng(6).standard_normal(40) * 2
        weights = np.arange(40.0)

        def value(logits):
            return (calibrate.adaptive_softmax(logits, paper) * weights).sum()

        gradient = jax.grad(value)(z)
        step = 1e-6
        for i in (0, 7, 39):
            nudge = step * (np.arange(40) == i)
            slope = (expected(z + nudge, paper) - expected(z - nudge, paper)) @ weights / 2 / step
            assert float(gradient[i]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32"])
def test_dtype_follows_jax(dtype, paper):
    logits = jnp.asarray(rows(64, 3.0)).astype(dtype)
    actual = calibrate.adaptive_softmax(logits, paper)
    assert (
        actual.dtype == jax.nn.softmax(logits.astype(float) if dtype == "int32" else logits).dtype
    )
    exact = expected(np.asarray(logits, np.float64), paper)
    eps = float(jnp.finfo(actual.dtype).eps)
    np.testing.assert_allclose(np.asarray(actual, float), exact, atol=2e-6, rtol=2 * eps + 2e-5)


def test_vmap_and_jit_change_nothing(paper):
    logits = rows(32, 2.0)
    plain = calibrate.adaptive_softmax(logits, paper)
    mapped = jax.vmap(lambda row: calibrate.adaptive_softmax(row, paper))(logits)
    jitted = jax.jit(calibrate.adaptive_softmax)(logits, paper)
    np.testing.assert_allclose(mapped, plain, rtol=1e-6)
    np.testing.assert_allclose(jitted, plain, rtol=1e-6)


@pytest.mark.parametrize("fit", [None, "max-retrieval", (1.0, 2.0)])
def test_what_is_no_fit_is_refused(fit):
    for function in (calibrate.adaptive_softmax, calibrate.inverse_temperature):
        with pytest.raises(calibrate.CoefficientsError, match="give a fit, such as calibrate.load"):
            function(jnp.zeros(4), fit)


def test_a_fit_per_head_is_refused_not_ignored(make_fit):
    from dataclasses import replace

    fit = make_fit()
    per_head = replace(fit, entries=(replace(fit.only, head=0), replace(fit.only, head=1)))
    with pytest.raises(calibrate.CoefficientsError, match="entries per layer or head"):
        calibrate.adaptive_softmax(jnp.zeros(4), per_head)
