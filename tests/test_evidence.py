"""Evidence: intervals that mean what they say, whoever filled it; the prior; many at once."""

import numpy as np
import pytest
import reference
from planted import planted_rows
from scipy import stats

from calibrate.core.rule_kinds import CONSTANT
from calibrate.evidence.calibration_error import expected_calibration_error, reliability
from calibrate.evidence.evidence import OWN, PLAIN, Evidence, Scored, Stratum, join
from calibrate.evidence.metrics import CONFIDENCE, EXPECTED, LOG_P, RANKED
from calibrate.evidence.prior import cautious_gain, prior_share
from calibrate.evidence.significance import significant_fdr
from calibrate.evidence.verdict import judge
from calibrate.fitting.cross_validate import baseline_evidence, scores_at
from calibrate.fitting.fit_rule import fit_kind
from calibrate.fitting.options import Options
from calibrate.solver.solved_rows import solve_rows


def made(gain, size=None, group=None, weight=None, protected=None, **options):
    """Evidence of PLAIN, which scores 0, and OWN; (items,) arrays."""
    n = len(gain)
    size = np.full(n, 16) if size is None else size
    protected = np.zeros(n, bool) if protected is None else protected
    cells, stratum = np.unique(np.stack([protected, size], axis=1), axis=0, return_inverse=True)
    return Evidence(
        rules=(PLAIN, OWN),
        values={LOG_P: np.stack([np.zeros(n), gain])},
        strata=tuple(Stratum(int(n), protected=bool(p)) for p, n in cells),
        stratum=stratum.ravel(),
        group=np.full(n, -1) if group is None else group,
        weight=np.ones(n) if weight is None else weight,
        of=Scored("toy"),
        **options,
    )


def gain_of(*arguments, **options):
    return made(*arguments, **options).gain(OWN, LOG_P)


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
    group = rng.choice(8, 700, p=rng.dirichlet([0.5] * 8))
    return gain_of(rng.standard_normal(8)[group] + rng.standard_normal(700), group=group)


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
    found = gain_of(np.repeat(values, 100), group=11 * np.repeat(np.arange(8), 100))
    assert found.mean == pytest.approx(values.mean())
    plain_error = values.std(ddof=1) / np.sqrt(8)
    assert found.error == pytest.approx(plain_error * stats.t.ppf(0.975, 7) / 1.959964, rel=1e-6)
    assert found.p == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    offset = gain_of(1e6 + np.repeat(values, 100), group=np.repeat(np.arange(8), 100))
    assert offset.error == pytest.approx(found.error, rel=1e-6)


def test_sizes_have_equal_weight_and_what_differs_between_them_is_no_chance():
    rng = np.random.default_rng(0)
    size = np.repeat([16, 64, 256], 40)
    found = gain_of(0.3 * np.searchsorted([16, 64, 256], size) + rng.normal(0, 0.05, 120), size)
    assert found.error == pytest.approx(0.05 / np.sqrt(120), rel=0.3)
    several = np.repeat([16, 64], [300, 100])
    assert gain_of(1.0 * (several == 64), several, enough=100).mean == pytest.approx(1 / 2)
    few = np.repeat([16, 64], [100, 4])
    assert gain_of(1.0 * (few == 64), few, enough=100).mean == pytest.approx(4 / 104)
    weight = np.where(several == 16, 1e-3, 5.0)
    assert gain_of(1.0 * (several == 64), several, weight=weight).mean == pytest.approx(1 / 2)
    assert gain_of(1.0 * (several == 64), several, weight=1.0 * (several == 16)).mean == 0


@pytest.mark.parametrize(
    "evidence",
    [
        made(np.ones(1)),
        made(np.random.default_rng(0).standard_normal(50), group=np.zeros(50, int)),
        made(np.random.default_rng(0).standard_normal(50), weight=np.eye(50)[7] + 1e-6),
        made(np.ones(5)),  # five that all differ alike: chance gives one sign too often
    ],
)
def test_too_few_to_tell_is_unknown(evidence):
    gain = evidence.gain(OWN, LOG_P)
    assert np.isfinite(gain.mean)
    assert np.isnan(gain.error)
    assert gain.sign == 0
    assert judge(evidence, OWN).outcome == "unknown"
    (record,) = evidence.gain_records()
    assert record["error"] == pytest.approx(abs(record["after"]))


def test_six_that_all_differ_alike_are_no_chance():
    alike, none = gain_of(np.ones(6)), gain_of(np.zeros(6))
    assert (alike.sign, alike.p) == (1, pytest.approx(1 / 32))
    assert (none.sign, none.p) == (0, pytest.approx(np.nan, nan_ok=True))


def test_the_error_in_a_file_is_of_the_gain_not_of_the_score():
    gain, luck = np.random.default_rng(0).standard_normal((2, 50))
    evidence = made(gain)
    noisy = evidence.with_only(evidence.rules, {LOG_P: evidence.values[LOG_P] + 9 * luck})
    (record,) = noisy.gain_records()
    assert record["error"] == pytest.approx(float(gain_of(gain).error))


def test_protected_text_is_apart():
    rng = np.random.default_rng(0)
    gain = np.repeat([1.0, -1.0], 40) + 0.1 * rng.standard_normal(80)
    evidence = made(gain, protected=np.arange(80) >= 40)
    assert (evidence.answers.n, evidence.text.n) == (40, 40)
    assert evidence.answers.gain(OWN, LOG_P).sign == 1
    assert evidence.text.gain(OWN, LOG_P).sign == -1
    verdict = judge(evidence, OWN)
    assert (verdict.outcome, verdict.better) == ("gain", [16])


def test_parts_are_the_items_of_each():
    size = np.array([64, 16, 64, 16])
    evidence = made(np.arange(4.0), size, heads=((0, 1), (2, 3)), head=np.array([0, 0, 1, 1]))
    by_size, by_head = (
        {key: part.scores(OWN, LOG_P).tolist() for key, part in evidence.by(what).items()}
        for what in ("size", "head")
    )
    assert by_size == {16: [1, 3], 64: [0, 2]}
    assert by_head == {(0, 1): [0, 1], (2, 3): [2, 3]}
    assert evidence.best(LOG_P) == OWN
    assert evidence.where(np.array([1])).gain(OWN, LOG_P).mean == 1


def test_one_group_in_several_heads_is_one_group():
    rng, group = np.random.default_rng(0), np.repeat(np.arange(12), 20)
    gain = rng.standard_normal(12)[group]
    one = made(gain, group=group)
    both = join([one, made(gain, group=group)])
    assert both.n == 480
    assert both.gain(OWN, LOG_P).error == pytest.approx(one.gain(OWN, LOG_P).error)
    alone = made(gain)
    assert join([alone, alone]).gain(OWN, LOG_P).error == pytest.approx(
        alone.gain(OWN, LOG_P).error / np.sqrt(2), rel=0.01
    )
    other = made(3 + gain, np.full(240, 64), weight=np.full(240, 2.0))
    records = join([one, other, made(1 + gain)]).gain_records()
    assert [record["size"] for record in records] == [16, 64]
    assert records[0]["rows"] == 480
    assert records[0]["after"] == pytest.approx(gain.mean() + 0.5)


def cautious(rows, beta, prior_rows=0.0):
    scores = scores_at(rows, np.full(len(rows.size), beta))
    evidence = baseline_evidence(rows).with_rule(OWN, scores)
    return cautious_gain(evidence, OWN, prior_rows=prior_rows)


def test_pseudo_rows_are_rows_whose_targets_plain_softmax_draws():
    rows = planted_rows(lambda H, n: 2 * np.ones_like(H), (16,), count=150)
    share, _ = prior_share(150, 30.0)
    assert share == pytest.approx(30 / 180)
    assert prior_share(150, 1e9)[0] == pytest.approx(0.25 / 1.25)  # at most
    alone, gain = cautious(rows, 3.0), cautious(rows, 3.0, 30.0)
    sharp, plain = (scores_at(rows, np.full(150, beta)) for beta in (3.0, 1.0))
    added, expected = (sharp[m] - plain[m] for m in (LOG_P, EXPECTED))
    assert (expected < 0).all()  # nothing is as good as plain softmax for its own targets
    assert (gain.mean, gain.high) == (alone.mean, alone.high)
    assert gain.mean == pytest.approx(added.mean())
    assert gain.low < alone.low
    assert gain.p > alone.p
    posterior = (1 - share) * added.mean() + share * expected.mean()
    assert gain.low < posterior < gain.mean
    both = baseline_evidence(rows).with_rule(OWN, sharp)  # they speak against a rule, never for one
    alone, gain = (cautious_gain(both, PLAIN, OWN, m) for m in (0.0, 30.0))
    assert alone == gain
    z = np.random.default_rng(0).standard_normal((150, 12)).astype(np.float32) * 2
    own = solve_rows(z, np.zeros(150, np.int32), reference.entropy(z), 12)
    p, log_p = reference.softmax(z), np.log(reference.softmax(z, beta=3.0))
    np.testing.assert_allclose(
        own.plain_profile.log_p(np.full(150, 3.0)), (p * log_p).sum(axis=1), atol=2e-4
    )
    mean = (p * z).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(own.variance, (p * (z - mean) ** 2).sum(axis=1), rtol=1e-4)


def test_a_fit_needs_fewer_pseudo_rows_the_more_failures_its_rows_show():
    rows = planted_rows(lambda H, n: 2 * np.ones_like(H), (16,), count=300)
    betas, m = np.linspace(1, 4, 301), 300 / (1 + rows.misranked.sum() / 10)
    scores = (scores_at(rows, np.full(300, beta)) for beta in betas)
    worth = [x[LOG_P].sum() + m * x[EXPECTED].mean() for x in scores]
    (*_, found) = fit_kind(rows, CONSTANT, Options(q=0.0, prior_rows=300.0)).only.coefficients
    assert found == pytest.approx(betas[np.argmax(worth)], abs=0.03)


def test_a_large_gain_is_no_chance_and_none_may_be():
    rows = planted_rows(lambda H, n: 3 * np.ones_like(H), (64,), count=200)
    assert cautious(rows, 3.0).p < 1e-6
    assert cautious(rows, 1.0).p == 1  # the same rule


def test_the_interval_of_a_few_rows_is_students():
    rows = planted_rows(lambda H, n: 2 + 0 * H, (16,), count=8)
    gained = rows.log_p(np.full(8, 2.0)) - rows.log_p(np.ones(8))
    gain, exact = cautious(rows, 2.0), stats.ttest_1samp(gained, 0)
    assert (gain.low, gain.high) == pytest.approx(exact.confidence_interval(0.95), rel=1e-4)
    assert gain.p == pytest.approx(exact.pvalue, rel=1e-3)


def test_one_prompt_with_nearly_all_rows_is_no_evidence():
    rows = planted_rows(lambda H, n: 2 + 0 * H, (64,), count=300)
    gain = cautious(rows._replace(group=np.maximum(np.arange(300) - 290, 0)), 2.0, 10.0)
    assert not gain.significant
    assert (gain.low, gain.high, gain.p) == (-np.inf, np.inf, 1)


def test_many_share_one_rate_of_false_discoveries():
    """As Benjamini and Hochberg count; one alone is judged by its own interval."""
    assert significant_fdr([0.04, np.nan]) == [False, False]
    many = np.random.default_rng(0).random(270) ** 3
    for p in ([], [0.04], [0.06], [0.012, 0.024, 1.0, 1.0], many.tolist()):
        assert significant_fdr(p) == (stats.false_discovery_control(p) <= 0.05).tolist()


def test_reliability_by_hand():
    """Ten bins of equal count; a size of few items has as much weight as one of many."""
    rng, stratum = np.random.default_rng(5), np.repeat([0, 1], [150, 50])
    p = rng.uniform(0.1, 1, 200)

    def told(ranked):
        values = dict(zip((CONFIDENCE, RANKED), (p[None], ranked[None]), strict=True))
        items = stratum, np.full(200, -1), np.ones(200)
        return Evidence((PLAIN,), values, (Stratum(8), Stratum(16)), *items, Scored("x"))

    ranked, weight, error = rng.random(200) < p**2, 1 / np.where(stratum, 100, 300), 0.0
    found = reliability(told(ranked), PLAIN)
    for i, at in enumerate(np.sort(p).reshape(10, 20)):
        mine = np.isin(p, at)
        means = [np.average(x[mine], weights=weight[mine]) for x in (p, ranked)]
        assert [column[i] for column in found[:3]] == pytest.approx([20, *means])
        error += weight[mine].sum() * abs(means[0] - means[1])
    assert expected_calibration_error(found) == pytest.approx(error)
    draws = (reliability(told(rng.random(200) < p), PLAIN) for _ in range(200))
    by_chance = [expected_calibration_error(diagram) for diagram in draws]
    assert found.chance == pytest.approx(np.mean(by_chance), rel=0.1)
    assert len(reliability(told(ranked).where(np.arange(200) < 25), PLAIN).n) == 2
