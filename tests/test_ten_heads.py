"""Comparison of many heads, for the study of scripts/reproduce_table1: nothing is done twice."""

import sys
from pathlib import Path

import numpy as np
import pytest
from calibrate.rows.baselines import HARD, HINDSIGHT, LABELS, PLAIN
from conftest import ToyHead
from scipy import stats
from test_comparison import make_score

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import ten_heads
from ten_heads import Calibration, cached_scores, calibrate_head, compare_heads, study

SIZES = [16, 64, 256]
CALIBRATION = Calibration([64, 256, 1024], 600)


class SharpHead(ToyHead):
    """Is right where the target gets more than a third: beta matters."""

    def correct(self, attended, weights):
        own = np.take_along_axis(np.asarray(weights), attended.target[:, None], axis=1)
        return own[:, 0] > 1 / 3


class ShuffledHead(SharpHead):
    """Its targets have nothing to do with its logits."""

    def sample(self, seed, size, count):
        batch = super().sample(seed, size, count)
        return batch._replace(target=np.random.default_rng(seed).integers(0, size, count))


def planted(n_heads, own, hindsight=0.9):
    """Heads that differ in plain accuracy, and gain the same from each rule."""
    heads = []
    for i in range(n_heads):
        plain = 0.4 + 0.01 * i
        noise = 0.002 * (i % 3 - 1)
        rules = {"plain": plain, "paper": plain + 0.1, "own": plain + own + noise}
        heads.append([make_score(64, rules | {"hindsight": plain + hindsight}, seed=i)])
    return [f"head-{i}" for i in range(n_heads)], heads


@pytest.mark.slow
def test_a_study_of_three_heads_that_carries_on(here):
    heads, lines = [SharpHead(noise) for noise in (0.2, 0.25, 0.3)], []
    for head in heads:
        head.name = f"toy-{head.noise}"

    def stop(line):
        lines.append(line)
        if len(lines) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(heads, SIZES, 200, CALIBRATION, here / "s", stop)
    assert lines == [
        f"toy-{x}: {y}" for x in (0.2, 0.25) for y in ("collected and fitted", "scored")
    ]
    before = [head.attended for head in heads]
    first = study(heads, SIZES, 200, CALIBRATION, here / "s")
    # The first two heads were collected and scored already.
    assert [head.attended for head in heads[:2]] == before[:2]
    again = study(heads, SIZES, 200, CALIBRATION, here / "s")
    assert [head.attended for head in heads] == [*before[:2], 3 * 600 + 3 * 200]
    for name, values in vars(first).items():
        np.testing.assert_array_equal(getattr(again, name), values)
    at_each_q = {f"own fit, q = {q}" for q in ("0", "0.25", "0.5")}
    assert set(first.rules) == {*LABELS, *at_each_q}
    assert [rule for rule in first.rules if rule in LABELS] == list(LABELS)
    assert first.per_head.shape == (len(first.rules), 3, 3)
    plain, own, hard = (first.rules.index(rule) for rule in ("plain", "own", "hard"))
    assert (first.accuracy[own] > first.accuracy[plain] + 0.04).all(), first.accuracy
    assert (first.p_plain[[own, hard]] < 0.08).all()
    assert (first.headroom[own, :2] > 0.3).all()


def test_other_calibrations_lie_beside_each_other():
    keys = {Calibration(sizes, sets, seed).key() for sizes in ([64, 256], [64]) for sets in (1, 2)
            for seed in (0, 1)}  # fmt: skip
    assert len(keys) == 8
    assert Calibration([256, 64, 64], 1).key() == Calibration([64, 256], 1).key()


def test_other_sets_seeds_rules_and_heads_are_scored_anew(here):
    head, rules = SharpHead(0.2), {"plain": PLAIN, "hindsight": HINDSIGHT}
    (first,) = cached_scores(head, [16], 100, 0, rules, here)
    seen = head.attended
    for sets, seed, others in (
        (101, 0, rules), (100, 1, rules), (100, 0, {"plain": PLAIN}), (100, 0, {"plain": HARD}),
    ):  # fmt: skip
        cached_scores(head, [16], sets, seed, others, here)
        seen += sets
        assert head.attended == seen
    (again,) = cached_scores(head, [16], 100, 0, rules, here)
    assert head.attended == seen
    np.testing.assert_equal(vars(again), vars(first))
    assert again.chosen_on == 50
    (other,) = cached_scores(SharpHead(0.5), [16], 100, 0, rules, here)
    assert (other.correct["plain"] != first.correct["plain"]).any()


@pytest.mark.slow
def test_a_head_that_no_rule_helps_is_named(here):
    with pytest.warns(UserWarning, match="toy has no fit of its own: not for this head"):
        rules = calibrate_head(ShuffledHead(0.2), CALIBRATION, here)
    assert rules["own"] == rules["plain"]


@pytest.mark.slow
def test_own_fits_keep_the_sizes_that_a_head_was_trained_on(here, monkeypatch):
    head, options = ShuffledHead(0.2), []
    head.trained_up_to = 64

    def choose(rows, chosen_options):
        options.append(chosen_options)
        return ten_heads_choose(rows, chosen_options)

    ten_heads_choose = ten_heads.choose
    monkeypatch.setattr(ten_heads, "choose", choose)
    with pytest.warns(UserWarning, match="toy has no fit of its own"):
        calibrate_head(head, CALIBRATION, here)
    assert [given.trained_up_to for given in options] == [64]


def test_paired_tests_and_errors_are_scipys():
    comparison = compare_heads(*planted(6, 0.15))
    indices = [comparison.rules.index(rule) for rule in ("own", "plain", "paper")]
    own, plain, paper = comparison.per_head[indices, :, 0]
    i = indices[0]
    assert comparison.p_plain[i, 0] == pytest.approx(stats.ttest_rel(own, plain).pvalue)
    assert comparison.p_paper[i, 0] == pytest.approx(stats.ttest_rel(own, paper).pvalue)
    assert comparison.p_own[indices[2], 0] == pytest.approx(stats.ttest_rel(paper, own).pvalue)
    assert np.isnan(comparison.p_own[i, 0])
    assert np.isnan(comparison.p_plain[indices[1], 0])
    assert comparison.error[i, 0] == pytest.approx(stats.sem(own))
    assert comparison.accuracy[i, 0] == pytest.approx(own.mean())
    assert comparison.gain[i, 0] == pytest.approx((own - plain).mean())
    assert comparison.gain_error[i, 0] == pytest.approx(stats.sem(own - plain))


def test_headroom_is_the_share_of_the_ceilings_gain():
    comparison = compare_heads(*planted(8, own=0.1, hindsight=0.2))
    i = comparison.rules.index("own")
    assert comparison.headroom[i, 0] == pytest.approx(0.5, abs=0.05)
    assert comparison.headroom_low[i, 0] < comparison.headroom[i, 0]
    assert comparison.headroom[i, 0] < comparison.headroom_high[i, 0]
    ceiling = comparison.rules.index("hindsight")
    assert comparison.headroom[ceiling, 0] == comparison.headroom_low[ceiling, 0] == 1
    assert np.isnan(comparison.headroom[comparison.rules.index("plain"), 0])
    assert np.isnan(compare_heads(*planted(8, own=0.1, hindsight=0.0)).headroom).all()


def test_too_few_heads_have_no_interval():
    comparison = compare_heads(*planted(3, own=0.1, hindsight=0.2))
    i = comparison.rules.index("own")
    assert comparison.headroom[i, 0] == pytest.approx(0.5, abs=0.05)
    assert np.isnan(comparison.headroom_low[i, 0])


def test_rules_that_some_head_lacks_are_left_out():
    both, one = {"plain": 0.5, "own": 0.6, "own-512": 0.6}, {"plain": 0.5, "own": 0.6}
    comparison = compare_heads(["a", "b"], [[make_score(16, both)], [make_score(16, one)]])
    assert comparison.rules == ["plain", "own"]


def test_the_same_head_twice_is_refused():
    score = [make_score(16, {"plain": 0.5, "own": 0.6})]
    for heads in (["a", "a"], ["a"]):
        with pytest.raises(ValueError, match="give at least two, each once"):
            compare_heads(heads, [score] * len(heads))
