"""The scatter plot of optimal temperatures, and the section of the page that has it."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from planted import planted_rows

import calibrate
from calibrate.core.rule import CONSTANT, ENTROPY_AND_SIZE, RuleForm
from calibrate.evidence.baselines import PAPER, paper
from calibrate.report import plot_scatter
from calibrate.report.page import SolvedHead, rules_beside, temperatures_section
from calibrate.report.plot_scatter import BETA_BOUNDS, N_BINS, beta_bounds, plot_optimal_beta
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

BY_SIZE = Fit(RuleForm.log_size(), (Entry((-0.5, 6.0), (2.0, 7.0)),))
BY_BOTH = Fit(
    RuleForm(0.0, kind=ENTROPY_AND_SIZE), (Entry((0.0,) * 3 + (0.2, 1, 0, 0, 0.1), (0, 9, 2, 7)),)
)
ONE = Fit(RuleForm.constant(), (Entry((2.5,)),))


@pytest.fixture(scope="module")
def solved():
    return calibrate.solve(calibrate.collect("max-retrieval-0", [64, 256, 1_024], 150))


@pytest.fixture(scope="module")
def fitted(solved):
    return calibrate.fit_polynomial(solved)


def drawn(rows, fit, **others):
    ax = Figure(layout="constrained").add_subplot()
    return plot_optimal_beta(ax, rows, fit, others)


def curve(ax, label):
    """The points of the line whose label begins so."""
    (line,) = (x for x in ax.lines if x.get_label().startswith(label))
    return line.get_data()


def labels(ax):
    return {text.get_text() for text in ax.figure.legends[0].get_texts()}


def misranked(rows):
    return rows.take(rows.has_finite_optimum())


def test_points_are_the_misranked_inputs_coloured_by_n(solved, fitted):
    rows = misranked(solved)
    ax = drawn(solved, fitted, paper=paper())
    points = np.asarray(ax.collections[0].get_offsets())
    np.testing.assert_allclose(points[:, 0], rows.entropy)
    np.testing.assert_allclose(points[:, 1], rows.beta.clip(*BETA_BOUNDS))
    np.testing.assert_array_equal(ax.collections[0].get_array(), rows.n)


def test_the_rules_are_drawn_as_they_are_applied(solved, fitted):
    others = rules_beside(fitted, 2.5)
    ax = drawn(solved, fitted, **others)
    assert list(others) == [PAPER, CONSTANT]
    for label, fit in (("this fit", fitted), ("published", paper())):
        entropy, beta = curve(ax, label)
        inside = ~np.isnan(beta)
        lo, hi = fit.only.domain
        np.testing.assert_array_equal(inside, (lo <= entropy) & (entropy <= hi))
        np.testing.assert_allclose(beta[inside], fit.only.beta_at(entropy, None, fit.rule)[inside])
    _, beta = curve(ax, "constant")
    np.testing.assert_allclose(beta, 2.5)


def test_theta_is_on_the_right(solved, fitted):
    ax = drawn(solved, fitted)
    ax.figure.draw_without_rendering()
    (theta,) = ax.child_axes
    heights = {}
    for axis in (ax, theta):
        for text, tick in zip(axis.get_yticklabels(), axis.get_yticks(), strict=True):
            heights[axis, text.get_text()] = axis.transData.transform((0, tick))[1]
    assert heights[theta, "1/4"] == pytest.approx(heights[ax, "4"])
    assert heights[theta, "4"] == pytest.approx(heights[ax, "1/4"])
    assert heights[ax, "4"] > heights[ax, "1/4"]


def test_a_published_polynomial_and_a_constant_have_no_other_like_themselves():
    assert list(rules_beside(paper(), 2.0)) == [CONSTANT]
    assert list(rules_beside(ONE, 2.0)) == list(rules_beside(BY_SIZE, None)) == [PAPER]


def test_of_many_inputs_a_random_subset_is_drawn(solved, fitted, monkeypatch):
    monkeypatch.setattr(plot_scatter, "MAX_POINTS", 100)
    rows = misranked(solved)
    points = drawn(solved, fitted).collections[0]
    places = np.stack([rows.entropy, rows.beta.clip(*BETA_BOUNDS)], axis=1)
    chosen = [
        np.flatnonzero((places == x).all(axis=1))[0] for x in np.asarray(points.get_offsets())
    ]
    assert len(chosen) == len(set(chosen)) == 100
    np.testing.assert_array_equal(points.get_array(), rows.n[chosen])


@pytest.mark.parametrize("fit", [BY_SIZE, BY_BOTH])
def test_a_rule_of_n_is_shown_by_its_mean_over_inputs_of_similar_entropy(solved, fit):
    rows = misranked(solved)
    ax = drawn(solved, fit)
    entropy, beta = curve(ax, "this fit")
    assert any("mean over n" in label for label in labels(ax))
    assert len(entropy) == N_BINS
    assert (np.diff(entropy) > 0).all()
    applied = fit.only.beta_at(rows.entropy, np.log(rows.n), fit.rule)
    assert applied.min() <= beta.min() <= beta.max() <= applied.max()
    assert beta.mean() == pytest.approx(applied.mean(), rel=0.02)


@pytest.mark.parametrize("fit", [ONE, Fit(RuleForm.log_size(), (Entry((0.0, 2.5), (2.0, 7.0)),))])
def test_a_constant_is_one_line_whatever_kind_its_file_has(solved, fit):
    ax = drawn(solved, fit)
    np.testing.assert_array_equal(curve(ax, "this fit")[1], 2.5)
    assert not any("domain" in label or "mean over n" in label for label in labels(ax))


def test_points_beyond_the_axis_are_at_its_edge():
    rows = planted_rows(lambda H, n: 1.2 + 0.5 * H, (16, 256), count=400)
    finite = np.flatnonzero(rows.has_finite_optimum())
    rows.beta[finite] = np.clip(rows.beta[finite], *BETA_BOUNDS)
    rows.beta[finite[:3]] = 65.0
    heights = drawn(rows, ONE).collections[0].get_offsets()[:, 1]
    assert (heights == 64).sum() >= 3
    assert heights.max() == 64


@pytest.mark.parametrize(
    ("low", "high", "bounds"),
    [(1.0, 8.0, BETA_BOUNDS), (1e-2, 1.0, (1 / 128, 2)), (1.0, 1_000.0, (0.5, 1_024))],
)
def test_the_axis_holds_nine_of_ten_inputs(low, high, bounds):
    beta = np.geomspace(low, high, 1_000)
    assert beta_bounds(beta) == bounds
    outside = (beta < bounds[0]) | (beta > bounds[1])
    assert outside.mean() <= 0.1
    assert beta_bounds(beta[:0]) == BETA_BOUNDS


@pytest.mark.parametrize("fit", [BY_SIZE, BY_BOTH, ONE, paper()])
def test_the_page_draws_the_inputs_and_a_rule_of_every_kind(solved, monkeypatch, fit):
    figures = []
    monkeypatch.setattr(
        FigureCanvasAgg, "print_png", lambda canvas, *_, **__: figures.append(canvas.figure)
    )
    _, text, section = temperatures_section(fit, SolvedHead(solved, 2.0))
    assert ("mean over inputs" in text.text) == (fit in (BY_SIZE, BY_BOTH))
    assert len(section.pictures) == len(figures) == (1 if fit == ONE else 2)
    names = labels(figures[0].axes[0])
    assert any(name.startswith("this fit") for name in names)
    assert any(name.startswith("published") for name in names) == (fit != paper())
    assert any(name.startswith("constant") for name in names) == (fit != ONE)
