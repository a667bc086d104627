"""Evaluate: the right accuracies, on sets that the fit has not seen."""

import jax
import numpy as np
import pytest

import calibrate
from calibrate.rows import work_units
from calibrate.rows.baselines import HARD, HINDSIGHT, PLAIN, LogSize
from calibrate.rows.heads import load_head
from calibrate.rows.score_head import (
    HindsightSearch,
    RulesAtSize,
    Score,
    held_out_sets,
    score_head,
)


@pytest.mark.slow
def test_accuracy_is_that_of_the_head_by_hand():
    head = load_head("max-retrieval")
    paper = calibrate.load("paper")
    (score,) = score_head(head, [256], 400, 3, {"plain": PLAIN, "paper": paper})
    (unit,) = work_units.plan_units(256, 400)
    batch = head.sample(work_units.unit_seed("evaluate", 3, unit), 256, 400)
    attended = head.attend(batch)
    for name, weights in (
        ("plain", jax.nn.softmax(attended.logits)),
        ("paper", calibrate.adaptive_softmax(attended.logits, paper)),
    ):
        right = np.asarray(head.correct(attended, weights))
        np.testing.assert_array_equal(score.correct[name], right)
    assert score.accuracy("paper") > score.accuracy("plain")


def test_a_fit_for_another_head_is_scored_with_a_warning(toy_head):
    with pytest.warns(UserWarning, match="max-retrieval@2 was made for head 'max-retrieval-0'"):
        score_head(toy_head, [8], 10, 0, {"own": calibrate.load("max-retrieval")})


def test_one_forward_pass_for_all_rules(toy_head):
    score_head(toy_head, [8, 16], 100, 0, {"plain": PLAIN, "identity": calibrate.identity()})
    assert toy_head.attended == 200


def test_a_scorer_that_is_not_per_set_is_refused(toy_head):
    toy_head.correct = lambda attended, weights: (np.asarray(weights) > 0.3).mean()
    with pytest.raises(calibrate.CalibrateError, match=r"correct gave float64\(\), expected bool"):
        score_head(toy_head, [8], 100, 0, {"plain": PLAIN})


def test_what_is_no_rule_is_refused(toy_head):
    with pytest.raises(TypeError, match="rule 'plain' is None; give a fit, or a rule of"):
        score_head(toy_head, [8], 100, 0, {"plain": None})


def test_standard_errors():
    correct = {"a": np.array([1, 1, 0, 0], bool), "b": np.array([1, 1, 1, 0], bool)}
    score = Score(4, correct)
    assert score.accuracy("b") == 0.75
    assert score.standard_error("a") == pytest.approx(np.sqrt(0.25 / 3))
    gain, error = score.gain("b", over="a")
    assert gain == 0.25
    assert error == pytest.approx(np.std([0, 0, 1, 0], ddof=1) / 2)


def test_default_numbers_of_sets():
    assert [held_out_sets(n) for n in (16, 256, 257, 4096, 4097)] == [
        32_768, 32_768, 4_096, 4_096, 1_024,
    ]  # fmt: skip


def test_weights_of_many_rules_at_once_are_those_of_the_runtime(make_fit, by_size, by_both):
    rng = np.random.default_rng(0)
    z = (4 * rng.standard_normal((20, 50))).astype(np.float32)
    z[3, 10:] = -np.inf
    z[4, :2] = z[4].max() + 1  # two equal maxima
    fits = [calibrate.load("max-retrieval"), by_size, by_both, calibrate.load("paper"), make_fit()]
    rules = RulesAtSize(fits, [1.0, 2.5, HARD.beta(50)])
    weights = np.asarray(rules.weights(z))
    for i, fit in enumerate(fits):
        expected = np.asarray(calibrate.adaptive_softmax(z, fit))
        np.testing.assert_allclose(weights[:, i], expected, atol=2e-6)
    np.testing.assert_allclose(weights[:, 5], jax.nn.softmax(z), atol=1e-6)
    np.testing.assert_allclose(weights[:, 6], jax.nn.softmax(2.5 * z), atol=1e-6)
    hard = (z == z.max(axis=1, keepdims=True)) / (z == z.max(axis=1, keepdims=True)).sum(1)[:, None]
    np.testing.assert_array_equal(weights[:, 7], hard.astype(np.float32))


def test_a_log_size_fit_is_scored_like_the_rule_of_sizes(toy_head, by_size):
    rules = {"fit": by_size, "rule": LogSize(0.5, 0.6)}
    for score in score_head(toy_head, [16, 64], 300, 0, rules):
        np.testing.assert_array_equal(score.correct["fit"], score.correct["rule"])


def test_a_head_may_score_many_rules_at_once(toy_head):
    rules = {"plain": PLAIN, "twice": LogSize(0.0, 2.0), "hard": HARD}
    (alone,) = score_head(toy_head, [16], 300, 0, rules)
    shapes = []

    def correct_each(attended, weights):
        shapes.append(weights.shape)
        return np.asarray(weights).argmax(axis=2) == attended.target[:, None]

    toy_head.correct_each = correct_each
    (together,) = score_head(toy_head, [16], 300, 0, rules)
    assert shapes == [(300, 3, 16)]
    for rule in rules:
        np.testing.assert_array_equal(alone.correct[rule], together.correct[rule])


def test_correct_each_of_the_trained_head_is_correct_of_each():
    head = load_head("max-retrieval-2")
    batch = head.sample(3, 200, 300)
    attended = head.attend(batch)
    weights = np.stack([jax.nn.softmax(beta * attended.logits) for beta in (1, 3, 9)], axis=1)
    each = np.asarray(head.correct_each(attended, weights))
    for i in range(3):
        one = np.asarray(head.correct(attended, weights[:, i]))
        assert (one != each[:, i]).sum() <= 1  # the same up to the rounding of a tie


class Lopsided:
    """Right at a set with beta = b exactly if b lies within the set's own range."""

    name, fingerprint = "lopsided", "sha256:lopsided"

    def __init__(self, low, high):
        self.low, self.high = low, high

    def sample(self, seed, size, count):
        from conftest import ToyBatch

        logits = np.zeros((count, size), np.float32)
        logits[:, 0] = 1.0
        return ToyBatch(logits, np.zeros(count, np.int32))

    def attend(self, batch):
        return batch

    def correct(self, attended, weights):
        w = np.asarray(weights, float)
        with np.errstate(divide="ignore"):
            beta = np.log(w[:, 0] / w[:, 1])
        return (beta > self.low) & (beta < self.high)


def test_hindsight_finds_the_best_constant_and_scores_it_elsewhere():
    rules = {"plain": PLAIN, "hindsight": HINDSIGHT}
    (score,) = score_head(Lopsided(4, 6), [8], 500, 0, rules)
    assert 4 < score.hindsight_beta < 6
    assert score.chosen_on == 250
    assert score.accuracy("hindsight") == 1
    assert score.accuracy("plain") == 0


def test_hindsight_counts_the_sets_that_did_not_choose():
    correct = {"plain": np.arange(100) < 50, "hindsight": np.arange(100) >= 20}
    score = Score(16, correct, 60, 2.0)
    assert score.gain("hindsight", over="plain")[0] == 1
    assert score.gain("plain", over="hindsight")[0] == -1
    assert score.accuracy("hindsight") == 1.5  # 0.5 on all sets, and 1 more on the last 40
    assert score.standard_error("hindsight") == pytest.approx(
        0.6 * correct["plain"][:60].std(ddof=1) / 60**0.5
    )


def test_the_error_of_hindsight_is_that_of_its_accuracy():
    """How far accuracies of other samples are, half of whose sets choose."""
    accuracies, errors = [], []
    for seed in range(1_500):
        rng = np.random.default_rng(seed)
        plain, gains = rng.random(100) < 0.7, rng.random(100) < 0.2
        score = Score(16, {"plain": plain, "hindsight": plain | gains}, 50, 2.0)
        accuracies.append(score.accuracy("hindsight"))
        errors.append(score.standard_error("hindsight"))
    assert np.mean(errors) == pytest.approx(np.std(accuracies), rel=0.05)


def test_hindsight_bears_its_name(toy_head):
    for rules in ({"best": HINDSIGHT}, {"plain": PLAIN, "hindsight": PLAIN}):
        with pytest.raises(TypeError, match=r"Hindsight\(\) must be named 'hindsight'"):
            score_head(toy_head, [8], 100, 0, rules)


def test_hindsight_chooses_on_the_first_sets_only(toy_head, monkeypatch):
    """Two values tie on the first half, and differ on the second: the lower one stays."""
    from calibrate.rows import score_head as module

    monkeypatch.setattr(module, "MAX_CHOOSING_SETS", 64)
    search = HindsightSearch(1_000)
    right = np.zeros((100, 40), bool)
    right[:64, 7] = right[:64, 9] = True
    right[64:, 9] = True
    search.record(slice(0, 100), right)
    assert search.chosen == 7
    assert len(search.betas()) == 1
    search.record(slice(100, 1_000), np.ones((900, 1), bool))
    assert search.result()[0].sum() == 64 + 900
