"""Evaluate: the right accuracies, on sets that the fit has not seen."""

import jax
import numpy as np
import pytest

import calibrate
from calibrate.heads import load_head
from calibrate.pipeline import units
from calibrate.pipeline.evaluate import Score, evaluate


def test_accuracy_is_that_of_the_head_by_hand():
    head = load_head("max-retrieval")
    paper = calibrate.load("paper")
    (score,) = evaluate(head, [256], 400, 3, {"plain": None, "paper": paper})
    (unit,) = units.plan_units(256, 400)
    batch = head.sample(units.unit_seed("evaluate", 3, unit), 256, 400)
    attended = head.attend(batch)
    for name, weights in (
        ("plain", jax.nn.softmax(attended.logits)),
        ("paper", calibrate.adaptive_softmax(attended.logits, paper)),
    ):
        right = np.asarray(head.correct(attended, weights))
        np.testing.assert_array_equal(score.correct[name], right)
    assert score.accuracy("paper") > score.accuracy("plain")


def test_a_fit_for_another_head_is_scored_with_a_warning(toy_head):
    with pytest.warns(UserWarning, match="max-retrieval@1 was made for head 'max-retrieval-0'"):
        evaluate(toy_head, [8], 10, 0, {"own": calibrate.load("max-retrieval")})


def test_one_forward_pass_for_all_rules(toy_head):
    evaluate(toy_head, [8, 16], 100, 0, {"plain": None, "identity": calibrate.identity()})
    assert toy_head.attended == 200


def test_a_scorer_that_is_not_per_set_is_refused(toy_head):
    toy_head.correct = lambda attended, weights: (np.asarray(weights) > 0.3).mean()
    with pytest.raises(calibrate.CalibrateError, match=r"correct gave float64\(\), expected bool"):
        evaluate(toy_head, [8], 100, 0, {"plain": None})


def test_standard_errors():
    correct = {"a": np.array([1, 1, 0, 0], bool), "b": np.array([1, 1, 1, 0], bool)}
    score = Score(4, correct)
    assert score.accuracy("b") == 0.75
    assert score.standard_error("a") == pytest.approx(0.25)
    gain, error = score.gain("b", over="a")
    assert gain == 0.25
    assert error == pytest.approx(np.std([0, 0, 1, 0]) / 2)
