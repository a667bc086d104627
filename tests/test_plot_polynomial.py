"""The scatter plot of optimal temperatures: points lie where the inputs do."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import calibrate
from calibrate.core.rule import ENTROPY_AND_SIZE, Rule
from calibrate.evidence.baselines import paper
from calibrate.fitting.fit_rule import applied_beta
from calibrate.report import plot_inputs
from calibrate.report.optimal_temperatures import temperatures_section
from calibrate.report.plot_inputs import MAX_POINTS, MIN_CROWDED, count_in_cells
from calibrate.report.plot_polynomial import (
    BOUNDS,
    N_BINS,
    plot_optimal_beta,
    points_caption,
    rules_caption,
)
from calibrate.report.run_record import SolvedHead
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry

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


def test_of_many_inputs_the_crowded_are_drawn_as_a_density_and_the_others_as_points(
    solved, fitted, monkeypatch
):
    monkeypatch.setattr(plot_inputs, "N_CELLS", (12, 10))
    rows = misranked(solved.rows)
    ax = plot_optimal_beta(Figure().add_subplot(), solved.rows, fitted, {}, max_points=100)
    mesh, points, *_ = ax.collections
    beta = rows.beta.clip(*BOUNDS)
    cells = count_in_cells(rows.entropy, beta, rows.items, BOUNDS)
    assert cells.inputs.sum() == len(beta)
    assert cells.inputs[cells.crowded].min() >= MIN_CROWDED
    assert 0 < cells.in_crowded.sum() == cells.inputs[cells.crowded].sum() < len(beta)
    alone = ~cells.in_crowded
    np.testing.assert_allclose(np.asarray(points.get_offsets())[:, 0], rows.entropy[alone])
    np.testing.assert_array_equal(points.get_array(), rows.items[alone])
    opacity = mesh.get_array()[..., 3].T
    np.testing.assert_array_equal(opacity > 0, cells.crowded)
    order = np.argsort(cells.inputs[cells.crowded], kind="stable")
    assert (np.diff(opacity[cells.crowded][order]) >= 0).all()  # the fuller, the more opaque
    assert "the more opaque it is" in points_caption(rows, max_points=100)


def test_cells_hold_the_inputs_between_their_edges():
    entropy, beta = np.array([0.0, 0.01, 1.0, 2.0]), np.array([0.25, 0.26, 1.0, 64.0])
    cells = count_in_cells(entropy, beta, np.array([4, 16, 16, 16]), BOUNDS)
    assert (cells.inputs[0, 0], cells.inputs[-1, -1], cells.inputs.sum()) == (2, 1, 4)
    assert cells.items[0, 0] == pytest.approx(8)  # the geometric mean
    assert not cells.in_crowded.any()
    i, j = np.argwhere(cells.inputs == 1)[0]
    assert cells.entropy[i] <= 1.0 <= cells.entropy[i + 1]
    assert cells.beta[j] <= 1.0 <= cells.beta[j + 1]
    one = np.array([1.0])
    assert count_in_cells(0 * one, one, one, BOUNDS).inputs.sum() == 1


def test_up_to_so_many_inputs_each_is_a_point(solved, fitted):
    rows = misranked(solved.rows)
    assert len(rows.beta) <= MAX_POINTS
    points = np.asarray(drawn(solved.rows, fitted).collections[0].get_offsets())
    assert len(points) == len(rows.beta)
    assert f" {len(rows.beta)} " in points_caption(rows)
    assert "opaque" not in points_caption(rows)


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


def labels(ax):
    return {text.get_text() for text in ax.figure.legends[0].get_texts()}


def test_a_constant_is_one_line_whatever_kind_its_file_has(solved, fitted):
    constant = Coefficients(Rule.log_size(), (Entry((0.0, 2.5), (2.0, 7.0)),))
    ax = drawn(solved.rows, fitted, selected=constant)
    (line,) = (x for x in ax.lines if x.get_label() == "selected rule")
    np.testing.assert_array_equal(line.get_ydata(), 2.5)
    assert "depends on n" not in rules_caption({"selected": constant})


BY_BOTH = Coefficients(
    Rule(0.0, kind=ENTROPY_AND_SIZE), (Entry((0.0,) * 3 + (0.2, 1, 0, 0, 0.1), (0, 9, 2, 7)),)
)


@pytest.mark.parametrize(
    ("fit", "name"),
    [
        (BY_SIZE, "selected rule, mean over n"),
        (BY_BOTH, "selected rule, mean over n"),
        (paper(), "selected rule"),
    ],
)
def test_the_page_draws_the_selected_rule_of_every_kind(solved, fitted, monkeypatch, fit, name):
    drawn = []
    monkeypatch.setattr(
        FigureCanvasAgg, "print_png", lambda canvas, *_, **__: drawn.append(canvas.figure)
    )
    head = SolvedHead(solved.collection, solved.rows, fitted)
    _, figures, *_ = temperatures_section(fit, head)
    assert name in labels(drawn[0].axes[0])
    caption = figures.pictures[0].caption
    assert ("The selected rule depends on n" in caption) == ("mean" in name)
