"""Scores of a head: accuracies and log-likelihoods on held-out inputs."""

import jax
import numpy as np
import pytest
from fake_progress import Told

import calibrate
from calibrate.evidence.baselines import hard_attention, one_constant
from calibrate.evidence.calibration_error import ranked_first
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, RANKED, RIGHT
from calibrate.rows import units
from calibrate.rows.heads import load_head
from calibrate.rows.score import betas_of_rows, score_head, softmax_at


@pytest.mark.slow
def test_accuracy_is_that_of_the_head_by_hand():
    head = load_head("max-retrieval")
    paper = calibrate.load("paper")
    evidence = score_head(head, [256], 400, 3, {"paper": paper})
    (unit,) = units.plan_units(256, 400)
    batch = head.sample(units.unit_seed("evaluate", 3, unit), 256, 400)
    attended = head.attend(batch)
    for name, weights in (
        ("baseline", jax.nn.softmax(attended.logits)),
        ("paper", calibrate.adaptive_softmax(attended.logits, paper)),
    ):
        right = np.asarray(head.correct(attended, weights))
        np.testing.assert_array_equal(evidence.scores(name, RIGHT), right)
    assert evidence.gain("paper", RIGHT).mean > 0


def test_every_input_is_scored_once_at_its_size(toy_head):
    told = Told()
    evidence = score_head(toy_head, [16, 8], 100, 0, {"twice": one_constant(2.0)}, progress=told)
    assert toy_head.attended == 200  # one forward pass for all rules
    assert told.stages == [("scoring", 2, None)]
    assert len(told.steps) == 2
    assert evidence.rules == ("baseline", "twice")
    assert {size: part.n for size, part in evidence.by("size").items()} == {8: 100, 16: 100}
    assert evidence.of.name == "toy"
    assert evidence.n_groups == 0
    (unit,) = units.plan_units(8, 100)
    z = toy_head.sample(units.unit_seed("evaluate", 0, unit), 8, 100).logits
    target = toy_head.sample(units.unit_seed("evaluate", 0, unit), 8, 100).target
    exact = jax.nn.log_softmax(2 * z)[np.arange(100), target]
    np.testing.assert_allclose(evidence.by("size")[8].scores("twice", LOG_P), exact, atol=1e-5)
    confidence, ranked = (evidence.by("size")[8].scores("twice", m) for m in (CONFIDENCE, RANKED))
    np.testing.assert_allclose(confidence, jax.nn.softmax(2 * z).max(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(ranked, evidence.by("size")[8].scores("baseline", RIGHT))
    right = evidence.by("size")[16].scores("baseline", RIGHT)
    estimate = evidence.by("size")[16].mean("baseline", RIGHT)
    assert estimate.mean == pytest.approx(right.mean())
    assert estimate.error == pytest.approx(right.std(ddof=1) / 10, rel=0.02)


def test_a_fit_for_another_head_is_scored_with_a_warning(toy_head):
    with pytest.warns(UserWarning, match="max-retrieval@1 .*'max-retrieval-0'"):
        score_head(toy_head, [8], 10, 0, {"own": calibrate.load("max-retrieval")})


def test_an_accuracy_that_is_not_per_input_is_refused(toy_head):
    toy_head.correct = lambda attended, weights: (np.asarray(weights) > 0.3).mean()
    with pytest.raises(calibrate.CalibrateError, match=r"'toy': correct gave float64"):
        score_head(toy_head, [8], 100, 0, {})


def test_a_head_without_correct_has_no_accuracy(toy_head):
    toy_head.correct = None
    evidence = score_head(toy_head, [8], 100, 0, {})
    assert set(evidence.values) == {LOG_P, CONFIDENCE, RANKED}


def test_a_tie_is_ranked_first_as_often_as_argmax_picks_the_target():
    z = np.array([[2, 2, 2, 0], [1, 1, 0, -np.inf], [0, 3, 1, 1], [2, 0, 2, 2]])
    assert ranked_first(z, np.array([0, 2, 1, 3])) == pytest.approx([1 / 3, 0, 1, 1 / 3])
    several = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 1], [0, 1, 0, 1]], bool)
    assert ranked_first(z, several) == pytest.approx([2 / 3, 1, 0, 1 / 3])


def test_weights_of_many_rules_at_once_are_those_of_the_runtime(make_fit, by_size, by_both):
    rng = np.random.default_rng(0)
    z = (4 * rng.standard_normal((20, 50))).astype(np.float32)
    z[3, 10:] = -np.inf
    z[4, :2] = z[4].max() + 1  # two equal maxima
    fits = [
        calibrate.load("max-retrieval"), by_size, by_both, calibrate.load("paper"), make_fit(),
        calibrate.identity(), one_constant(2.5), hard_attention(),
    ]  # fmt: skip
    weights = softmax_at(z, betas_of_rows(z, fits))
    for i, fit in enumerate(fits[:5]):
        expected = np.asarray(calibrate.adaptive_softmax(z, fit))
        np.testing.assert_allclose(weights[:, i], expected, atol=2e-6)
    np.testing.assert_allclose(weights[:, 5], jax.nn.softmax(z), atol=1e-6)
    np.testing.assert_allclose(weights[:, 6], jax.nn.softmax(2.5 * z), atol=1e-6)
    highest = z == z.max(axis=1, keepdims=True)
    hard = highest / highest.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(weights[:, 7], hard.astype(np.float32))


def test_a_head_may_score_many_rules_at_once(toy_head):
    rules = {"twice": one_constant(2.0), "hard": hard_attention()}
    alone = score_head(toy_head, [16], 300, 0, rules)
    shapes = []

    def correct_each(attended, weights):
        shapes.append(weights.shape)
        return np.asarray(weights).argmax(axis=2) == attended.target[:, None]

    toy_head.correct_each = correct_each
    together = score_head(toy_head, [16], 300, 0, rules)
    assert shapes == [(300, 3, 16)]
    np.testing.assert_array_equal(alone.values[RIGHT], together.values[RIGHT])


def test_correct_each_of_the_trained_head_is_correct_of_each():
    head = load_head("max-retrieval-2")
    batch = head.sample(3, 200, 300)
    attended = head.attend(batch)
    weights = np.stack([jax.nn.softmax(beta * attended.logits) for beta in (1, 3, 9)], axis=1)
    each = np.asarray(head.correct_each(attended, weights))
    for i in range(3):
        one = np.asarray(head.correct(attended, weights[:, i]))
        assert (one != each[:, i]).sum() <= 1  # the same up to the rounding of a tie
