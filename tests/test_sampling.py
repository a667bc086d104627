"""Random samples of arrays that exceed a limit, unbiased in each size and head."""

import numpy as np
import pytest

import calibrate
from calibrate.errors import QualityError
from calibrate.fitting.fit_collection import fit_collection
from calibrate.fitting.options import FitOptions
from calibrate.rows.collect import collect_arrays
from calibrate.rows.logits_files import Arrays
from calibrate.rows.sampling import fair_share, row_quotas, sample_rows


def drawn(rows, n=16, sharp=2.0, seed=0):
    """Logits, and targets of which softmax(sharp * logits) is the distribution."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((rows, n)).astype(np.float32)
    return z, (sharp * z + rng.gumbel(size=z.shape)).argmax(1)


def beta_of(fit, entry=0):
    return fit.entries[entry].coefficients[-1]


@pytest.mark.parametrize(
    ("requested", "total", "share"),
    [
        ([5, 5], 100, 5), ([5, 50, 50], 65, 30), ([9, 9, 9], 26, 8), ([7], 3, 3), ([3, 4], 0, 0),
        ([3, 4], 7, 4), ([5, 50], 11, 6),  # the first requests exactly its share
    ],
)  # fmt: skip
def test_a_share_is_the_largest_that_fits(requested, total, share):
    assert fair_share(requested, total) == share
    assert sum(min(request, share) for request in requested) <= total


def test_quotas_hold_rows_and_bytes():
    counts, row_bytes = np.array([10, 1_000, 1_000]), np.array([100, 100, 1_000])
    assert row_quotas(counts, row_bytes, 10_000, 10**9).tolist() == [10, 1_000, 1_000]
    assert row_quotas(counts, row_bytes, 210, 10**9).tolist() == [10, 100, 100]
    quotas = row_quotas(counts, row_bytes, 10_000, 101_000)
    assert quotas.tolist() == [10, 500, 50]


def test_a_sample_keeps_sums_of_weights():
    """On average over draws, of heavy rows and of light ones, in both strata."""
    rows = 4_000
    weight = np.where(np.arange(rows) % 40 == 0, 50.0, 0.5)
    stratum = (np.arange(rows) % 4 == 1).astype(int)  # 3,000 rows, and 1,000 light ones
    parts = [weight > 1, (weight < 1) & (stratum == 0), stratum == 1]
    draws = []
    for seed in range(200):
        index = np.arange(rows) + seed * rows
        kept, new = sample_rows(stratum, weight, index, np.array([400, 300]))
        assert np.bincount(stratum[kept]).tolist() == [400, 300]
        draws.append([new[kept & part].sum() for part in parts])
    error = np.std(draws, axis=0) / np.sqrt(len(draws))
    sums = [weight[part].sum() for part in parts]
    np.testing.assert_array_less(np.abs(np.mean(draws, axis=0) - sums), 3 * error + 1e-3)
    assert error[0] < 0.02 * sums[0]


def test_a_sample_does_not_depend_on_weights_or_on_the_order_of_rows():
    rng = np.random.default_rng(0)
    stratum, weight = rng.integers(0, 3, 1_000), rng.lognormal(size=1_000)
    index, quotas = rng.permutation(5_000)[:1_000], np.array([100, 50, 1_000])
    kept, new = sample_rows(stratum, weight, index, quotas)
    assert (sample_rows(stratum, np.ones(1_000), index, quotas)[0] == kept).all()
    order = rng.permutation(1_000)
    again = sample_rows(stratum[order], weight[order], index[order], quotas)
    for column, of_order in zip((kept, new), again, strict=True):
        np.testing.assert_array_equal(column[order], of_order)


def test_the_weight_of_a_kept_row_includes_the_rows_left_out():
    stratum = np.repeat(np.arange(1_000), 30)
    kept, weight = sample_rows(stratum, np.ones(30_000), np.arange(30_000), np.full(1_000, 5))
    assert (np.bincount(stratum, kept) == 5).all()
    assert (weight == 6).all()


def test_a_stratum_within_its_quota_is_kept_unchanged():
    weight = np.linspace(1, 2, 30)
    kept, new = sample_rows(np.arange(30) // 15, weight, np.arange(30), np.array([15, 5]))
    assert kept[:15].all()
    np.testing.assert_array_equal(new[:15], weight[:15].astype(np.float32))
    assert kept[15:].sum() == 5


def test_a_weight_beyond_float32_is_clipped():
    weight = np.array([1.0, 3e38], np.float32)
    _, new = sample_rows(np.zeros(2, int), weight, np.arange(2), np.array([1]))
    assert new.tolist() == [2, np.finfo(np.float32).max]


def sample_of(**columns):
    """A collection of 2,000 of the rows."""
    return collect_arrays(Arrays.in_memory("mine", columns), max_rows=2_000)


def test_a_collection_of_a_sample_keeps_the_sum_of_weights_of_each_head():
    logits, target = drawn(6_000, seed=4)
    logits[:5] = np.nan
    weight = np.random.default_rng(5).lognormal(size=6_000)
    head = (np.arange(6_000) % 6 == 0).astype(int)
    with pytest.warns(UserWarning, match=r"\b2,000 .*\b5,995 "):
        collection = sample_of(logits=logits, target=target, weight=weight, head=head)
    found = np.zeros(2)
    for _, rows in collection.shards():
        found += np.bincount(rows.head, rows.weight, 2)
    np.testing.assert_allclose(found, np.bincount(head[5:], weight[5:]), rtol=0.1)


def test_a_collection_of_a_sample_has_weights_where_none_were_given():
    logits, target = drawn(6_000)
    n = np.where(np.arange(6_000) < 500, 8, 16)
    mask = np.arange(16) < n[:, None]
    target = np.minimum(target, n - 1)
    with pytest.warns(UserWarning, match=r"\b2,000 "):
        shards = sample_of(logits=logits, target=target, mask=mask).shards()
    sums = {size: rows.weight.sum() for size, rows in shards}
    assert sums == pytest.approx({8: 500, 16: 5_500})


def test_arrays_within_the_budget_have_no_weights():
    logits, target = drawn(2_000)
    ((_, rows),) = sample_of(logits=logits, target=target).shards()
    assert len(rows.target) == 2_000
    assert rows.weight is None


def test_all_rows_of_arrays_are_fitted_within_the_budget():
    logits, target = drawn(6_000)
    fit = calibrate.fit(logits, target, kind="constant")
    assert fit.evidence["inputs"]["fitted"] == fit.evidence["inputs"]["seen"] == 6_000
    assert beta_of(fit) == pytest.approx(2.0, abs=0.06)


def test_rows_with_nearly_all_of_the_weight_determine_the_fit():
    """They are one in twenty, and more rows are given than are kept."""
    logits, target = drawn(12_000, seed=1)
    few, theirs = drawn(600, sharp=6.0, seed=2)
    weight = np.r_[np.full(12_000, 1e-3), np.full(600, 100.0)]
    both = {"logits": np.concatenate([logits, few]), "target": np.r_[target, theirs]}
    with pytest.warns(UserWarning, match=r"\b2,000 .*\b12,600 "):
        fit = fit_collection(sample_of(**both, weight=weight), "x", FitOptions("constant")).fit
    assert beta_of(fit) == pytest.approx(
        beta_of(calibrate.fit(few, theirs, kind="constant")), rel=0.3
    )


def test_a_head_with_few_rows_keeps_them():
    logits, target = drawn(12_000, seed=3)
    head = (np.arange(12_000) < 600).astype(int)
    with pytest.warns(UserWarning, match="rows"):
        rows = sample_of(logits=logits, target=target, layer=np.zeros_like(head), head=head)
    fit = fit_collection(rows, "x").fit
    assert [entry.head for entry in fit.entries] == [0, 1]


def test_rows_of_weight_0_are_neither_sampled_nor_bad():
    logits, target = drawn(3_000)
    weight = (np.arange(3_000) < 1_000).astype(float)
    spoilt = logits.copy()
    spoilt[1_500:] = np.nan
    fit = calibrate.fit(spoilt, target, weight=weight, kind="constant")
    assert fit.evidence["inputs"]["seen"] == 1_000
    assert beta_of(fit) == beta_of(calibrate.fit(logits[:1_000], target[:1_000], kind="constant"))


def test_half_precision_weights_are_read(recwarn):
    logits, target = drawn(1_000)
    fit = calibrate.fit(logits, target, weight=np.ones(1_000, np.float16), kind="constant")
    assert fit == calibrate.fit(logits, target, kind="constant")
    assert not recwarn.list


def test_no_weight_at_all_is_refused():
    logits, target = drawn(300)
    with pytest.raises(QualityError, match="weight"):
        calibrate.fit(logits, target, weight=np.zeros(300))
