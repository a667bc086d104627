"""Figures are drawn for every kind of fit and evidence, also where there is little to show."""

import os
import subprocess
import sys
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from planted import planted_rows

from calibrate.core.rule import CONSTANT, ENTROPY_AND_SIZE, KINDS, POLYNOMIAL, RuleForm
from calibrate.evidence.calibration_error import expected_calibration_error, reliability_of
from calibrate.evidence.evidence import Evidence, Scored, Stratum
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, RANKED, RIGHT, SETS
from calibrate.fitting.fit_rule import fit_rule
from calibrate.fitting.options import FitOptions
from calibrate.jax.softmax import inverse_temperature
from calibrate.report import plot_style, plots
from calibrate.report.labels import THIS_FIT, label
from calibrate.report.page import FIGURE_SIZE, TALL_FIGURE
from calibrate.report.plot_scatter import plot_optimal_beta
from calibrate.report.score_tables import ECE
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit


def drawn(plot, *arguments, **options):
    return plot(Figure().add_subplot(), *arguments, **options)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != CONSTANT])
def test_the_rule_of_a_fit(kind):
    rows = planted_rows(lambda H, n: 1.2 + 0.5 * H, count=300)
    found = fit_rule(rows, kind, FitOptions().resolved())
    ax = drawn(plots.plot_rule, Fit(found.form, (found.entry(),)))
    assert "baseline" in [line.get_label() for line in ax.lines]
    assert (ax.get_xlabel() == plot_style.ENTROPY_LABEL) == (kind in (POLYNOMIAL, ENTROPY_AND_SIZE))
    highest = max(np.nanmax([1.0, *np.asarray(line.get_ydata(), float)]) for line in ax.lines)
    assert highest > 1.2
    assert plot_style.png(ax.figure).startswith(b"\x89PNG")


def test_a_rule_by_size_has_sizes_along_x(by_size):
    ax = drawn(plots.plot_rule, by_size)
    assert (ax.get_xlabel(), ax.get_xscale()) == ("items n", "log")
    n, beta = ax.lines[0].get_data()
    np.testing.assert_allclose(beta, np.maximum(0.5 * np.log(n) + 0.6, 1))
    assert not any("threshold" in text.get_text() for text in ax.figure.legends[0].get_texts())


def test_a_rule_by_both_is_a_family_of_curves_by_size(by_both):
    ax = drawn(plots.plot_rule, by_both)
    curves = {line.get_label(): line for line in ax.lines if line.get_label().startswith("n = ")}
    sizes = (16, 45, 128, 362, 1024)
    assert list(curves) == [f"n = {n:,}" for n in sizes]
    for n, line in zip(sizes, curves.values(), strict=True):
        H, beta = line.get_data()
        assert 0.2 <= H[0] < 0.22
        assert H[-1] == pytest.approx(min(5, np.log(n)), abs=0.02)
        np.testing.assert_allclose(beta, inverse_temperature(H, by_both, n=n), rtol=1e-5)
    lightness = [sum(line.get_color()[:3]) for line in curves.values()]
    assert lightness == sorted(lightness, reverse=True)  # the larger, the darker


def test_a_map_of_constants_has_their_betas():
    entries = (Entry((2.0,), (), 0, 0), Entry((0.5,), (), 0, 2))
    ax = drawn(plots.plot_head_betas, Fit(RuleForm.constant(0.25), entries))
    np.testing.assert_allclose(ax.images[0].get_array().compressed(), [1, -1])


def test_a_map_of_betas_is_at_the_largest_size_of_the_fit():
    entries = (Entry((0.5, 0.0), (2.0, 5.0), 0, 0), Entry((0.0, 0.5), (2.0, 4.0), 1, 1))
    ax = drawn(plots.plot_head_betas, Fit(RuleForm.log_size(0.25, 64), entries))
    np.testing.assert_allclose(ax.images[0].get_array()[0, 0], np.log2(2.5))
    np.testing.assert_allclose(ax.images[0].get_array()[1, 1], -1)
    assert sum(line.get_marker() == "x" for line in ax.lines) == 2  # heads without a rule


RULES = ("baseline", "own", "paper", "constant", "hard")


def evidence():
    values = {RIGHT: np.random.default_rng(0).random((len(RULES), 40))}
    return Evidence(
        RULES, values, (Stratum(16, "a"), Stratum(64, "b")), np.arange(40) % 2,
        np.full(40, -1), np.ones(40), Scored("x", items=SETS),
    )  # fmt: skip


def test_a_rule_whose_likelihood_would_hide_all_others_is_not_drawn():
    values = {LOG_P: np.tile(np.linspace(-1, -2, len(RULES))[:, None], (1, 40))}
    ax = drawn(plots.plot_scores, replace(evidence(), values=values), LOG_P)
    labels = {container.get_label() for container in ax.containers}
    assert labels == {THIS_FIT, *map(label, RULES)} - {label("own"), label("hard")}


def test_scores_are_means_or_gains_with_two_errors():
    found = evidence()
    for gain, estimate in ((False, found.mean), (True, found.gain)):
        ax = drawn(plots.plot_scores, found, RIGHT, gain=gain)
        lines = {c.get_label(): c.lines[0] for c in ax.containers}
        bars = {c.get_label(): c.lines[2][0].get_segments() for c in ax.containers}
        assert len(lines) == 5 - gain
        own = lines[THIS_FIT].get_ydata()
        by_size = found.by("size").values()
        expected = [x.gain("own", RIGHT) if gain else x.mean("own", RIGHT) for x in by_size]
        np.testing.assert_allclose(own, [100 * one.mean for one in expected])
        assert ax.get_ylim()[0] < min(own) <= max(own) < ax.get_ylim()[1]
        height = [np.ptp(bar[:, 1]) for bar in bars[THIS_FIT]]
        np.testing.assert_allclose(height, [400 * one.error for one in expected])
        assert np.mean(own) == pytest.approx(100 * estimate("own", RIGHT).mean)


def test_a_colour_stands_for_one_rule():
    colours = [colour for colour, *_ in (*plot_style.STYLES.values(), *plot_style.OTHERS)]
    assert len(set(colours)) == len(colours)


@pytest.mark.parametrize(("width", "height"), [FIGURE_SIZE, TALL_FIGURE])
def test_text_of_figures_has_11_pixels_on_a_phone_of_400(width, height, by_both, by_size):
    """A figure is 350 pixels wide there; a point is 1/72 inch."""
    for plot, *arguments in (
        (plots.plot_scores, evidence(), RIGHT),
        (plots.plot_rule, by_both),
        (plots.plot_rule, by_size),
        (plots.plot_head_betas, Fit(RuleForm.constant(0.25), (Entry((2.0,), (), 0, 0),))),
        (plot_optimal_beta, planted_rows(lambda H, n: 1 + 0.5 * H, count=60), by_size, {}),
    ):
        figure = plot_style.draw(plot, *arguments, size=(width, height))
        sizes = [x.get_fontsize() for x in figure.findobj(Text) if x.get_text()]
        assert min(sizes) * 350 / (72 * width) >= 11


def test_reliability_is_drawn_of_the_baseline_two_rules_to_compare_and_the_fit():
    p = np.random.default_rng(0).random((4, 40))
    values = dict(zip((CONFIDENCE, RANKED), (p, p > 0.3), strict=True))
    found = replace(evidence(), rules=("baseline", "constant", "paper", "mine"), values=values)
    ax = drawn(plots.plot_reliability, found, "mine")
    names = [line.get_label() for line in ax.lines]
    assert names[:4] == ["baseline", "published polynomial", "constant", "this fit"]
    assert [line.get_color() for line in ax.lines[:4]] == [
        plot_style.STYLES[rule][0] for rule in ("baseline", "paper", "constant", "own")
    ]


def test_the_calibration_error_is_drawn_by_size_without_argmax():
    p = np.random.default_rng(0).random((3, 40))
    values = dict(zip((CONFIDENCE, RANKED), (p, p > 0.3), strict=True))
    found = replace(evidence(), rules=("baseline", "hard", "own"), values=values)
    ax = drawn(plots.plot_scores, found, ECE)
    baseline, own = ax.containers
    parts = found.by("size").values()
    for rule, curve in (("baseline", baseline), ("own", own)):
        expected = [expected_calibration_error(reliability_of(part, rule)) for part in parts]
        np.testing.assert_allclose(curve.lines[0].get_ydata(), 100 * np.array(expected))


@pytest.mark.parametrize(("gain", "leaves"), [(0.3, False), (0.6, True), (-0.6, True)])
def test_the_axis_of_gains_ends_at_four_times_that_of_the_fit(gain, leaves):
    values = {LOG_P: np.array([[0.0], [0.1], [gain]]) * np.ones(40)}
    found = replace(evidence(), rules=("baseline", "own", "constant"), values=values)
    low, high = drawn(plots.plot_scores, found, LOG_P, gain=True).get_ylim()
    assert (low <= gain <= high) != leaves


def test_a_name_keeps_its_version():
    assert plot_style.short("max-retrieval@12") == "max-retrieval@12"
    assert plot_style.short("n" * 64 + "@99") == "n" * 17 + "…nnn@99"
    assert plot_style.short("$x$") == r"\$x\$"


def test_a_figure_does_not_take_the_users_settings(by_size):
    expected = plot_style.png(plot_style.draw(plots.plot_rule, by_size))
    mine = {"text.usetex": True, "font.size": 22, "lines.linewidth": 9, "figure.facecolor": "red"}
    with matplotlib.rc_context(mine):
        assert plot_style.png(plot_style.draw(plots.plot_rule, by_size)) == expected
        assert matplotlib.rcParams["font.size"] == 22


def test_an_absent_backend_of_the_user_does_not_matter():
    script = (
        "from calibrate.report.plot_style import draw, png\n"
        "assert png(draw(lambda ax: ax.plot([1, 2]))).startswith(b'\\x89PNG')"
    )
    environment = {**os.environ, "MPLBACKEND": "module://absent"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
