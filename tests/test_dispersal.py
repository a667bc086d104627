"""Dispersal: bounds hold on every set, and the estimate is close to the measured size."""

import dispersal
import numpy as np
import pytest
from dispersal import ExampleSets, estimated_dispersal, measured_dispersal
from reference import softmax

import calibrate
from calibrate.report.plot_style import save_figure
from calibrate.rows.heads import load_head

SIZES = [16, 128, 1024]


@pytest.fixture(scope="module")
def examples():
    return dispersal.draw_examples(load_head("max-retrieval-1"), SIZES, 48, 0)


def test_sets_are_as_the_head_and_the_runtime_see_them(examples):
    fit = calibrate.load("max-retrieval@1")
    for sets in examples:
        np.testing.assert_array_equal(sets.largest[:, -1], sets.target)
        expected = calibrate.adaptive_softmax(sets.logits.astype(np.float32), fit)
        np.testing.assert_allclose(sets.coefficients(fit), expected, atol=2e-5)


def test_the_bounds_of_proposition_3_1_and_lemma_2_1_hold_on_every_set(examples):
    """Lemma 2.1: coefficients lie in [exp(-beta delta) / n, exp(beta delta) / n]."""
    for sets in examples:
        assert (sets.spread() <= sets.spread_bound).all()
        for beta in (0.3, 1.0, 4.0):
            log_share = np.log(softmax(sets.logits, beta=beta)) + np.log(sets.size)
            assert (np.abs(log_share).max(axis=1) <= beta * sets.spread() + 1e-9).all(), beta


def test_the_spread_bound_is_reached_by_opposite_items():
    """Two items along the key matrix' first singular direction, and a query along their image."""
    key = np.random.default_rng(0).standard_normal((5, 5))
    left, _, right = np.linalg.svd(key)
    items, query = np.array([[3 * right[0], -3 * right[0]]]), 2 * left[:, 0]
    nothing = {"kernel": np.zeros((5, 5)), "bias": np.zeros(5)}
    params = {
        "query_1": {"kernel": np.zeros((1, 5)), "bias": np.zeros(5)}, "query_2": nothing,
        "attention_query": {**nothing, "bias": query}, "attention_key": {"kernel": key},
    }  # fmt: skip
    bound = dispersal.spread_bound(params, np.zeros(1, np.float32), items)
    assert np.ptp(items[0] @ key.T @ query) / 5**0.5 == pytest.approx(bound[0])


def test_dispersal_is_exact_for_equals_and_foretold_for_a_head(examples):
    equals = ExampleSets(10, np.array([[3.0] + [0.0] * 9]), np.array([0]), *[np.zeros(1)] * 3)
    n = estimated_dispersal(equals, eps=0.25)
    assert np.exp(3) / (np.exp(3) + n - 1) == pytest.approx(0.25)
    measured = measured_dispersal(examples)
    assert 128 < measured < 1024
    assert abs(np.log(estimated_dispersal(examples[-1]) / measured)) < np.log(4 / 3)
    assert measured_dispersal(examples[:1]) is None


def test_the_record_and_its_figure(examples, tmp_path):
    of_long = [*examples, *dispersal.draw_examples(load_head("max-retrieval-1"), [512], 16, 0)]
    record = dispersal.record_of(sorted(of_long, key=lambda sets: sets.size))
    assert list(record["0.5"]["estimate"]) == ["512", "1024"]
    assert 128 < record["0.5"]["measured"] < 1_024
    assert record["0.25"]["estimate"]["1024"] > record["0.5"]["estimate"]["1024"]
    spreads = dispersal.spreads_of(examples)
    assert list(spreads) == [f"{n}" for n in SIZES]
    assert spreads["128"]["measured"] == round(float(np.median(examples[1].spread())), 1)
    assert all(spread["measured"] < spread["bound"] for spread in spreads.values())
    figure = dispersal.heatmap_figure(
        examples, [dispersal.BASELINE, calibrate.load("max-retrieval@1")]
    )
    save_figure(tmp_path / "x.png", figure)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
