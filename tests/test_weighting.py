"""Weights, blocks and errors: sizes count alike, groups stay whole, and errors go by them."""

import numpy as np
import pytest
from planted import grouped_nulls, planted_rows

from calibrate.errors import QualityError
from calibrate.rows.held_out import combine_held_out, held_out_by_size
from calibrate.rows.logits_files import Arrays
from calibrate.rows.model_selection import choose
from calibrate.rows.rule_fitting import Options, fit_rule
from calibrate.rows.score_logits import score_logits
from calibrate.rows.weighting import N_BLOCKS, assign_blocks, estimate_mean, row_weights

SIZES = (16, 64, 256)


def test_sizes_count_alike_whatever_the_weights_of_their_rows():
    """As those of `capture`, which fall as items grow."""
    rows = planted_rows(lambda H, n: np.ones_like(H), SIZES, count=200)
    given = np.repeat([1.8, 1.0, 0.1], 200) * np.random.default_rng(0).uniform(0.5, 1.5, 600)
    weight = row_weights(rows._replace(weight=given))
    for n in SIZES:
        assert weight[rows.size == n].sum() == pytest.approx(1 / 3)
        ratio = weight[rows.size == n] / given[rows.size == n]
        np.testing.assert_allclose(ratio, ratio[0])
    none_of_256 = row_weights(rows._replace(weight=np.where(rows.size == 256, 0, given)))
    assert none_of_256[rows.size == 16].sum() == pytest.approx(1 / 2)
    alike = row_weights(rows)
    np.testing.assert_allclose(alike, 1 / 600)


def test_fit_and_evaluation_give_sizes_the_same_shares(here):
    rng = np.random.default_rng(1)
    n_real = np.repeat([16, 60], [40, 300])  # fewer than 100 rows of one size
    weight = rng.exponential(1.0, 340) * np.where(n_real == 16, 9, 1)
    logits = rng.standard_normal((340, 60))
    mask = np.arange(60) < n_real[:, None]
    target = rng.integers(0, 16, 340)
    np.savez("held-out.npz", logits=logits, target=target, mask=mask, weight=weight)
    scores = score_logits(Arrays(here / "held-out.npz"), {})
    z = np.where(mask, logits, -np.inf).astype(np.float32).astype(float)
    log_p = z[np.arange(340), target] - np.log(np.exp(z).sum(axis=1))
    rows = planted_rows(lambda H, n: np.ones_like(H), (16,), count=340)
    rows = rows._replace(size=n_real, weight=weight)
    assert scores.estimate().of(0, "log_p")[0] == pytest.approx(row_weights(rows) @ log_p)


@pytest.fixture(scope="module")
def rows():
    return planted_rows(lambda H, n: np.ones_like(H), SIZES, count=240)


def blocks_of_rows(rows):
    """As many of each size in every block, as it was before there were groups."""
    shuffled = np.random.default_rng(0).permutation(len(rows.size))
    by_size = shuffled[np.argsort(rows.size[shuffled], kind="stable")]
    block = np.empty(len(rows.size), np.int64)
    block[by_size] = np.arange(len(by_size)) % N_BLOCKS
    return block


def test_rows_without_groups_are_dealt_one_by_one(rows):
    mixed = rows.take(np.random.default_rng(1).permutation(720))
    np.testing.assert_array_equal(assign_blocks(mixed), blocks_of_rows(mixed))
    named = mixed._replace(group=10**12 + 7 * np.arange(720))
    np.testing.assert_array_equal(assign_blocks(named), blocks_of_rows(mixed))


@pytest.mark.parametrize("spans_sizes", [True, False])
@pytest.mark.parametrize("n_groups", [5, 8, 60, 99, 180])
def test_groups_are_in_one_block_and_blocks_alike(n_groups, spans_sizes, rows):
    group = np.arange(720) % n_groups
    if not spans_sizes:  # as prompts, which have one length
        group = np.arange(240)[:, None] % (-(-n_groups // 3)) * 3 + np.arange(3)
        group = group.T.ravel()
    rows = rows._replace(group=group)
    block = assign_blocks(rows)
    assert len(set(zip(group, block, strict=True))) == len(set(group))
    assert len(set(block)) == min(len(set(group)), N_BLOCKS)
    largest = np.bincount(group).max()
    for size in SIZES:
        of_fold = np.bincount(block[rows.size == size] % 5, minlength=5)
        assert np.ptp(of_fold) <= 2 * largest


def test_intervals_cover_where_rows_of_a_group_are_alike(rows):
    """95 % of them, of eight groups; by rows less than half."""
    rng, covered = np.random.default_rng(0), {True: 0, False: 0}
    group = np.arange(720) % 8
    for _ in range(200):
        gain = rng.standard_normal(8)[group] + rng.standard_normal(720)
        for known in covered:
            named = rows._replace(group=group if known else np.full(720, -1))
            mean, error = estimate_mean(named, gain)
            covered[known] += abs(mean) <= 1.959964 * error
    assert covered[False] < 100
    assert 180 <= covered[True] <= 198


def test_errors_by_size_and_of_heads_together_go_by_group(rows):
    rng = np.random.default_rng(0)
    of_size = rows.take(rows.size == 64)
    group, zero = np.repeat(np.arange(12), 20), np.zeros(240)
    gain = rng.standard_normal(12)[group]
    (alone,) = held_out_by_size(of_size, zero, gain)
    (found,) = held_out_by_size(of_size._replace(group=group), zero, gain)
    of_means = np.std(gain[::20], ddof=1) / np.sqrt(12)
    assert alone.error < 0.3 * of_means
    assert found.error == pytest.approx(of_means * 2.201 / 1.96, rel=1e-3)  # t of 11
    (both,) = combine_held_out([found, found])  # heads that see the same prompts
    assert both.error == pytest.approx(found.error, rel=1e-6)
    (of_rows,) = combine_held_out([alone, alone])
    assert of_rows.error == pytest.approx(alone.error / np.sqrt(2))
    (of_one,) = held_out_by_size(of_size._replace(group=np.zeros(240, int)), zero, gain)
    assert of_one.error == pytest.approx(abs(gain.mean()))  # unknown, and not 0


def test_heads_together_count_by_their_weight(rows):
    """As `evaluate --logits` counts them."""
    of_size = rows.take(rows.size == 64)
    ones, zero = np.ones(240), np.zeros(240)
    (light,) = held_out_by_size(of_size._replace(weight=0.5 * ones), zero, ones)
    (heavy,) = held_out_by_size(of_size._replace(weight=1.5 * ones), zero, 3 * ones)
    (both,) = combine_held_out([light, heavy])
    assert both.after == pytest.approx(2.5)
    assert set(both.record()) == {"size", "rows", "before", "after", "error"}


def test_fewer_groups_than_folds_are_refused(rows):
    with pytest.raises(QualityError, match=r"come from 4 groups \(prompts\), fewer than the 5"):
        fit_rule(rows._replace(group=np.arange(720) % 4), "constant")
    fit_rule(rows._replace(group=np.arange(720) % 5), "constant")


def test_a_rule_for_eight_prompts_is_no_rule():
    """Of a calibrated head, with 100 rows of each prompt and size."""
    rows = grouped_nulls(11)
    alone = choose(rows._replace(group=np.full(len(rows.size), -1)), Options())
    assert alone.chosen.gain.low > 0.01
    with pytest.raises(QualityError, match="not for this head"):
        choose(rows, Options())


def test_what_no_prompt_of_eight_shows_may_be():
    """A calibrated sharp head that is right on all 1,600 rows of them."""
    rows = grouped_nulls(2, spread=0.02, gap=5)
    assert not rows.misranked.any()
    with pytest.raises(QualityError, match="not for this head"):
        choose(rows, Options())


@pytest.mark.slow
def test_calibrated_heads_of_few_prompts_get_a_rule_as_often_as_others():
    """Four of forty at most; without groups it would be about one in three."""
    published = 0
    for seed in range(40):
        try:
            choose(grouped_nulls(seed), Options())
            published += 1
        except QualityError:
            pass
    assert published <= 4
