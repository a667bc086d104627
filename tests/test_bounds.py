"""The estimated size at which a target falls below eps; of heads, see test_figures."""

import numpy as np
import pytest

from calibrate.maths.bounds import dispersal_size


def test_dispersal_size_is_exact_for_rows_of_equals():
    for others in (9, 99):
        logits = np.array([[3.0] + [0.0] * others])
        n = dispersal_size(logits, [0], eps=0.25)[0]
        assert np.exp(3) / (np.exp(3) + n - 1) == pytest.approx(0.25)


def test_dispersal_size_of_masked_items_and_of_one_item():
    logits = np.array([[3.0, 0.0, -np.inf, 0.0]])
    assert dispersal_size(logits, [0])[0] == pytest.approx(1 + np.exp(3))
    assert dispersal_size(np.array([[3.0]]), [0])[0] == np.inf


def test_dispersal_size_of_a_set_of_targets():
    """What a set of two equals has is twice what one has; a masked target has nothing."""
    logits = np.array([[3.0, 3.0, 0.0, 0.0, -np.inf, 1.0]])
    n = dispersal_size(logits, np.array([[True, True, False, False, True, False]]), eps=0.25)[0]
    mass, mean = 2 * np.exp(3), (2 + np.e) / 3
    assert mass / (mass + (n - 2) * mean) == pytest.approx(0.25)
    one = np.array([[True, False, False, False, False, False]])
    assert dispersal_size(logits, one, 0.1) == pytest.approx(dispersal_size(logits, [0], 0.1))
    assert dispersal_size(logits, np.ones((1, 6), bool))[0] == np.inf  # nobody else is there
