"""Figures are drawn for every kind of fit, also where there is little to show."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from planted import planted_rows

from calibrate.evidence.baselines import LABELS, label, paper
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths.rule import ENTROPY_AND_SIZE, Rule
from calibrate.report import fit_plots, plot_style, score_plots
from calibrate.report.page import NARROW
from calibrate.report.rule_curves import rule_curve, shown_sizes
from calibrate.rows.rule_fitting import KINDS, fit_rule
from calibrate.softmax import inverse_temperature


@pytest.fixture(scope="module")
def rows():
    return planted_rows(lambda H, n: 1.2 + 0.5 * H, count=300)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_among_its_rows(rows, kind):
    ax = Figure().add_subplot()
    fit_plots.plot_fit(ax, rows, fit_rule(rows, kind), paper())
    assert f"{len(rows.interior().beta):,} misranked rows" in ax.get_title()
    labels = [line.get_label() for line in ax.lines]
    named = [
        "n = " in label if kind == ENTROPY_AND_SIZE else "this fit" in label for label in labels
    ]
    assert any(named)
    assert "the paper's fit" in labels or kind == "log-size"


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_is_never_wrong(rows, kind):
    won = rows.take(~rows.misranked)
    ax = Figure().add_subplot()
    fit_plots.plot_fit(ax, won, fit_rule(won, kind), paper())
    assert "0 misranked rows" in ax.get_title()
    assert plot_style.png(ax.figure).startswith(b"\x89PNG")


def test_a_fit_by_both_is_a_family_of_curves_by_size(by_both):
    ax = fit_plots.plot_beta(Figure().add_subplot(), by_both)
    curves = {line.get_label(): line for line in ax.lines if line.get_label().startswith("n = ")}
    sizes = (16, 64, 128, 512, 1024, 4096)
    assert list(curves) == [f"n = {n:,}" for n in sizes[:-1]] + ["n = 4,096, not fitted"]
    for n, line in zip(sizes, curves.values(), strict=True):
        assert line.get_linestyle() == ("--" if n == 4096 else "-")
        H, beta = line.get_data()
        drawn = ~np.isnan(beta)
        assert H[-1] == pytest.approx(np.log(n))
        np.testing.assert_array_equal(drawn, (H >= 0.2) & (H <= 5))
        runtime = inverse_temperature(H[drawn], by_both, n=n)
        np.testing.assert_allclose(beta[drawn], runtime, rtol=1e-5)
    colours = [line.get_color() for line in curves.values()]
    lightness = [sum(colour[:3]) for colour in colours]
    assert lightness == sorted(lightness, reverse=True)  # as of dots: the larger, the darker


def test_a_fit_by_both_among_its_rows(rows, by_both):
    ax = fit_plots.plot_fit(Figure().add_subplot(), rows, by_both, paper())
    curves = [line for line in ax.lines if line.get_label().startswith("n = ")]
    (dots,) = ax.collections[:1]
    for line in curves:
        H, theta = line.get_data()
        n = int(line.get_label().removeprefix("n = ").replace(",", "").split()[0])
        inside = ~np.isnan(theta)
        beta = inverse_temperature(H[inside], by_both, n=n)
        np.testing.assert_allclose(1 / theta[inside], beta, rtol=1e-5)
        np.testing.assert_allclose(line.get_color(), dots.to_rgba(np.array([n]), alpha=1)[0])
    assert len(curves) == 6
    assert not any("this fit" in line.get_label() for line in ax.lines)


def test_a_curve_has_no_jump_at_0_where_there_is_no_gate(make_fit):
    """There any beta gives the same, and beta is 1."""
    constant = make_fit(powers=(0.0, 0.0, 0.0, 0.0, 2.5), domain=(0.0, 3.0), min_entropy=0.0)
    x, beta = rule_curve(constant, constant.only, np.linspace(0, 3, 7))
    np.testing.assert_array_equal(beta, 2.5)
    assert x[0] == 0
    gated = make_fit(powers=(0.0, 0.0, 0.0, 0.0, 2.5), domain=(0.0, 3.0), min_entropy=0.5)
    assert rule_curve(gated, gated.only, np.array([0.0, 0.5, 0.6]))[1].tolist() == [1, 1, 2.5]


def test_several_heads_by_both_are_drawn_at_the_largest_size(by_both):
    heads = tuple(replace(by_both.only, head=i) for i in range(3))
    several = replace(by_both, entries=heads)
    for ax in (
        fit_plots.plot_beta(Figure().add_subplot(), several),
        fit_plots.plot_betas(Figure().add_subplot(), several, heads),
    ):
        H, beta = ax.lines[0].get_data()
        runtime = inverse_temperature(H, by_both, n=1024)
        np.testing.assert_allclose(beta, runtime, rtol=1e-5)
        assert H[-1] == pytest.approx(5, abs=0.05)


@pytest.mark.parametrize(
    ("ends", "sizes"),
    [
        ((16, 16384), [16, 128, 512, 4096, 16384, 65536]),
        ((10, 30), [10, 16, 30, 120]),
        ((1, 2), [1, 2, 8]),
    ],
)
def test_shown_sizes_are_ends_powers_of_two_and_one_beyond(ends, sizes):
    assert shown_sizes(np.log(ends).tolist()) == sizes


LONGEST = Coefficients(Rule.log_size(), (Entry((0.5, 0.6), (2.0, 7.0)),), name="n" * 64, version=99)
LARGEST = Entry((0.0,) * 4 + (1.0, -0.1, 0.0, 0.3), (0.2, 9.0, 9.0, 14.0))  # 1.2 million items
BOTH = Coefficients(Rule(0.0, kind=ENTROPY_AND_SIZE), (LARGEST,), name="n" * 64, version=99)
MANY = tuple(Entry((0.1 * i, 1.0), (2.0, 5.0), 100, 100 + i) for i in range(10))


def accuracies(ax):
    comparison = SimpleNamespace(rules=list(LABELS), sizes=[16, 64])
    for name in ("accuracy", "error", "gain", "gain_error"):
        setattr(comparison, name, np.zeros((len(LABELS), 2)))
    return score_plots.plot_accuracy(ax, comparison, LONGEST.reference)


def test_at_most_five_curves_are_compared():
    ax = accuracies(Figure().add_subplot())
    drawn = [line.get_label() for line in ax.lines]
    assert drawn == [label(rule, plot_style.short(LONGEST.reference)) for rule in LABELS
                     if rule in ("plain", "paper", "own", "log-n", "hard")]  # fmt: skip


def test_gains_have_one_colour():
    """Above 0 every map is orange, as the curves of a fit, and below 0 purple."""
    ax = plot_style.plot_gain_map(Figure().add_subplot(), {(0, 0): 0.2, (0, 1): -0.1}, "-", "")
    red, _, blue, _ = ax.images[0].to_rgba([0.2])[0]
    assert red > 2 * blue
    red, _, blue, _ = ax.images[0].to_rgba([-0.2])[0]
    assert blue > red


@pytest.mark.parametrize(
    "plot",
    [
        accuracies,
        lambda ax: fit_plots.plot_betas(ax, LONGEST, LONGEST.entries),
        lambda ax: fit_plots.plot_betas(ax, replace(LONGEST, entries=MANY), MANY),
        lambda ax: fit_plots.plot_betas(ax, BOTH, BOTH.entries),
        lambda ax: fit_plots.plot_fit(ax, planted_rows(lambda H, n: 2.0, count=300), BOTH, paper()),
        lambda ax: fit_plots.plot_fit(
            ax, planted_rows(lambda H, n: 2.0, count=300), LONGEST, paper()
        ),
    ],
)
def test_the_longest_names_fit_into_a_narrow_figure(plot):
    figure = Figure(figsize=NARROW, layout="constrained")
    ax = plot(figure.add_subplot())
    figure.draw_without_rendering()
    (legend,) = figure.legends or [ax.get_legend()]
    for text in legend.get_texts():
        box = text.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1


def test_a_name_keeps_its_version():
    assert plot_style.short("max-retrieval@12") == "max-retrieval@12"
    assert plot_style.short(LONGEST.reference) == "n" * 13 + "…nnn@99"
    assert plot_style.short("$x$") == r"\$x\$"


def test_the_evidence(make_fit):
    quality = {
        "band": [[x, 1.5, 2.5] for x in np.linspace(0.2, 4, 9)],
        "held_out": [
            {"size": n, "rows": 9, "before": -1.0, "after": -0.5, "error": 0.1} for n in (16, 64)
        ],
    }
    fit = replace(make_fit(), quality=quality)
    axes = Figure().subplots(2)
    band, gain = fit_plots.plot_band(axes[0], fit), fit_plots.plot_held_out(axes[1], fit)
    assert band.get_xlabel() == plot_style.ENTROPY_LABEL
    np.testing.assert_array_equal(gain.lines[1].get_ydata(), [0.5, 0.5])
