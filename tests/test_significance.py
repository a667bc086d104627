"""Verdicts as data: the outcome of rules on synthetic evidence, and where they gain and lose."""

from dataclasses import replace

import pytest
from evidence_cases import BY_SIZE, CELLS, evidence_of_gains

from calibrate.evidence.evidence import Stratum
from calibrate.evidence.metrics import ANSWERS, RIGHT, ROWS, SETS
from calibrate.evidence.significance import GAIN, LOSS, SAME, TOO_FEW, judge


@pytest.mark.parametrize(
    ("gains", "items", "outcome", "better", "worse"),
    [
        ((0.3,) * 4, ROWS, GAIN, [16, 64, 256, 1024], []),
        ((0, 0, 0.3, 0.3), ROWS, GAIN, [256, 1024], []),
        ((0, 0.3, 0.3, -0.3), ROWS, GAIN, [64, 256], [1024]),
        ((0,) * 4, ROWS, SAME, [], []),
        ((-0.3,) * 4, ROWS, LOSS, [], [16, 64, 256, 1024]),
        ((0, 0, 0, -0.3), ROWS, LOSS, [], [1024]),
        ((0.2,) * 4, SETS, GAIN, [16, 64, 256, 1024], []),
        ((-0.2,) * 4, SETS, LOSS, [], [16, 64, 256, 1024]),
    ],
)
def test_a_verdict_names_the_sizes_of_significant_gains_and_losses(
    gains, items, outcome, better, worse
):
    verdict = judge(evidence_of_gains({"own": gains}, items), "own")
    assert verdict == (outcome, better, worse)
    assert verdict.use == (outcome == GAIN)


def test_a_rule_that_gains_on_the_whole_is_used_though_it_loses_at_a_size():
    strata = tuple(Stratum(2**i) for i in range(1, 13))
    evidence = evidence_of_gains({"own": (0.008,) * 11 + (-0.03,)}, strata=strata)
    assert judge(evidence, "own") == (GAIN, [], [4096])


def test_few_items_are_no_verdict():
    evidence = evidence_of_gains({"own": (1.0,)}, count=1, strata=BY_SIZE[:1])
    assert judge(evidence, "own").outcome == TOO_FEW


def test_noise_at_many_sizes_is_no_gain():
    """20 of 400 sizes would be significant one by one."""
    strata = tuple(map(Stratum, range(2, 402)))
    verdict = judge(evidence_of_gains({"own": (0.0,) * 400}, count=20, strata=strata), "own")
    assert (verdict.better, verdict.worse) == ([], [])


def test_a_size_whose_gain_nobody_notices_is_not_named():
    """By little noise a gain of 0.002 nats is significant."""
    evidence = evidence_of_gains({"own": (0.002, 0.3, 0.3, 0.3)}, count=4000)
    assert judge(evidence, "own").better == [64, 256, 1024]


def test_held_out_templates_decide():
    strata = tuple(s._replace(unseen=s.template == "towns") for s in CELLS)
    evidence = evidence_of_gains({"own": (0.3, 0.3, -0.4, 0)}, ANSWERS, strata=strata)
    assert evidence.judged.n == 200
    assert judge(evidence, "own").outcome == LOSS


def test_accuracy_never_decides():
    """Of a head, whose accuracy is known, too: a rule may gain in NLL and lose in accuracy."""
    evidence = evidence_of_gains({"own": (0.3,) * 4}, SETS)
    right = evidence.values[RIGHT].copy()
    right[1] = 0
    worse = replace(evidence, values={**evidence.values, RIGHT: right})
    assert judge(worse, "own") == judge(evidence, "own")
    assert judge(worse, "own").outcome == GAIN
