"""Profile: log p_t(beta) and its derivatives, against float64."""

import numpy as np
import pytest
from reference import softmax

from calibrate.rows.likelihood_profile import join_profiles, make_profile

LOW, HIGH = 1 / 1024, 1024.0


def rows(n, count=200, spread=6.0, seed=0):
    rng = np.random.default_rng(seed)
    value = rng.uniform(0, spread, (count, n))
    logits = (value + 0.3 * rng.standard_normal((count, n))).astype(np.float32)
    return logits, value.argmax(axis=1)


def exact(logits, target, beta):
    p = softmax(logits, beta=np.asarray(beta, float)[:, None])
    if target.ndim == 1:
        target = np.arange(logits.shape[1]) == target[:, None]
    with np.errstate(divide="ignore"):
        return np.log(np.sum(p, axis=1, where=target))


@pytest.mark.parametrize("n", [2, 50, 3000])
@pytest.mark.parametrize("spread", [0.1, 6.0, 150.0])
def test_values_between_the_bounds(n, spread):
    logits, target = rows(n, spread=spread)
    masked = np.concatenate([logits, np.full((200, 7), -np.inf, np.float32)], axis=1)
    series = make_profile(masked, target, LOW, HIGH)
    rng = np.random.default_rng(1)
    for beta in (np.full(200, LOW), np.full(200, HIGH), np.exp(rng.uniform(-7, 7, 200) * 0.99)):
        expected = exact(logits, target, beta)
        finite = expected > -300  # beyond, p_t is 0 in float64
        actual = series.log_p(beta)[finite]
        np.testing.assert_allclose(actual, expected[finite], rtol=2e-6, atol=5e-6)


@pytest.mark.parametrize("n", [1_024, 16_384, 131_072])
@pytest.mark.slow
def test_one_item_in_front_of_others_that_are_alike(n):
    """log p turns within 1 / log n of log beta, and does in all rows alike: no mean levels it."""
    betas = np.geomspace(LOW, HIGH, 400)
    for lead in np.geomspace(0.2, 11, 8):
        logits = np.zeros((1, n), np.float32)
        logits[0, 3] = lead
        series = make_profile(logits, np.array([3]), LOW, HIGH)
        values = np.array([series.log_p(np.array([beta]))[0] for beta in betas])
        expected = -np.log1p((n - 1) * np.exp(-betas * np.float64(np.float32(lead))))
        np.testing.assert_allclose(values, expected, atol=2e-4)


def test_derivatives_are_those_of_the_values():
    series = make_profile(*rows(80), LOW, HIGH)
    beta, h = np.random.default_rng(2).uniform(1.1, 60, 200), 1e-3
    value, first, second = series.derivatives(beta)
    above, below = series.derivatives(beta + h), series.derivatives(beta - h)
    np.testing.assert_array_equal(value, series.log_p(beta))
    np.testing.assert_allclose(first, (above[0] - below[0]) / (2 * h), atol=1e-4)
    np.testing.assert_allclose(second, (above[1] - below[1]) / (2 * h), atol=1e-4)
    assert (second < 1e-6).all()  # log p_t is concave in beta


def test_the_mass_of_several_targets():
    logits, target = rows(60)
    several = np.zeros((200, 60), bool)
    several[np.arange(200), target] = True
    beta = np.random.default_rng(3).uniform(LOW, HIGH, 200)
    one = make_profile(logits, target, LOW, HIGH).log_p(beta)
    np.testing.assert_array_equal(make_profile(logits, several, LOW, HIGH).log_p(beta), one)
    several[:, :5] = True
    expected = exact(logits, several, beta)
    series = make_profile(logits, several, LOW, HIGH).log_p(beta)
    np.testing.assert_allclose(series, expected, rtol=2e-6, atol=5e-5)
    assert (series >= one - 1e-5).all()


def test_the_weighted_sum_is_that_of_the_rows():
    series = make_profile(*rows(30), LOW, HIGH)
    weight = np.random.default_rng(4).random(200)
    total = series.weighted_sum(weight)
    for beta in (LOW, 0.37, 1.0, 5.1, HIGH):
        expected = weight @ series.log_p(np.full(200, beta))
        np.testing.assert_allclose(total.log_p(np.array([beta]))[0], expected, rtol=1e-5)


def test_profiles_are_concave_if_each_part_is():
    z = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    one = make_profile(z, np.arange(4), 0.1, 10.0)
    several = make_profile(z, np.arange(6) < np.full((4, 1), 2), 0.1, 10.0)
    found = [join_profiles(parts).concave for parts in ([one, one], [one, several], [several, one])]
    assert found == [True, False, False]
