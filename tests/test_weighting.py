"""Weights, blocks and errors: sizes count alike, groups stay whole, and errors go by them."""

import numpy as np
import pytest
from planted import planted_rows

from calibrate.evaluation.score_logits import score_logits
from calibrate.fitting.weighting import row_weights
from calibrate.heads.logits_files import Arrays

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
    np.testing.assert_allclose(row_weights(rows._replace(weight=0 * given)), alike)


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
