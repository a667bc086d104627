"""The page of a fit per head shows the optimal temperatures of the heads that gain most."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from test_cli import call
from test_report import Text

import calibrate
from calibrate.cli import row_scoring
from calibrate.core.rule import Rule
from calibrate.datasets.logits_files import Arrays
from calibrate.report.optimal_temperatures import temperatures_section
from calibrate.report.plot_polynomial import with_finite_optimum
from calibrate.report.scores_record import ScoresRecord
from calibrate.rows.score_logits import score_logits
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry

HEADS = [(layer, head) for layer in range(2) for head in range(3)]
SCALES = (0.6, 0.2, 0.5, 0.3, 0.4, 1)  # of their logits
BY_GAIN = [(0, 1), (1, 0), (1, 1), (0, 2), (0, 0)]  # the more diffuse first


def lookups(seed, rows=150, sizes=(16, 64)):
    """Logits of heads that look up one item, more or less diffuse, the last one without error."""
    rng, parts = np.random.default_rng(seed), []
    for i, (layer, head) in enumerate(HEADS):
        for n in sizes:
            target = rng.integers(0, n, rows)
            logits = np.full((rows, max(sizes)), 0.0)
            logits[:, :n] = rng.standard_normal((rows, n))
            logits[np.arange(rows), target] += 2 if i < 5 else 9
            logits *= SCALES[i]
            mask = np.broadcast_to(np.arange(max(sizes)) < n, logits.shape)
            parts.append((logits, target, mask, np.full(rows, layer), np.full(rows, head)))
    names = ("logits", "target", "mask", "layer", "head")
    return dict(zip(names, map(np.concatenate, zip(*parts, strict=True)), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A fit of six heads, its collection, and held-out logits."""
    folder = tmp_path_factory.mktemp("heads")
    np.savez(folder / "mine.npz", **lookups(0))
    np.savez(folder / "held-out.npz", **lookups(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        call("collect", "--logits", "mine.npz", "--out", "runs/mine")
        call("fit", "runs/mine", "--name", "mine")
    return folder


@pytest.fixture
def fitted(folder, monkeypatch):
    """The fit, and its held-out scores."""
    monkeypatch.chdir(folder)
    fit = calibrate.load("mine")
    scores = score_logits(Arrays.read(Path("held-out.npz")), {fit.reference: fit})
    return fit, ScoresRecord(scores, (fit.reference,))


def test_the_heads_are_those_of_the_largest_gain_and_their_rows_are_their_own(fitted):
    fit, scores = fitted
    heads = row_scoring.solved_heads(fit, None, scores)
    assert [(h.layer, h.head) for h in heads] == BY_GAIN[: row_scoring.N_HEADS]
    assert [h.gain for h in heads] == sorted((h.gain for h in heads), reverse=True)
    columns = lookups(0)
    for head in heads:
        own = (columns["layer"] == head.layer) & (columns["head"] == head.head)
        z, target = columns["logits"][own], columns["target"][own]
        z = np.where(columns["mask"][own], z, -np.inf)
        misranked = z.max(axis=1) > z[np.arange(len(z)), target]
        assert head.rows.misranked.sum() == misranked.sum()
        entry = scores.evidence.by("head")[head.layer, head.head]
        assert head.gain == entry.gain(fit.reference, scores.metric).mean


def test_heads_without_misranked_inputs_or_without_a_rule_are_left_out(fitted):
    fit, scores = fitted
    named = {(e.layer, e.head) for e in fit.entries}
    heads = row_scoring.solved_heads(fit, Path("runs/mine"), scores, most=9)
    assert {(h.layer, h.head) for h in heads} == named - {HEADS[-1]}
    assert all(with_finite_optimum(head.rows).any() for head in heads)


def test_heads_that_the_scores_do_not_name_are_not_guessed(fitted):
    fit, _ = fitted
    columns = {name: x for name, x in lookups(1).items() if name not in ("layer", "head")}
    np.savez("of-one.npz", **columns)
    alike = replace(fit, entries=(replace(fit.entries[0], layer=None, head=None),))
    scores = score_logits(Arrays.read(Path("of-one.npz")), {fit.reference: alike})
    assert row_scoring.solved_heads(alike, None, ScoresRecord(scores, (fit.reference,))) == []


def test_the_page_has_a_picture_of_each(folder, monkeypatch):
    monkeypatch.chdir(folder)
    call("report", "mine", "--logits", "held-out.npz", "--out", "r.html")
    words = " ".join(Text(Path("r.html").read_text(encoding="utf-8")).words)
    assert re.search(r"\b4 heads .*held-out gains", words)
    captions = re.findall(r"Layer (\d), head (\d)\. The rule gains ([0-9.]+) nats", words)
    assert [(int(layer), int(head)) for layer, head, _ in captions] == BY_GAIN[:4]


def test_gains_on_the_rows_that_were_fitted_are_not_called_held_out(folder, monkeypatch):
    monkeypatch.chdir(folder)
    call("report", "mine", "--logits", "mine.npz", "--out", "fitted.html")
    words = " ".join(Text(Path("fitted.html").read_text(encoding="utf-8")).words)
    assert "held-out gains" not in words


def test_run_has_them_too(folder, monkeypatch):
    monkeypatch.chdir(folder)
    call("run", "--logits", "mine.npz", "--name", "run")
    words = " ".join(Text(Path("fits/run/1.html").read_text(encoding="utf-8")).words)
    assert re.search(r"\b4 heads .*held-out gains", words)


def test_each_head_is_under_its_own_rule(fitted, monkeypatch):
    """And a rule of n is said to be one, though another head has a constant."""
    fit, scores = fitted
    drawn = []
    monkeypatch.setattr(
        FigureCanvasAgg, "print_png", lambda canvas, *_, **__: drawn.append(canvas.figure)
    )
    heads = row_scoring.solved_heads(fit, None, scores)[:2]
    rules = (Entry((0.0, 3.0), (2.7, 4.2), 0, 1), Entry((0.5, 0.5), (2.7, 4.2), 1, 0))
    _, text, figures = temperatures_section(Coefficients(Rule.log_size(), rules), heads)
    assert "The selected rule depends on n" in text.text
    names = [{line.get_label() for line in figure.axes[0].lines} for figure in drawn]
    assert "selected rule" in names[0]
    assert "selected rule, mean over n" in names[1]
    assert [picture.title for picture in figures.pictures] == ["Layer 0, head 1", "Layer 1, head 0"]


def test_without_inputs_there_is_no_section(fitted):
    fit, scores = fitted
    assert list(temperatures_section(fit, [])) == list(temperatures_section(fit, None)) == []
    one = row_scoring.solved_heads(fit, None, scores)[:1]
    _, text, figures = temperatures_section(fit, one)
    assert "held-out gain" in text.text
    assert len(figures.pictures) == 1
