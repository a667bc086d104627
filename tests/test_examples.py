"""Example sets, item by item, as the head made them."""

from dataclasses import replace

import numpy as np
import pytest

import calibrate
from calibrate.maths.reference import entropy, softmax
from calibrate.rows.example_sets import (
    draw_examples,
    estimated_dispersal,
    measured_dispersal,
    misranked_rows,
    reach,
    shares,
)
from calibrate.rows.heads import load_head


@pytest.fixture(scope="module")
def examples():
    return draw_examples(load_head("max-retrieval-1"), [16, 128, 1024], 48, 0)


def test_the_largest_items_are_those_of_the_largest_keys(examples):
    head = load_head("max-retrieval-1")
    from calibrate.rows.work_units import Unit, unit_seed

    for closeup in examples:
        seed = unit_seed("closeup", 0, Unit(closeup.size, 0, 0, 48))
        batch = head.sample(seed, closeup.size, 48)
        np.testing.assert_array_equal(closeup.target, batch.target)
        order = np.argsort(batch.priority, axis=1)[:, -16:]
        np.testing.assert_array_equal(closeup.largest, order)
        np.testing.assert_array_equal(closeup.largest[:, -1], batch.target)


def test_a_head_without_keys_shows_its_highest_logits_and_the_target_last(toy_head):
    (closeup,) = draw_examples(toy_head, [64], 20, 0)
    assert closeup.spread_bound is None
    np.testing.assert_array_equal(closeup.largest[:, -1], closeup.target)
    others = np.take_along_axis(closeup.logits, closeup.largest[:, :-1], axis=1)
    assert (np.diff(others, axis=1) >= 0).all()


def test_bad_rows_are_left_out():
    from conftest import ToyHead

    def spoil(logits):
        logits[0, 3], logits[1, 2] = np.nan, np.inf

    (closeup,) = draw_examples(ToyHead(spoil=spoil), [16], 10, 0)
    assert len(closeup.logits) == 8


def test_coefficients_under_a_fit_are_those_of_the_runtime(examples, by_size, by_both):
    for closeup in examples:
        logits = closeup.logits.astype(np.float32)
        for fit in (calibrate.load("max-retrieval@1"), by_size, by_both):
            expected = np.asarray(calibrate.adaptive_softmax(logits, fit))
            np.testing.assert_allclose(closeup.coefficients(fit), expected, atol=2e-5)
        np.testing.assert_allclose(closeup.coefficients(None), softmax(closeup.logits))
        np.testing.assert_allclose(closeup.entropy, entropy(closeup.logits))


def test_misranked_rows_are_solved(examples):
    rows = misranked_rows(examples).interior()
    assert set(rows.size) <= {16, 128, 1024}
    assert (rows.beta > 0).all()
    assert len(rows.beta) > 10


def test_shares_add_up_and_follow_the_domain(examples, make_fit):
    fit = make_fit(domain=(1.0, 2.0))
    for closeup, share in zip(examples, shares(examples, fit), strict=True):
        assert sum(share[1:]) == pytest.approx(1)
        assert share.above == pytest.approx((closeup.entropy > 2).mean())
        assert share.gated == pytest.approx((closeup.entropy <= 0.5).mean())


def test_shares_of_a_log_size_fit_are_of_the_sizes_that_it_was_made_of(examples, by_size):
    """16, 128 and 1,024 items; its domain ends at the first and the last."""
    (entry,) = by_size.entries
    smaller = replace(by_size, entries=(replace(entry, domain=(float(np.log(17)), 6.0)),))
    for fit, inside in ((by_size, [1, 1, 1]), (smaller, [0, 1, 0])):
        found = shares(examples, fit)
        assert [share.inside for share in found] == inside
        assert [share.gated for share in found] == [0, 0, 0]
        assert found[0].below == 1 - inside[0]
        assert found[2].above == 1 - inside[2]


def test_shares_of_a_fit_by_both_are_of_its_entropies_and_its_sizes(examples, by_both):
    """Of 16, 128 and 1,024 items, the first are fewer than it was made of."""
    entry = replace(
        by_both.only, domain=(1.0, 2.0, float(np.log(128)), float(np.log(1024))), check=()
    )
    other, *within = shares(examples, replace(by_both, entries=(entry,)))
    assert other[1:] == (0, 0, 0, 0, 1)
    for sets, share in zip(examples[1:], within, strict=True):
        assert share.other_size == share.gated == 0
        assert share.below == pytest.approx((sets.entropy < 1).mean())
        assert share.above == pytest.approx((sets.entropy > 2).mean())
        assert sum(share[1:]) == pytest.approx(1)


def test_masked_items_are_not_counted(by_size):
    from conftest import ToyHead

    def mask(logits):
        logits[:, 16:] = -np.inf

    (closeup,) = draw_examples(ToyHead(spoil=mask), [64], 200, 0)
    np.testing.assert_allclose(closeup.beta(by_size), 0.5 * np.log(16) + 0.6)


def test_reach_holds_bounds_over_what_was_seen(examples):
    for found in reach(examples):
        assert found.spread <= found.spread_bound
        assert found.highest <= found.highest_bound
    assert 100 < estimated_dispersal(examples) < 1_000
    assert 128 < measured_dispersal(examples) < 1_024
    assert measured_dispersal(examples[:1]) is None


def test_bounds_of_a_masked_head_count_its_unmasked_items():
    from conftest import ToyHead

    def mask(logits):
        logits[:, 3:] = -np.inf
        logits[:, :3] += 40 * np.arange(len(logits))[:, None]  # rows at very different heights

    examples = draw_examples(ToyHead(spoil=mask), [64], 200, 0)
    (found,) = reach(examples)
    assert found.highest <= found.highest_bound <= 1
    assert found.spread < 10
