"""Comparison of many heads, for the study of scripts/studies/table1.py: nothing is done twice."""

import numpy as np
import pytest
import table1_comparison
from conftest import ToyHead
from scipy import stats
from table1_comparison import Answers, Calibration, cached_answers, compare_heads, study

SIZES = [16, 64, 256]
CALIBRATION = Calibration([64, 256, 1024], 600)


class SharpHead(ToyHead):
    """Is right where the target gets more than a third: beta matters."""

    def correct(self, attended, weights):
        own = np.take_along_axis(np.asarray(weights), attended.target[:, None], axis=1)
        return own[:, 0] > 1 / 3


def answers(shares, chosen_on=0, seed=None, sets=2_000):
    draw = np.arange(sets) / sets if seed is None else np.random.default_rng(seed).random(sets)
    return Answers(64, {rule: draw < share for rule, share in shares.items()}, chosen_on, 3.0)


def planted(n_heads, own, hindsight=0.9):
    """Heads that differ in plain accuracy, and gain the same from each rule."""
    heads = []
    for i in range(n_heads):
        plain, noise = 0.4 + 0.01 * i, 0.002 * (i % 3 - 1)
        rules = {"plain": plain, "paper": plain + 0.1, "own": plain + own + noise}
        heads.append([answers(rules | {"hindsight": plain + hindsight}, seed=i)])
    return compare_heads([f"head-{i}" for i in range(n_heads)], heads)


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
    first, again = (study(heads, SIZES, 200, CALIBRATION, here / "s") for _ in range(2))
    # The first two heads were collected and scored already; each study asks them for q anew.
    choosing = 2 * sum(min(1024, 2**19 // n) for n in CALIBRATION.sizes)
    made = [*before[:2], 3 * 600 + 3 * 200]
    assert [head.attended for head in heads] == [n + choosing for n in made]
    for name, values in vars(first).items():
        np.testing.assert_array_equal(getattr(again, name), values)
    sharp = ["fitted rule, q = 0", "fitted rule, q = 0.25", "fitted rule, q = 0.5"]
    assert first.rules[:2] + first.rules[-4:] == ["plain", "paper", *sharp, "hindsight"]
    assert first.per_head.shape == (len(first.rules), 3, 3)
    plain, own, hard = (first.rules.index(rule) for rule in ("plain", "own", "hard"))
    assert (first.accuracy[own] > first.accuracy[plain] + 0.04).all(), first.accuracy
    assert (first.p_plain[[own, hard]] < 0.08).all()
    assert (first.headroom[own, :2] > 0.3).all()


def test_other_sets_seeds_rules_and_heads_are_scored_anew(here):
    head, rules = SharpHead(0.2), {"plain": table1_comparison.one_constant(1.0)}
    (first,) = cached_answers(head, [16], 100, 0, rules, here)
    seen = head.attended
    for sets, seed, others in (
        (101, 0, rules), (100, 1, rules), (100, 0, {"plain": table1_comparison.one_constant(2.0)}),
    ):  # fmt: skip
        cached_answers(head, [16], sets, seed, others, here)
        seen += sets
        assert head.attended == seen
    (again,) = cached_answers(head, [16], 100, 0, rules, here)
    assert head.attended == seen
    np.testing.assert_equal(vars(again), vars(first))
    (other,) = cached_answers(SharpHead(0.5), [16], 100, 0, rules, here)
    assert (other.right["plain"] != first.right["plain"]).any()


class PicksConstants(ToyHead):
    """One constant is right on the first half of 100 sets and on ten others, another on the rest.

    Plain softmax, the first rule, is never right.
    """

    def correct_each(self, attended, weights):
        right = np.zeros(weights.shape[:2], bool)
        right[:60, 1 + 7] = right[50:, 1 + 20] = True
        return right


def test_hindsight_is_chosen_on_half_of_the_sets_and_scored_on_the_others():
    trials = table1_comparison.HINDSIGHT_BETAS
    assert (len(trials), trials[0], trials[-1]) == (40, 1, pytest.approx(1000))
    plain = {"plain": table1_comparison.one_constant(1.0)}
    found = table1_comparison.right_answers(PicksConstants(), 16, 100, 0, plain)
    assert (found.chosen_on, found.hindsight_beta) == (50, trials[7])
    alone = compare_heads(["a", "b"], [[found], [found]])
    assert alone.per_head[:, :, 0].tolist() == [[0, 0], [0.2, 0.2]]
    # Plain softmax has 0.5 of all sets; on those that did not choose, hindsight has 0.2 more.
    score = answers({"plain": 0.5, "own": 0.5, "hindsight": 0.6}, chosen_on=1_000)
    comparison = compare_heads(["a", "b"], [[score], [score]])
    assert comparison.gain[:, 0] == pytest.approx([0, 0, 0.2])
    assert comparison.accuracy[:, 0] == pytest.approx([0.5, 0.5, 0.7])
    assert comparison.headroom[1, 0] == 0


def test_paired_tests_and_errors_are_scipys():
    comparison = planted(6, 0.15)
    i, j, k = (comparison.rules.index(rule) for rule in ("own", "plain", "paper"))
    own, plain, paper = comparison.per_head[[i, j, k], :, 0]
    found = comparison.p_plain[i, 0], comparison.p_paper[i, 0], comparison.p_own[k, 0]
    pairs = (own, plain), (own, paper), (paper, own)
    assert found == pytest.approx([stats.ttest_rel(*pair).pvalue for pair in pairs])
    assert np.isnan([comparison.p_own[i, 0], comparison.p_plain[j, 0]]).all()
    assert comparison.error[i, 0] == pytest.approx(stats.sem(own))
    assert comparison.accuracy[i, 0] == pytest.approx(own.mean())
    assert comparison.gain[i, 0] == pytest.approx((own - plain).mean())
    assert comparison.gain_error[i, 0] == pytest.approx(stats.sem(own - plain))
    alike = [[answers({"plain": 0.5, "own": 0.6})]] * 8
    assert compare_heads(list("abcdefgh"), alike).p_plain[1, 0] == 2.0**-7  # of signs


def test_headroom_is_the_share_of_the_ceilings_gain():
    found = planted(8, own=0.1, hindsight=0.2)
    i, plain, ceiling = (found.rules.index(rule) for rule in ("own", "plain", "hindsight"))
    assert found.headroom[i, 0] == pytest.approx(0.5, abs=0.05)
    assert found.headroom_low[i, 0] < found.headroom[i, 0] < found.headroom_high[i, 0]
    assert found.headroom[ceiling, 0] == found.headroom_low[ceiling, 0] == 1
    assert np.isnan(found.headroom[plain, 0])
    assert np.isnan(planted(8, own=0.1, hindsight=0.0).headroom).all()
    few = planted(3, own=0.1, hindsight=0.2)
    assert few.headroom[i, 0] == pytest.approx(0.5, abs=0.05)
    assert np.isnan(few.headroom_low[i, 0])
