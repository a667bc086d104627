"""Bounds: they hold on every row of trained heads; the estimate is close to what is measured."""

import numpy as np
import pytest

from calibrate.maths.bounds import coefficient_bounds, dispersal_size, spread_bound
from calibrate.maths.reference import softmax
from calibrate.rows.heads import load_head

SETS = 64


@pytest.fixture(
    scope="module",
    params=["max-retrieval-0", pytest.param("max-retrieval-7", marks=pytest.mark.slow)],
)
def head(request):
    return load_head(request.param)


@pytest.mark.parametrize("size", [16, 100, 1024])
def test_both_bounds_hold_on_every_row_of_a_trained_head(head, size):
    batch = head.sample(5, size, SETS)
    logits = np.asarray(head.attend(batch).logits, float)
    spread = np.ptp(logits, axis=1)
    by_weights = head.spread_bound(batch)
    assert (spread <= by_weights).all()
    for beta in (0.3, 1.0, 4.0):
        p = softmax(logits, beta=beta)
        for delta in (spread, by_weights):
            lower, upper = coefficient_bounds(delta, size, beta)
            assert (lower[:, None] <= p * (1 + 1e-12)).all(), beta
            assert (p <= upper[:, None] * (1 + 1e-12)).all(), beta


def logits_of(head, batch):
    """Logits of a large batch, some sets at a time."""
    parts = (slice(i, i + 32) for i in range(0, len(batch.target), 32))
    return np.concatenate(
        [np.asarray(head.attend(type(batch)(*(x[p] for x in batch))).logits, float) for p in parts]
    )


def test_spread_bound_is_reached_by_opposite_items():
    """Two items along the key matrix' first singular direction, and a query along their image."""
    rng = np.random.default_rng(0)
    key = rng.standard_normal((5, 5))
    left, singular, right = np.linalg.svd(key)
    items = np.array([right[0], -right[0]]) * 3.0
    query = left[:, 0] * 2.0
    logits = items @ key.T @ query
    assert np.ptp(logits) == pytest.approx(spread_bound(2.0, singular[0], 3.0))


def test_coefficient_bounds_are_those_of_the_lemma():
    lower, upper = coefficient_bounds([1.0, 50.0], [100, 100], 2.0)
    np.testing.assert_allclose(lower, [np.exp(-2) / 100, np.exp(-100) / 100])
    np.testing.assert_allclose(upper, [np.exp(2) / 100, 1.0])


def test_dispersal_size_is_exact_for_rows_of_equals():
    for others in (9, 99):
        logits = np.array([[3.0] + [0.0] * others])
        n = dispersal_size(logits, [0], eps=0.25)[0]
        assert np.exp(3) / (np.exp(3) + n - 1) == pytest.approx(0.25)


def test_dispersal_size_of_masked_items_and_of_one_item():
    logits = np.array([[3.0, 0.0, -np.inf, 0.0]])
    assert dispersal_size(logits, [0])[0] == pytest.approx(1 + np.exp(3))
    assert dispersal_size(np.array([[3.0]]), [0])[0] == np.inf


@pytest.mark.slow
def test_dispersal_size_foretells_where_the_target_falls_below_eps(head):
    """The measured size, between two that bracket it, is within a third of the estimate."""
    sizes = 64 * 2 ** np.arange(7)
    medians = []
    for size in sizes:
        batch = head.sample(7, int(size), 128)
        logits = logits_of(head, batch)
        of_target = np.take_along_axis(softmax(logits), batch.target[:, None], axis=1)
        medians.append(np.median(of_target))
    for eps in (0.5, 0.25, 0.1):
        estimate = np.median(dispersal_size(logits, batch.target, eps))
        measured = np.exp(np.interp(-eps, -np.array(medians), np.log(sizes)))
        assert abs(np.log(estimate / measured)) < np.log(4 / 3), eps


def test_dispersal_size_of_a_set_of_targets():
    """What a set of two equals has is twice what one has; a masked target has nothing."""
    logits = np.array([[3.0, 3.0, 0.0, 0.0, -np.inf, 1.0]])
    n = dispersal_size(logits, np.array([[True, True, False, False, True, False]]), eps=0.25)[0]
    mass, mean = 2 * np.exp(3), (2 + np.e) / 3
    assert mass / (mass + (n - 2) * mean) == pytest.approx(0.25)
    one = np.array([[True, False, False, False, False, False]])
    assert dispersal_size(logits, one, 0.1) == pytest.approx(dispersal_size(logits, [0], 0.1))
    assert dispersal_size(logits, np.ones((1, 6), bool))[0] == np.inf  # nobody else is there
