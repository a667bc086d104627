"""Commitment and susceptibility, against SciPy and finite differences in beta; entropy in JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from scipy.stats import entropy

import calibrate
from calibrate import commitment, susceptibility
from calibrate.core.masking import LOWEST


def rows(count=40, n=50, seed=0):
    """(count, n) float64 logits, from nearly uniform rows to nearly one-hot ones."""
    rng = np.random.default_rng(seed)
    return np.geomspace(0.01, 30, count)[:, None] * rng.standard_normal((count, n))


def softmax(z):
    weights = np.exp(z - z.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def expected_commitment(z):
    """rho of each row, without the items at -inf."""
    return np.array([np.log(len(x)) - entropy(softmax(x)) for x in (x[x > -np.inf] for x in z)])


def test_commitment_is_the_divergence_from_uniform():
    z = rows()
    np.testing.assert_allclose(commitment(z), expected_commitment(z), rtol=1e-9, atol=1e-12)
    uniform = np.full(z.shape, 1 / z.shape[1])
    np.testing.assert_allclose(commitment(z), entropy(softmax(z), uniform, axis=1), atol=1e-12)


def test_commitment_lies_between_0_and_log_n():
    np.testing.assert_array_equal(commitment(np.full((2, 7), 1e5)), 0)
    one_hot = np.where(np.arange(7) == 3, 50.0, 0.0)
    np.testing.assert_allclose(commitment(one_hot), np.log(7))
    for dtype in (np.float32, np.float64):
        rho = commitment(rows().astype(dtype))
        assert (rho >= 0).all()
        assert (rho <= np.log(dtype(50))).all()


def test_susceptibility_is_the_derivative_of_commitment_in_beta():
    z, step = rows(), 1e-5
    slope = (commitment((1 + step) * z) - commitment((1 - step) * z)) / (2 * step)
    np.testing.assert_allclose(susceptibility(z), slope, rtol=1e-5, atol=1e-8)


def test_susceptibility_is_the_variance_of_the_logits():
    z = rows()
    variance = [np.cov(x, aweights=p, ddof=0) for x, p in zip(z, softmax(z), strict=True)]
    np.testing.assert_allclose(susceptibility(z), variance, rtol=1e-9)
    two = np.array([0.0, 2.0])
    p = 1 / (1 + np.exp(-2))
    assert susceptibility(two) == pytest.approx(4 * p * (1 - p))


@pytest.mark.parametrize("number", [commitment, susceptibility])
def test_masked_items_count_for_nothing(number):
    z = rows()
    same = partial(np.testing.assert_allclose, desired=number(z), rtol=1e-12, atol=1e-14)
    more = np.full((40, 20), -np.inf)
    same(number(np.concatenate([more, z], axis=1)))
    real = np.arange(70) >= 20
    for anything in (0.0, np.nan, np.inf, 1e30):
        padded = np.concatenate([np.full_like(more, anything), z], axis=1)
        same(number(padded, real))
    low = z.max(axis=1, keepdims=True) + LOWEST - 1
    same(number(np.concatenate([z, low], axis=1)))
    mask = np.random.default_rng(1).random(z.shape) < 0.5
    np.testing.assert_array_equal(number(z, mask), number(np.where(mask, z, -np.inf)))


def test_masked_commitment_agrees_with_scipy():
    z = np.where(np.random.default_rng(1).random((40, 50)) < 0.5, rows(), -np.inf)
    np.testing.assert_allclose(commitment(z), expected_commitment(z), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("number", [commitment, susceptibility])
def test_a_shift_changes_nothing(number):
    z = np.round(256 * rows()) / 256  # a shift of 10,000 rounds none of them
    for shift in (-1e4, 1e4):
        np.testing.assert_array_equal(number(z + shift), number(z))


@pytest.mark.parametrize("number", [commitment, susceptibility])
def test_large_logits_do_not_overflow(number):
    most = float(np.finfo(np.float32).max)
    for dtype in (np.float32, np.float64):  # two items are left of the first row, one of the second
        z = np.array([[most, -most, most], [most, -most, 0]], dtype)
        np.testing.assert_array_equal(number(z), [0, 0])
        edge = number(np.array([0.0, LOWEST, LOWEST], dtype))  # none is masked
        assert edge == pytest.approx(np.log(3) if number is commitment else 0)


@pytest.mark.parametrize("number", [commitment, susceptibility])
def test_shapes_and_types(number):
    z = rows(24).reshape(2, 3, 4, 50)
    expected = number(z)
    assert (expected.shape, expected.dtype) == ((2, 3, 4), np.float64)
    np.testing.assert_allclose(number(z[1, 2, 3]), expected[1, 2, 3], rtol=1e-12)
    for narrow in (np.float32, np.float16):
        found = number(z.astype(narrow))
        assert (found.shape, found.dtype) == ((2, 3, 4), np.float32)
        of_same = number(z.astype(narrow).astype(float))
        np.testing.assert_allclose(found, of_same, rtol=1e-4, atol=1e-5)
    assert number(np.zeros((0, 5))).shape == (0,)
    assert number([[1, 2], [3, 5]]).shape == (2,)


BAD = {
    "all masked": ([[0.0, 1.0], [-np.inf, -np.inf]], None),
    "all masked by where": ([[0.0, 1.0]], [[False, False]]),
    "no items": (np.zeros((3, 0)), None),
    "NaN": ([[0.0, np.nan]], None),
    "infinite": ([[0.0, np.inf]], None),
    "no row": (1.0, None),
    "other mask": ([[0.0, 1.0]], [True, True, False]),
    "larger mask": ([0.0, 1.0], [[True, True], [True, False]]),
}


@pytest.mark.parametrize("number", [commitment, susceptibility])
@pytest.mark.parametrize("case", BAD)
def test_rows_without_a_value_are_refused(number, case):
    with pytest.raises(ValueError):  # noqa: PT011
        number(*BAD[case])


def test_the_message_names_the_row():
    z = np.zeros((2, 3, 4))
    z[1, 2] = -np.inf
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        commitment(z)


def test_tensors_of_pytorch():
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    z = torch.tensor(rows(), dtype=torch.bfloat16, requires_grad=True)
    found = commitment(z, torch.ones(50, dtype=torch.bool))
    np.testing.assert_array_equal(found, commitment(z.detach().float().numpy()))


def test_the_entropy_of_rows_with_nan():
    assert np.isnan(calibrate.entropy(jnp.array([1.0, jnp.nan])))
    # XLA's maximum may pass over a NaN in arrays large enough to be vectorised.
    large = np.zeros((512, 64), np.float32)
    large[7, 3] = np.nan
    np.testing.assert_array_equal(np.isnan(calibrate.entropy(large)), np.arange(512) == 7)


@pytest.mark.parametrize("axis", [(1, 2), 0, -1])
def test_axes_of_the_entropy(axis):
    rng = np.random.default_rng(1)
    logits, where = rng.standard_normal((3, 4, 5)).astype(np.float32), rng.random((3, 4, 5)) < 0.7

    def as_rows(x):
        moved = np.moveaxis(x, axis, range(-np.size(axis), 0))
        return moved.reshape(*moved.shape[: 3 - np.size(axis)], -1)

    for real in (None, where):
        exact = reference.entropy(as_rows(logits), where=None if real is None else as_rows(real))
        np.testing.assert_allclose(calibrate.entropy(logits, axis, real), exact, atol=1e-5)


def test_the_derivative_of_the_entropy_in_beta_is_minus_beta_times_the_variance():
    """Proposition 3.2: dH/dbeta = -beta Var_beta(z)."""
    z = jnp.asarray(np.random.default_rng(2).standard_normal(50), jnp.float32) * 2
    for beta in (0.5, 1.0, 3.0):
        p = reference.softmax(z, beta=beta)
        variance = p @ np.asarray(z, float) ** 2 - (p @ np.asarray(z, float)) ** 2
        slope = jax.grad(lambda b: calibrate.entropy(b * z))(beta)
        assert float(slope) == pytest.approx(-beta * variance, rel=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32"])
def test_the_entropy_is_float32_at_least(dtype):
    logits = jnp.arange(8).astype(dtype)
    H = calibrate.entropy(logits)
    assert H.dtype == jnp.float32
    assert float(H) == pytest.approx(float(reference.entropy(np.arange(8))), abs=1e-6)


def test_the_entropy_of_float64_is_float64():
    with jax.enable_x64(True):
        logits = np.random.default_rng(3).standard_normal(1000) * 4
        H = calibrate.entropy(logits)
        assert H.dtype == jnp.float64
        assert float(H) == pytest.approx(float(reference.entropy(logits)), abs=1e-12)
