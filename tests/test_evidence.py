"""Evidence: standard errors over groups, intervals, false discovery rates, calibration error."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from calibrate.evidence.calibration_error import (
    expected_calibration_error,
    reliability,
    reliability_of,
)
from calibrate.evidence.estimate import estimate, significant_fdr
from calibrate.evidence.evidence import (
    BASELINE,
    OWN,
    Evidence,
    Scored,
    Stratum,
)
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, RANKED
from calibrate.evidence.significance import judge


def make_evidence(gain, size=None, group=None, weight=None, protected=None, **options):
    """Evidence of BASELINE, which scores 0, and OWN; (items,) arrays."""
    n = len(gain)
    size = np.full(n, 16) if size is None else size
    protected = np.zeros(n, bool) if protected is None else protected
    strata, stratum = np.unique(np.stack([protected, size], axis=1), axis=0, return_inverse=True)
    return Evidence(
        rules=(BASELINE, OWN),
        values={LOG_P: np.stack([np.zeros(n), gain])},
        strata=tuple(Stratum(int(n), protected=bool(p)) for p, n in strata),
        stratum=stratum.ravel(),
        group=np.full(n, -1) if group is None else group,
        weight=np.ones(n) if weight is None else weight,
        of=Scored("toy"),
        **options,
    )


def gain_of(*arguments, **options):
    return make_evidence(*arguments, **options).gain(OWN, LOG_P)


def covered(draw, studies=300):
    inside = 0
    for seed in range(studies):
        low, high = draw(np.random.default_rng(seed)).interval
        inside += low <= 0 <= high
    return inside


def shared_by_sizes(rng):
    group, size = np.tile(np.repeat(np.arange(8), 20), 3), np.repeat([16, 64, 256], 160)
    x = rng.standard_normal(8)[group] + rng.standard_normal(480)
    return gain_of(x, size, group)


def nested_in_sizes(rng):
    group, size = np.repeat(np.arange(24), 20), np.repeat([16, 64, 256], 160)
    return gain_of(rng.standard_normal(24)[group] + rng.standard_normal(480), size, group)


def unequal_prompts(rng):
    group = rng.choice(40, 700, p=rng.dirichlet([2.0] * 40))
    return gain_of(rng.standard_normal(40)[group] + rng.standard_normal(700), group=group)


def rows_alone(rng):
    return gain_of(rng.exponential(1, 200) - 1, np.repeat([16, 64], 100))


def weights_by_score(rng):
    """As those of a recorded model: rows weigh by what they score."""
    p = 1 / (1 + np.exp(-2 * rng.standard_normal((100, 4))))
    weight = 4 * p[:, 0] / p.sum(axis=1)
    truth = -0.543  # of four million such rows
    return gain_of(np.log(p[:, 0]) - truth, weight=weight)


def few_rows(rng):
    return gain_of(rng.standard_normal(3))


@pytest.mark.parametrize(
    "draw",
    [shared_by_sizes, nested_in_sizes, unequal_prompts, rows_alone, weights_by_score, few_rows],
)
def test_intervals_cover_95_of_100(draw):
    assert 272 <= covered(draw) <= 297


def test_the_error_of_groups_is_that_of_their_sums():
    rng = np.random.default_rng(3)
    values = rng.standard_normal(8)
    gain = gain_of(np.repeat(values, 100), group=11 * np.repeat(np.arange(8), 100))
    exact = stats.ttest_1samp(values, 0)
    assert gain.mean == pytest.approx(values.mean())
    assert gain.error == pytest.approx(values.std(ddof=1) / np.sqrt(8))
    assert gain.p_value == pytest.approx(exact.pvalue)
    assert gain.interval == pytest.approx(tuple(exact.confidence_interval(0.95)))
    offset = gain_of(1e6 + np.repeat(values, 100), group=np.repeat(np.arange(8), 100))
    assert offset.error == pytest.approx(gain.error, rel=1e-6)


def test_means_are_weighted_means_of_rows_whatever_their_size():
    several = np.repeat([16, 64], [300, 100])
    assert gain_of(1.0 * (several == 64), several).mean == pytest.approx(1 / 4)
    weight = np.where(several == 16, 1.0, 6.0)
    assert gain_of(1.0 * (several == 64), several, weight=weight).mean == pytest.approx(2 / 3)
    none = 1.0 * (several == 16)
    assert gain_of(1.0 * (several == 64), several, weight=none).mean == 0


def test_rows_written_twice_at_half_the_weight_in_their_groups_change_nothing():
    rng = np.random.default_rng(0)
    values, group = rng.standard_normal(60), np.repeat(np.arange(20), 3)
    once = gain_of(values, group=group)
    weight = np.full(120, 0.5)
    twice = gain_of(np.tile(values, 2), group=np.tile(group, 2), weight=weight)
    assert twice == pytest.approx(once)


@pytest.mark.parametrize(
    "evidence",
    [
        make_evidence(np.ones(1)),
        make_evidence(np.random.default_rng(0).standard_normal(50), group=np.zeros(50, int)),
    ],
)
def test_one_group_is_too_few_to_tell(evidence):
    gain = evidence.gain(OWN, LOG_P)
    assert np.isfinite(gain.mean)
    assert np.isnan(gain.error)
    assert gain.sign == 0
    assert judge(evidence, OWN).outcome == "unknown"
    (record,) = evidence.held_out_records()
    assert record.get("se") is None


def test_groups_that_all_differ_alike_are_judged_by_their_number():
    few, alike, none = (gain_of(x) for x in (np.ones(5), np.ones(6), np.zeros(6)))
    assert (few.sign, few.p_value) == (0, pytest.approx(1 / 16))
    assert (alike.sign, alike.p_value) == (1, pytest.approx(1 / 32))
    assert none.sign == 0


def test_the_error_in_a_file_is_of_the_gain_not_of_the_score():
    gain, luck = np.random.default_rng(0).standard_normal((2, 50))
    evidence = make_evidence(gain)
    noisy = replace(evidence, values={LOG_P: evidence.values[LOG_P] + 9 * luck})
    (record,) = noisy.held_out_records()
    assert record["se"] == pytest.approx(float(gain_of(gain).error))
    assert record["nll_before"] - record["nll_after"] == pytest.approx(gain.mean())


def test_protected_text_is_apart():
    rng = np.random.default_rng(0)
    gain = np.repeat([1.0, -1.0], 40) + 0.1 * rng.standard_normal(80)
    evidence = make_evidence(gain, protected=np.arange(80) >= 40)
    assert (evidence.answers.n, evidence.text.n) == (40, 40)
    assert evidence.answers.gain(OWN, LOG_P).sign == 1
    assert evidence.text.gain(OWN, LOG_P).sign == -1
    verdict = judge(evidence, OWN)
    assert (verdict.outcome, verdict.better) == ("gain", [16])


def test_parts_are_the_items_of_each():
    size = np.array([64, 16, 64, 16])
    heads = {"heads": ((0, 1), (2, 3)), "head": np.array([0, 0, 1, 1])}
    evidence = make_evidence(np.arange(4.0), size, **heads)
    by_size, by_head = (
        {key: part.scores(OWN, LOG_P).tolist() for key, part in evidence.by(what).items()}
        for what in ("size", "head")
    )
    assert by_size == {16: [1, 3], 64: [0, 2]}
    assert by_head == {(0, 1): [0, 1], (2, 3): [2, 3]}
    assert evidence.best() == OWN
    assert evidence.where(np.array([1])).gain(OWN, LOG_P).mean == 1


def test_many_share_one_rate_of_false_discoveries():
    """As Benjamini and Hochberg count; one alone is judged by its own interval."""
    assert significant_fdr([0.04, np.nan]) == [False, False]
    many = np.random.default_rng(0).random(270) ** 3
    for p in ([], [0.04], [0.06], [0.012, 0.024, 1.0, 1.0], many.tolist()):
        assert significant_fdr(p) == (stats.false_discovery_control(p) <= 0.05).tolist()


def test_reliability_by_hand():
    """Ten bins of equal weight."""
    rng = np.random.default_rng(5)
    p, weight, error = rng.uniform(0.1, 1, 200), np.ones(200), 0.0
    ranked = rng.random(200) < p**2
    diagram = reliability(p, ranked, weight)
    for i, in_bin in enumerate(np.sort(p).reshape(10, 20)):
        means = [x[np.isin(p, in_bin)].mean() for x in (p, ranked)]
        assert [column[i] for column in diagram[:4]] == pytest.approx([20, *means, 0.1])
        error += 0.1 * abs(means[0] - means[1])
    assert expected_calibration_error(diagram) == pytest.approx(error)
    draws = (reliability(p, rng.random(200) < p, weight) for _ in range(200))
    by_chance = [expected_calibration_error(draw) for draw in draws]
    assert diagram.chance == pytest.approx(np.mean(by_chance), rel=0.1)
    assert len(reliability(p[:25], ranked[:25], weight[:25]).n) == 2


def test_items_of_equal_confidence_share_a_bin():
    p = np.repeat([0.2, 0.6, 0.7], [150, 30, 20])
    ranked = np.arange(200) % 5 == 0
    diagram = reliability(p, ranked, np.ones(200))
    assert diagram.n.tolist() == [150, 30, 20]
    assert diagram.confidence == pytest.approx([0.2, 0.6, 0.7])
    assert diagram.ranked == pytest.approx([0.2] * 3)
    assert expected_calibration_error(diagram) == pytest.approx(0.15 * 0.4 + 0.1 * 0.5)


def test_bins_of_confidence_have_equal_weight_and_no_items_without_any():
    rng = np.random.default_rng(0)
    p, weight = rng.random(2000), np.repeat([3.0, 1.0, 0.0, 0.0], 500)
    ranked = np.where(weight > 0, rng.random(2000) < p, 0)
    diagram = reliability(p, ranked, weight)
    assert diagram.share == pytest.approx([0.1] * 10, abs=0.003)
    assert diagram.n.sum() == 1000
    values = {CONFIDENCE: p[None], RANKED: ranked[None]}
    items = np.zeros(2000, int), np.full(2000, -1), weight
    evidence = Evidence((BASELINE,), values, (Stratum(8),), *items, Scored("x"))
    for of_arrays, of_evidence in zip(diagram, reliability_of(evidence, BASELINE), strict=True):
        np.testing.assert_array_equal(of_arrays, of_evidence)


def test_groups_without_any_weight_are_no_groups():
    rng = np.random.default_rng(0)
    values, group = rng.standard_normal(60), np.arange(60) // 3
    weight = 1.0 * (group < 8)
    whole = estimate(values, weight, group)
    assert whole == pytest.approx(estimate(values[:24], weight[:24], group[:24]))
    assert whole.groups == 8


@pytest.mark.parametrize("n", range(100, 400, 10))
def test_bins_of_equal_items_have_as_many_of_them(n):
    """Sums of a share such as 1 / n round to below the edge of a bin."""
    p = np.linspace(0.1, 0.9, n)
    assert set(reliability(p, np.ones(n), np.ones(n)).n) == {n / 10}
