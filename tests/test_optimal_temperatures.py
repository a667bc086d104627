"""The optimal temperatures of the heads that gain most, on the page on a fit per head."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import call
from matplotlib.backends.backend_agg import FigureCanvasAgg
from test_report import Text

import calibrate
from calibrate.cli import row_scoring
from calibrate.core.rule import RuleForm
from calibrate.report.page import temperatures_section
from calibrate.rows.collection import RowCollection, open_collection
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

HEADS = [(layer, head) for layer in range(2) for head in range(3)]
SCALES = (0.6, 0.2, 0.5, 0.3, 0.4, 1)  # of their logits


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
        call("fit", "runs/mine", "--name", "mine", "--kind", "constant")
    return folder


@pytest.fixture
def fitted(folder, monkeypatch):
    """The fit, and its collection."""
    monkeypatch.chdir(folder)
    return calibrate.load("mine"), open_collection(Path("runs/mine"), RowCollection)


def test_the_heads_are_those_of_the_largest_gain_and_their_rows_are_their_own(fitted):
    fit, collection = fitted
    heads = row_scoring.solve_inputs_of(fit, collection, most=4)
    assert len(heads) == 4
    assert [h.gain for h in heads] == sorted((h.gain for h in heads), reverse=True)
    gains = {(x["layer"], x["head"]): x["gain"] for x in fit.evidence["heads"]}
    assert {(h.layer, h.head): h.gain for h in heads}.items() <= gains.items()
    columns = lookups(0)
    for head in heads:
        own = (columns["layer"] == head.layer) & (columns["head"] == head.head)
        z, target = columns["logits"][own], columns["target"][own]
        z = np.where(columns["mask"][own], z, -np.inf)
        misranked = z.max(axis=1) > z[np.arange(len(z)), target]
        assert head.rows.misranked.sum() == misranked.sum()


def test_heads_without_misranked_inputs_or_without_a_rule_are_left_out(fitted):
    fit, collection = fitted
    named = {(e.layer, e.head) for e in fit.entries}
    heads = row_scoring.solve_inputs_of(fit, collection, most=9)
    assert {(h.layer, h.head) for h in heads} == named - {HEADS[-1]}
    assert all(head.rows.has_finite_optimum().any() for head in heads)


def test_the_page_has_a_picture_of_each(folder, fitted):
    call("report", "mine", "--logits", "held-out.npz", "--out", "r.html")
    words = " ".join(Text(Path("r.html").read_text(encoding="utf-8")).words)
    heads = row_scoring.solve_inputs_of(*fitted)
    captions = re.findall(r"Layer (\d), head (\d)\. The rule gains ([0-9.]+) nats", words)
    assert [(int(layer), int(head), float(gain)) for layer, head, gain in captions] == [
        (h.layer, h.head, round(h.gain, 3)) for h in heads
    ]


def test_each_head_is_under_its_own_rule(fitted, monkeypatch):
    """And a rule of n is said to be one, though another head has a constant."""
    drawn = []
    monkeypatch.setattr(
        FigureCanvasAgg, "print_png", lambda canvas, *_, **__: drawn.append(canvas.figure)
    )
    best = row_scoring.solve_inputs_of(*fitted)
    heads = [replace(head, layer=0, head=i) for i, head in enumerate(best[:2])]
    rules = (Entry((0.0, 3.0), (2.7, 4.2), 0, 0), Entry((0.5, 0.5), (2.7, 4.2), 0, 1))
    _, text, figures = temperatures_section(Fit(RuleForm.log_size(), rules), heads)
    lines = [{x.get_label(): x.get_ydata() for x in f.axes[0].lines} for f in drawn]
    assert set(lines[0]["this fit"]) == {3.0}
    assert "this fit, mean over n" in lines[1]
    assert "depends on n" in text.text
    assert [picture.title for picture in figures.pictures] == ["Layer 0, head 0", "Layer 0, head 1"]


def test_without_inputs_there_is_no_section(fitted):
    fit, _ = fitted
    assert list(temperatures_section(fit, [])) == []
