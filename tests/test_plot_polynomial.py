"""The scatter plot of optimal temperatures: points lie where the inputs do."""

import numpy as np
import pytest
from matplotlib.figure import Figure

import calibrate
from calibrate.core.rule import Rule
from calibrate.evidence.baselines import paper
from calibrate.fitting.fit_rule import applied_beta
from calibrate.report.plot_polynomial import (
    BOUNDS,
    MAX_POINTS,
    N_BINS,
    plot_optimal_beta,
    points_caption,
)
from calibrate.store.coefficients import Coefficients, Entry

BY_SIZE = Coefficients(Rule.log_size(), (Entry((-0.5, 6.0), (2.0, 7.0)),))


@pytest.fixture(scope="module")
def solved():
    return calibrate.solve(calibrate.collect("max-retrieval-0", [64, 256, 1_024], 150))


@pytest.fixture(scope="module")
def fitted(solved):
    return calibrate.fit_polynomial(solved)


def drawn(rows, fitted, **others):
    return plot_optimal_beta(Figure(layout="constrained").add_subplot(), rows, fitted, others)


def misranked(rows):
    return rows.interior().take(rows.interior().misranked)


def test_points_are_the_misranked_inputs(solved, fitted):
    rows = misranked(solved.rows)
    ax = drawn(solved.rows, fitted, published=paper())
    points = np.asarray(ax.collections[0].get_offsets())
    np.testing.assert_allclose(points[:, 0], rows.entropy)
    np.testing.assert_allclose(points[:, 1], rows.beta.clip(*BOUNDS))
    names = {text.get_text() for text in ax.figure.legends[0].get_texts()}
    assert {"fitted polynomial", "published polynomial"} <= names


def test_of_many_inputs_a_sample_is_drawn(solved, fitted):
    rows = misranked(solved.rows)
    many = rows.take(np.resize(np.arange(len(rows.beta)), MAX_POINTS + 1))
    points = np.asarray(drawn(many, fitted).collections[0].get_offsets())
    assert len(points) == MAX_POINTS
    assert set(points[:, 0]) <= set(rows.entropy)
    assert f"A random {MAX_POINTS:,} of them are drawn." in points_caption(many)
    assert points_caption(rows).startswith(
        f"Each point is one of {len(rows.beta)} misranked inputs"
    )


def test_a_rule_of_n_is_shown_by_its_mean_over_inputs_of_similar_entropy(solved, fitted):
    rows = misranked(solved.rows)
    ax = drawn(solved.rows, fitted, selected=BY_SIZE)
    (line,) = (x for x in ax.lines if x.get_label() == "selected rule, mean over n")
    entropy, beta = line.get_data()
    assert len(entropy) == N_BINS
    assert (np.diff(entropy) > 0).all()
    applied = applied_beta(BY_SIZE, rows)
    assert applied.min() <= beta.min() <= beta.max() <= applied.max()
    assert beta.mean() == pytest.approx(applied.mean(), rel=0.02)
