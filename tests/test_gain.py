"""Gains: intervals that mean what they say, pseudo-rows, and many heads at once."""

from unittest.mock import ANY

import numpy as np
import pytest
from planted import planted_rows
from scipy import stats

from calibrate.maths import reference
from calibrate.rows.gain import Evidence, evident_among, prior_share
from calibrate.rows.solved_rows import solve_rows
from calibrate.rows.weighting import (
    N_BLOCKS,
    Strata,
    assign_blocks,
    mean_and_error,
    row_weights,
)


def evidence_of(rows, prior_rows=0.0):
    return Evidence(rows, assign_blocks(rows), row_weights(rows), prior_rows)


def gain_of(rows, beta, prior_rows=0.0):
    evidence = evidence_of(rows, prior_rows)
    return evidence.gain(
        evidence.score(np.full(len(rows.size), beta)), evidence.score(np.ones(len(rows.size)))
    )


def of_one_size(block, weight, difference):
    """Mean, error and effective number of groups."""
    total, share = np.bincount(block, weight * difference), np.bincount(block, weight)
    return mean_and_error(total[None], share[None], np.array([len(block)]))


def test_the_error_is_the_spread_of_means():
    """Of 200 samples about 190 have the mean within two errors."""
    rows = planted_rows(lambda H, n: np.ones_like(H), (16, 64), count=200)
    block, rng = assign_blocks(rows), np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        difference = rng.exponential(1.0, len(block)) - 1
        mean, error, n_blocks = Strata(rows, block).mean(difference)
        inside += abs(mean) <= stats.t.ppf(0.975, n_blocks - 1) * error
    assert 180 <= inside <= 199


def test_blocks_that_differ_in_weight_do_not_widen_an_interval():
    """Where every row gains the same, there is no error."""
    block = np.arange(1_000) % N_BLOCKS
    weight = np.random.default_rng(0).exponential(1.0, 1_000) * (1 + block)
    mean, error, _ = of_one_size(block, weight / weight.sum(), np.full(1_000, 0.3))
    np.testing.assert_allclose([mean, error], [0.3, 0], atol=1e-12)


def test_few_blocks_of_rows_that_are_alike():
    """Eight prompts whose rows are one row: the error is that of eight values."""
    block, rng = np.repeat(np.arange(8), 100) * 11, np.random.default_rng(3)
    values = rng.standard_normal(8)
    mean, error, n_blocks = of_one_size(block, np.full(800, 1 / 800), np.repeat(values, 100))
    assert (n_blocks, mean) == (pytest.approx(8), pytest.approx(values.mean()))
    assert error == pytest.approx(values.std(ddof=1) / np.sqrt(8))


def test_prompts_of_unequal_weight_count_as_fewer():
    """95 % of intervals cover; with as many degrees of freedom as prompts it would be 83 %."""
    rng, inside = np.random.default_rng(0), 0
    for _ in range(200):
        block = rng.choice(8, 700, p=rng.dirichlet([0.5] * 8))
        difference = rng.standard_normal(8)[block] + rng.standard_normal(700)
        mean, error, n_blocks = of_one_size(block, np.full(700, 1 / 700), difference)
        inside += abs(mean) <= stats.t.ppf(0.975, n_blocks - 1) * error
    assert 182 <= inside <= 198


def test_sizes_that_gain_unlike_are_no_chance():
    """Sizes are fixed by design: what differs between them does not widen the interval."""
    rows = planted_rows(lambda H, n: 2 + 0 * H, (16, 64, 256), count=40)
    rng = np.random.default_rng(0)
    difference = 0.3 * np.searchsorted([16, 64, 256], rows.size) + rng.normal(0, 0.05, 120)
    _, error, _ = Strata(rows, assign_blocks(rows)).mean(difference)
    assert error == pytest.approx(0.05 / np.sqrt(120), rel=0.3)


def test_one_prompt_with_nearly_all_rows_is_no_evidence():
    rows = planted_rows(lambda H, n: 2 + 0 * H, (64,), count=300)
    rows = rows._replace(group=np.maximum(np.arange(300) - 290, 0))
    gain = gain_of(rows, 2.0, prior_rows=10.0)
    assert not gain.evident
    assert (gain.low, gain.high, gain.p) == (-np.inf, np.inf, 0.5)


@pytest.mark.slow
def test_the_interval_covers_where_what_is_misranked_is_chance():
    """Gains depend on who wins: 60 fresh samples, and the mean of all of them."""
    gains = [
        gain_of(planted_rows(lambda H, n: np.ones_like(H), (16, 64), count=150, seed=seed), 1.5)
        for seed in range(60)
    ]
    truth = np.mean([g.mean for g in gains])
    assert 50 <= sum(g.low <= truth <= g.high for g in gains) <= 60


def test_pseudo_rows_are_rows_whose_targets_plain_softmax_draws():
    z = np.random.default_rng(0).standard_normal((150, 12)).astype(np.float32) * 2
    rows = planted_rows(lambda H, n: 2 * np.ones_like(H), (16,), count=150)
    evidence = evidence_of(rows, 30.0)
    sharp, plain = (evidence.score(np.full(150, beta)) for beta in (3.0, 1.0))
    gain = evidence.gain(sharp, plain)
    share, _ = prior_share(evidence.weight, 30.0)
    assert share == pytest.approx(30 / 180)
    assert prior_share(evidence.weight, 1e9)[0] == pytest.approx(0.25 / 1.25)  # at most
    added, expected = sharp.log_p - plain.log_p, sharp.expected - plain.expected
    assert (expected < 0).all()  # nothing is as good as plain softmax for its own targets
    alone = gain_of(rows, 3.0)
    assert (gain.mean, gain.high) == (alone.mean, alone.high) == (pytest.approx(added.mean()), ANY)
    assert gain.low < alone.low
    assert gain.p > alone.p
    posterior = (1 - share) * added.mean() + share * expected.mean()
    assert gain.low < posterior < gain.mean
    own = solve_rows(z, np.zeros(150, np.int32), reference.entropy(z), 12)
    p, log_p = reference.softmax(z), np.log(reference.softmax(z, beta=3.0))
    np.testing.assert_allclose(
        own.plain_profile.log_p(np.full(150, 3.0)), (p * log_p).sum(axis=1), atol=2e-4
    )
    mean = (p * z).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(own.variance, (p * (z - mean) ** 2).sum(axis=1), rtol=1e-4)


def test_a_large_gain_is_no_chance_and_none_may_be():
    rows = planted_rows(lambda H, n: 3 * np.ones_like(H), (64,), count=200)
    assert gain_of(rows, 3.0).p < 1e-6
    assert gain_of(rows, 1.0).p == 0.5  # the same rule


def test_many_heads_share_one_rate_of_false_discoveries():
    """As Benjamini and Hochberg count; one head alone is judged by its own interval."""
    assert evident_among([0.02]) == [True]
    assert evident_among([0.03]) == [False]
    assert evident_among([0.02, 1.0]) == [False, False]
    assert evident_among([0.012, 0.02, 1.0, 1.0]) == [False] * 4
    assert evident_among([0.006, 0.012, 1.0, 1.0]) == [True, True, False, False]
    p = np.random.default_rng(0).random(270) ** 3
    expected = stats.false_discovery_control(p) <= 0.025
    assert evident_among(p.tolist()) == expected.tolist()
