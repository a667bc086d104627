"""Comparison of rules on one head: against SciPy's tests and planted differences."""

import numpy as np
import pytest
from scipy import stats

from calibrate.rows.comparison import compare
from calibrate.rows.score_head import Score

SETS = 2_000


def make_score(size, shares, sets=SETS, chosen_on=0, seed=None):
    """A score whose rules are right on the first so many sets, or on random ones."""
    rng = np.random.default_rng(seed)
    draw = np.arange(sets) / sets if seed is None else rng.random(sets)
    correct = {rule: draw < share for rule, share in shares.items()}
    return Score(size, correct, chosen_on, 3.0)


def test_tests_and_errors_are_scipys():
    score = make_score(64, {"plain": 0.5, "paper": 0.52, "own": 0.55}, seed=1)
    comparison = compare("one", [score])
    own, plain, paper = (score.correct[r].astype(float) for r in ("own", "plain", "paper"))
    i, j = comparison.rules.index("own"), comparison.rules.index("paper")
    assert comparison.p_plain[i, 0] == pytest.approx(stats.ttest_rel(own, plain).pvalue)
    assert comparison.p_paper[i, 0] == pytest.approx(stats.ttest_rel(own, paper).pvalue)
    assert comparison.p_own[j, 0] == pytest.approx(stats.ttest_rel(paper, own).pvalue)
    assert np.isnan(comparison.p_own[i, 0])
    assert np.isnan(comparison.p_plain[comparison.rules.index("plain"), 0])
    assert comparison.accuracy[i, 0] == own.mean()
    assert comparison.error[i, 0] == pytest.approx(stats.sem(own))
    assert comparison.gain[i, 0] == pytest.approx((own - plain).mean())
    assert comparison.gain_error[i, 0] == pytest.approx(stats.sem(own - plain))


def test_headroom_is_the_share_of_the_ceilings_gain():
    shares = {"plain": 0.4, "paper": 0.5, "own": 0.5, "hindsight": 0.6}
    comparison = compare("one", [make_score(64, shares, seed=0)])
    i = comparison.rules.index("own")
    share, low, high = (
        array[i, 0]
        for array in (comparison.headroom, comparison.headroom_low, comparison.headroom_high)
    )
    assert share == pytest.approx(0.5, abs=0.05)
    assert low < share < high
    ceiling = comparison.rules.index("hindsight")
    assert comparison.headroom[ceiling, 0] == comparison.headroom_low[ceiling, 0] == 1
    assert np.isnan(comparison.headroom[comparison.rules.index("plain"), 0])


def test_without_a_ceiling_above_plain_there_is_no_headroom():
    shares = {"plain": 0.4, "own": 0.5, "hindsight": 0.4}
    assert np.isnan(compare("one", [make_score(16, shares, seed=0)]).headroom).all()
    bare = compare("one", [make_score(16, {"plain": 0.5, "own": 0.6})])
    assert np.isnan(bare.headroom).all()


def test_without_plain_softmax_there_is_no_gain():
    comparison = compare("one", [make_score(16, {"own": 0.6})])
    assert np.isnan(comparison.gain).all()
    assert np.isnan(comparison.gain_error).all()


def test_hindsight_is_scored_on_the_sets_that_did_not_choose_it():
    score = make_score(
        64, {"plain": 0.5, "paper": 0.5, "own": 0.5, "hindsight": 0.6}, chosen_on=1_000
    )
    comparison = compare("one", [score])
    hindsight, plain, own = (comparison.rules.index(r) for r in ("hindsight", "plain", "own"))
    # It gains 0.2 there over plain softmax, which has 0.5 on all sets.
    assert comparison.gain[hindsight, 0] == pytest.approx(0.2)
    assert comparison.accuracy[hindsight, 0] == pytest.approx(0.7)
    assert comparison.accuracy[plain, 0] == pytest.approx(0.5)
    assert comparison.headroom[own, 0] == 0


def test_the_interval_covers_a_known_ratio():
    """Of 40 studies with a true headroom of one half, about 95 % of the intervals hold it."""
    covered = 0
    for study in range(40):
        rng = np.random.default_rng(study)
        correct = {"plain": rng.random(800) < 0.3}
        gained = rng.random(800) < 0.4
        correct["hindsight"] = correct["plain"] | gained
        correct["own"] = correct["plain"] | (gained & (rng.random(800) < 0.5))
        comparison = compare("one", [Score(64, correct, 0, 2.0)])
        i = comparison.rules.index("own")
        covered += comparison.headroom_low[i, 0] <= 0.5 <= comparison.headroom_high[i, 0]
    assert 34 <= covered <= 40


def test_a_difference_without_variation_is_no_chance():
    comparison = compare("a", [make_score(16, {"plain": 0.0, "own": 1.0, "hard": 0.0})])
    assert comparison.p_plain[comparison.rules.index("own"), 0] == 0
    assert np.isnan(comparison.p_plain[comparison.rules.index("hard"), 0])
    few = {"plain": np.zeros(4, bool), "own": np.ones(4, bool)}
    comparison = compare("a", [Score(16, few, 0, 2.0)])
    assert comparison.p_plain[comparison.rules.index("own"), 0] == 1 / 8  # all of one sign
