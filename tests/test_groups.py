"""Groups: sizes count alike, groups stay whole, and few of them are no evidence."""

import numpy as np
import pytest
from planted import NO_GAIN, grouped_nulls, planted_rows

from calibrate.datasets.logits_files import Arrays
from calibrate.errors import QualityError
from calibrate.fitting.fit_rule import fit_kind
from calibrate.fitting.groups import N_BLOCKS, assign_blocks, hold_out
from calibrate.fitting.options import Options
from calibrate.fitting.select import fit_and_select

SIZES = (16, 64, 256)


def test_sizes_count_alike_whatever_the_weights_of_their_rows():
    """As those of `capture`, which fall as items grow."""
    rows = planted_rows(lambda H, n: np.ones_like(H), SIZES, count=200)
    given = np.repeat([1.8, 1.0, 0.1], 200) * np.random.default_rng(0).uniform(0.5, 1.5, 600)
    weight = rows._replace(weight=given).shares()
    for n in SIZES:
        assert weight[rows.size == n].sum() == pytest.approx(1 / 3)
        ratio = weight[rows.size == n] / given[rows.size == n]
        np.testing.assert_allclose(ratio, ratio[0])
    none_of_256 = rows._replace(weight=np.where(rows.size == 256, 0, given)).shares()
    assert none_of_256[rows.size == 16].sum() == pytest.approx(1 / 2)
    alike = rows.shares()
    np.testing.assert_allclose(alike, 1 / 600)


@pytest.fixture(scope="module")
def rows():
    return planted_rows(lambda H, n: np.ones_like(H), SIZES, count=240)


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


def test_fewer_groups_than_folds_are_refused(rows):
    with pytest.raises(QualityError, match=r"\b4 groups .*\b5\b"):
        fit_kind(rows._replace(group=np.arange(720) % 4), "constant")
    fit_kind(rows._replace(group=np.arange(720) % 5), "constant")


def test_rows_that_are_bad_do_not_count_as_rows_to_fit():
    logits = np.random.default_rng(0).standard_normal((125, 8))
    target = logits.argmax(1)
    hold_out(Arrays.in_memory("mine", {"logits": logits, "target": target}))
    logits[7, 3] = np.nan
    arrays = Arrays.in_memory("mine", {"logits": logits, "target": target})
    with pytest.raises(QualityError, match="124 .* 125"):
        hold_out(arrays)


def test_a_rule_for_eight_prompts_is_no_rule():
    """A calibrated head, with 100 rows of each prompt and size."""
    rows = grouped_nulls(11)
    alone = fit_and_select(rows._replace(group=np.full(len(rows.size), -1)), Options())
    assert alone.published.gain.low > 0.01
    with pytest.raises(QualityError, match=NO_GAIN):
        fit_and_select(rows, Options())


def test_what_no_prompt_of_eight_shows_may_be():
    """A calibrated sharp head that is right on all 1,600 rows of them."""
    rows = grouped_nulls(2, spread=0.02, gap=5)
    assert not rows.misranked.any()
    with pytest.raises(QualityError, match=NO_GAIN):
        fit_and_select(rows, Options())
