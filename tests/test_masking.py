"""Masking: one rule for the numbers that mean masked."""

import jax.numpy as jnp
import numpy as np
import pytest

from calibrate.files.coefficients import Coefficients, Entry
from calibrate.files.collection import open_collection
from calibrate.maths.masking import as_masks, finite_masks, is_masked
from calibrate.maths.rule import Rule
from calibrate.rows.collect import collect
from calibrate.rows.score_head import attention_weights

MASKS = (-np.inf, float(np.finfo("float32").min), -65_504.0, -1e9, -1e4, -9_984.0, -9_000.0)
REAL = (np.inf, np.nan, 0.0, 700.0, -8_999.0)


@pytest.mark.parametrize("of", [np.array, jnp.array])
def test_what_masks_and_what_does_not(of):
    x = of([*MASKS, *REAL], dtype=np.float32)
    np.testing.assert_array_equal(is_masked(x), [True] * len(MASKS) + [False] * len(REAL))
    assert finite_masks(np.asarray(x)) == 6
    masked = as_masks(np.array([-1e4, 0], "float16"))
    assert masked.dtype == "float16"
    assert masked.tolist() == [-np.inf, 0]


@pytest.mark.parametrize("mask", [-1e9, -1e4])
def test_finite_masks_of_a_head(mask, toy_head, here):
    def collect_with(fill, name):
        def spoil(logits):
            logits[logits < 1] = fill

        toy_head.spoil = spoil
        return collect(toy_head, [16], 64, 0, here / name)

    collect_with(-np.inf, "inf")
    with pytest.warns(UserWarning, match="head 'toy': attend gave .* count as masked"):
        collect_with(mask, "finite")
    one, other = (open_collection(here / name).manifest for name in ("inf", "finite"))
    assert one["shards"] == other["shards"]


def test_scores_of_a_head_leave_finite_masks_out():
    """By n: under beta = log n, twelve masked items of sixteen would double beta."""
    z = np.random.default_rng(0).standard_normal((5, 16)).astype("float32")
    masked = np.arange(16) >= 4
    rules = [Coefficients(Rule.log_size(), (Entry((1.0, 0.0), (0.1, 9.0)),))]
    ours, exact = (
        attention_weights(np.where(masked, np.float32(fill), z), rules) for fill in (-1e4, -np.inf)
    )
    np.testing.assert_array_equal(ours, exact)
