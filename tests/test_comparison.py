"""Compare: tests, errors and intervals against SciPy's and against planted differences."""

import numpy as np
import pytest
from scipy import stats

from calibrate.evaluation.comparison import compare
from calibrate.evaluation.score_head import Score

SETS = 2_000


def make_score(size, shares, sets=SETS, chosen_on=0, seed=None):
    """A score whose rules are right on the first so many sets, or on random ones."""
    rng = np.random.default_rng(seed)
    draw = np.arange(sets) / sets if seed is None else rng.random(sets)
    correct = {rule: draw < share for rule, share in shares.items()}
    return Score(size, correct, chosen_on, 3.0)


def planted(n_heads, own, hindsight=0.9):
    """Heads that differ in plain accuracy, and gain the same from each rule."""
    heads = []
    for i in range(n_heads):
        plain = 0.4 + 0.01 * i
        noise = 0.002 * (i % 3 - 1)
        rules = {"plain": plain, "paper": plain + 0.1, "own": plain + own + noise}
        heads.append([make_score(64, rules | {"hindsight": plain + hindsight}, seed=i)])
    return [f"head-{i}" for i in range(n_heads)], heads


def test_paired_tests_and_errors_over_heads_are_scipys():
    found = compare(*planted(6, 0.1))
    own, plain, paper = (
        found.per_head[found.rules.index(r), :, 0] for r in ("own", "plain", "paper")
    )
    i = found.rules.index("own")
    assert found.p_plain[i, 0] == pytest.approx(stats.ttest_rel(own, plain).pvalue)
    assert found.p_paper[i, 0] == pytest.approx(stats.ttest_rel(own, paper).pvalue)
    assert found.error[i, 0] == pytest.approx(stats.sem(own))
    assert np.isnan(found.p_plain[found.rules.index("plain"), 0])
    assert found.accuracy[i, 0] == pytest.approx(own.mean())


def test_of_one_head_tests_and_errors_are_over_its_sets():
    score = make_score(64, {"plain": 0.5, "paper": 0.5, "own": 0.55}, seed=1)
    found = compare(["one"], [[score]])
    own, plain = (score.correct[r].astype(float) for r in ("own", "plain"))
    i = found.rules.index("own")
    assert found.p_plain[i, 0] == pytest.approx(stats.ttest_rel(own, plain).pvalue)
    assert found.error[i, 0] == pytest.approx(stats.sem(own))
    assert found.gain_error[i, 0] == pytest.approx(stats.sem(own - plain))


@pytest.mark.parametrize("n_heads", [1, 8])
def test_headroom_is_the_share_of_the_ceilings_gain(n_heads):
    found = compare(*planted(n_heads, own=0.1, hindsight=0.2))
    i = found.rules.index("own")
    assert found.headroom[i, 0] == pytest.approx(0.5, abs=0.05)
    assert found.headroom_low[i, 0] < found.headroom[i, 0] < found.headroom_high[i, 0]
    ceiling = found.rules.index("hindsight")
    assert found.headroom[ceiling, 0] == found.headroom_low[ceiling, 0] == 1
    assert np.isnan(found.headroom[found.rules.index("plain"), 0])


def test_without_a_ceiling_above_plain_there_is_no_headroom():
    assert np.isnan(compare(*planted(8, own=0.1, hindsight=0.0)).headroom).all()
    bare = [[make_score(16, {"plain": 0.5, "own": 0.6})]]
    assert np.isnan(compare(["a"], bare).headroom).all()


def test_hindsight_is_scored_on_the_sets_that_did_not_choose_it():
    score = make_score(
        64, {"plain": 0.5, "paper": 0.5, "own": 0.5, "hindsight": 0.6}, chosen_on=1_000
    )
    found = compare(["one"], [[score]])
    # It gains 0.2 there over plain softmax, which has 0.5 on all sets.
    assert found.gain[found.rules.index("hindsight"), 0] == pytest.approx(0.2)
    assert found.accuracy[found.rules.index("hindsight"), 0] == pytest.approx(0.7)
    assert found.accuracy[found.rules.index("plain"), 0] == pytest.approx(0.5)
    assert found.headroom[found.rules.index("own"), 0] == 0


def test_the_interval_covers_a_known_ratio():
    """Of 40 studies with a true headroom of one half, about 95 % of the intervals hold it."""
    covered = 0
    for study in range(40):
        rng = np.random.default_rng(study)
        correct = {"plain": rng.random(800) < 0.3}
        gained = rng.random(800) < 0.4
        correct["hindsight"] = correct["plain"] | gained
        correct["own"] = correct["plain"] | (gained & (rng.random(800) < 0.5))
        found = compare(["one"], [[Score(64, correct, 0, 2.0)]])
        i = found.rules.index("own")
        covered += found.headroom_low[i, 0] <= 0.5 <= found.headroom_high[i, 0]
    assert 34 <= covered <= 40


def test_a_difference_without_variation_is_no_chance():
    found = compare(["a"], [[make_score(16, {"plain": 0.0, "own": 1.0, "hard": 0.0})]])
    assert found.p_plain[found.rules.index("own"), 0] == 0
    assert np.isnan(found.p_plain[found.rules.index("hard"), 0])


def test_own_fit_against_every_rule():
    found = compare(*planted(6, 0.15))
    own, paper = (found.per_head[found.rules.index(r), :, 0] for r in ("own", "paper"))
    assert found.p_own[1, 0] == pytest.approx(stats.ttest_rel(paper, own).pvalue)
    assert np.isnan(found.p_own[found.rules.index("own"), 0])


def test_too_few_heads_have_no_interval():
    found = compare(*planted(3, own=0.1, hindsight=0.2))
    i = found.rules.index("own")
    assert found.headroom[i, 0] == pytest.approx(0.5, abs=0.05)
    assert np.isnan(found.headroom_low[i, 0])


def test_rules_that_some_head_lacks_are_left_out():
    both, one = {"plain": 0.5, "own": 0.6, "own-512": 0.6}, {"plain": 0.5, "own": 0.6}
    found = compare(["a", "b"], [[make_score(16, both)], [make_score(16, one)]])
    assert found.rules == ["plain", "own"]
