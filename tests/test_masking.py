"""Masking: one rule for the numbers that mean masked."""

import jax.numpy as jnp
import numpy as np
import pytest

from calibrate.core.masking import is_masked, mask_low_logits
from calibrate.core.rule import RuleForm
from calibrate.rows.collect import collect_from_head
from calibrate.rows.collection import open_collection
from calibrate.rows.logits_checks import in_float32
from calibrate.rows.score import betas_of_rows
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

MASKS = (-np.inf, float(np.finfo("float32").min), -65_504.0, -1e9, -1e4, -9_984.0, -9_001.0)
REAL = (0.0, -700.0, -9_000.0)


@pytest.mark.parametrize("of", [np.array, jnp.array])
def test_what_masks_and_what_does_not(of):
    x = of([*MASKS, *REAL, np.nan], dtype=np.float32)
    np.testing.assert_array_equal(is_masked(x), [True] * len(MASKS) + [False] * (len(REAL) + 1))


def test_masks_are_relative_to_the_highest_unmasked_logit_of_the_row():
    rows = np.array([*MASKS, *REAL]) + np.array([[0.0], [1e4], [-1e4], [-1e12]])
    expected = np.where(np.arange(rows.shape[1]) < len(MASKS), -np.inf, rows)
    for part in (slice(3), slice(3, 4)):  # float32 would round the last one to hundreds of logits
        masked, n_finite = mask_low_logits(
            rows[part].astype("float32" if part.stop == 3 else float)
        )
        np.testing.assert_allclose(masked, expected[part], rtol=1e-7)
        assert n_finite == (len(MASKS) - 1) * len(masked)
    where = np.array([False, True, True])
    for outside in (1e9, np.nan, np.inf):
        masked, n_finite = mask_low_logits(
            np.array([[outside, 0, -1e9], [outside, -1e9, -1e9]]), where
        )
        np.testing.assert_array_equal(masked, [[outside, 0, -np.inf], [outside, -1e9, -1e9]])
        assert n_finite == 1


def test_rows_with_plus_infinity_or_nan_stay_bad():
    rows = np.array([[np.inf, 0, 1], [np.nan, 0, -1e9]], np.float32)
    masked, _ = mask_low_logits(rows)
    np.testing.assert_array_equal(masked[0], rows[0])
    assert np.isnan(masked[1]).any()


@pytest.mark.parametrize("mask", [-1e9, -1e4])
def test_finite_masks_of_a_head(mask, toy_head, here):
    def collect_with(fill, name):
        def spoil(logits):
            logits[logits < 1] = fill

        toy_head.spoil = spoil
        return collect_from_head(toy_head, [16], 64, 0, here / name)

    collect_with(-np.inf, "inf")
    with pytest.warns(UserWarning, match=r"head 'toy': attend .*\b9,000\b.* -inf"):
        collect_with(mask, "finite")
    one, other = (open_collection(here / name).manifest for name in ("inf", "finite"))
    assert one["shards"] == other["shards"]


def test_scores_of_a_head_leave_finite_masks_out():
    """By n: under beta = log n, twelve masked items of sixteen would double beta."""
    z = np.random.default_rng(0).standard_normal((5, 16)).astype("float32")
    masked = np.arange(16) >= 4
    rules = [Fit(RuleForm.log_size(), (Entry((1.0, 0.0), (0.1, 9.0)),))]
    ours, exact = (
        betas_of_rows(in_float32(np.where(masked, np.float32(fill), z))[0], rules)
        for fill in (-1e4, -np.inf)
    )
    np.testing.assert_array_equal(ours, exact)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", jnp.bfloat16])
def test_offsets_mask_nothing_and_cost_no_digits_of_float64(dtype):
    z = np.random.default_rng(0).integers(-64, 64, (20, 8)) / 16.0
    of = {"float64": (0, -1e4, 1e6, -1e12), "float32": (0, -1e4, 1e4)}.get(dtype, (0,))
    for offset in of:
        for padding in (-np.inf, -6e4):
            logits = (z + offset).astype(dtype)
            logits[:, 6:] = offset + padding
            given = in_float32(logits)[0]
            masked = given - given.max(axis=1, keepdims=True)
            exact = np.where(np.arange(8) < 6, z - z[:, :6].max(axis=1, keepdims=True), -np.inf)
            np.testing.assert_allclose(masked, exact, atol=1e-3 if abs(offset) > 1e9 else 0)


def test_offsets_go_by_the_items_that_a_mask_leaves():
    z = np.array([[1e6, 5_000.001, 5_000.002]])
    given, _ = in_float32(z, np.array([False, True, True]))
    np.testing.assert_allclose(given[0, 1:], [-0.001, 0], atol=1e-9)


def test_a_head_may_give_logits_with_a_large_offset(toy_head, here):
    """In float64, of which float32 would keep none of the differences."""
    manifests = []
    for offset in (0.0, 1e9):
        attend = type(toy_head).attend

        def shifted(batch, offset=offset, attend=attend):
            batch = attend(toy_head, batch)
            return batch._replace(logits=np.round(batch.logits.astype(float) * 64) / 64 + offset)

        toy_head.attend = shifted
        manifests.append(collect_from_head(toy_head, [16], 64, 0, here / str(offset)).manifest)
    (one,), (other,) = (manifest["sizes"] for manifest in manifests)
    assert one == other
    assert one["misranked"] > 0
