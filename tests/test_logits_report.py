"""evaluate and report with --logits: what they print, what they refuse, and the page."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference
from commands import call, refusal
from matplotlib.figure import Figure
from test_report import Text, browser, check_in_a_browser
from test_score_logits import FITS, LINES, planted

import calibrate
from calibrate.core.rule import RuleForm
from calibrate.errors import CalibrateError
from calibrate.evidence.metrics import LOG_P
from calibrate.report import plots
from calibrate.report.page import write_fit_page
from calibrate.report.rule_text import beta_range
from calibrate.report.score_tables import NEW_INPUTS_NOTE
from calibrate.report.scores_record import ScoresRecord
from calibrate.rows.logits_files import Arrays
from calibrate.rows.score import score_logits
from calibrate.store.fit import Fit
from calibrate.store.saving import save_to_store


def publish_fits(folder, **source):
    """Two heads have a line, and the third none; and one entry for all heads alike."""
    for name, fit in (("lines", FITS["lines"]), ("alike", FITS["all alike"])):
        save_to_store(replace(fit, name=name, source=source), folder / "fits")


@pytest.fixture
def logged(here):
    np.savez(here / "held-out.npz", **planted())
    publish_fits(here)
    return here


def test_evaluate_prints_tables_by_size_and_by_head(logged):
    out = call("evaluate", "--logits", "held-out.npz", "lines", "alike").stdout
    fits = {"lines@1": FITS["lines"], "alike@1": FITS["all alike"]}
    scores = score_logits(Arrays.read(Path("held-out.npz")), fits)
    assert re.search(r"scored +360 inputs of 3 heads\n", out)
    assert "…" not in out  # no cell is cut
    lines = [line.split("  ") for line in out.splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    gains = [scores.gain(f"{name}@1", LOG_P).shown("+.3f") for name in ("lines", "alike")]
    assert any(row[:3] == ["all", *gains] for row in rows)
    first, *_ = (row for row in rows if row and row[0].startswith("layer "))
    parts = {head: part.gain("lines@1", LOG_P).mean for head, part in scores.by("head").items()}
    del parts[0, 3]  # it has no rule
    layer, head = max(parts, key=parts.get)
    assert first[0] == f"layer {layer}, head {head}"
    assert any(row[:1] == ["layer 0, head 3"] and row[3] == "unchanged" for row in rows)
    assert "`calibrate model evaluate`" in out


def test_rows_of_several_lengths_that_share_a_size_have_a_range():
    scores = score_logits(Arrays.in_memory("rows", planted()), {})
    table, *_ = ScoresRecord(scores).tables()
    assert [row[0] for row in table.rows] == ["12-16", "43-48", "all"]
    ax = plots.plot_scores(Figure().add_subplot(), scores, LOG_P)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["12-16", "43-48"]
    whole = {name: x for name, x in planted().items() if name != "mask"}
    alike = score_logits(Arrays.in_memory("rows", whole), {})
    assert [row[0] for row in ScoresRecord(alike).tables()[0].rows] == ["48"]


def test_rows_without_weight_are_left_out_and_said_to_be():
    columns = planted()
    columns["logits"][5] = np.nan
    columns["weight"] = (np.arange(360) % 4 > 0).astype(float)
    scores = score_logits(Arrays.in_memory("rows", columns), {})
    found = ScoresRecord(scores).scored_items()
    assert re.findall(r"\d+ [a-z]+", found) == ["269 inputs", "3 heads", "1 nan", "90 without"]


def test_a_fit_that_is_named_twice_is_scored_once(logged):
    twice = call("evaluate", "--logits", "held-out.npz", "lines", "lines@1", "alike", "--json")
    assert list(json.loads(twice.stdout)["rules"]) == ["baseline", "lines@1", "alike@1", "paper"]


def test_without_fits_the_paper_is_scored(logged):
    out = call("evaluate", "--logits", "held-out.npz").stdout
    assert "published polynomial" in out
    assert "significantly better" not in out


def test_rows_of_the_fit_itself_are_no_evidence(logged):
    publish_fits(logged, fingerprint=Arrays.read(logged / "held-out.npz").fingerprint)
    done = call("evaluate", "--logits", "held-out.npz", "lines")
    (warned,) = (line for line in done.stderr.splitlines() if "warning" in line)
    assert "lines@2 " in warned
    assert "360 inputs" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("evaluate lines", 1, "lines@1"),
        ("report lines --out r.html", 1, "--logits"),
        ("report lines --logits held-out.npz --out r.html --sets 9", 2, "--sets"),
    ],
)
def test_a_fit_per_head_needs_logits(logged, arguments, code, message):
    assert message in refusal(*arguments.split(), code=code)
    assert not (logged / "r.html").exists()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page on a fit per head."""
    folder = tmp_path_factory.mktemp("page")
    np.savez(folder / "held-out.npz", **planted())
    publish_fits(folder, head="<script>alert(1)</script>")
    path = folder / "report.html"
    call("report", folder / "fits/lines/1.json", "--logits", folder / "held-out.npz", "--out", path)
    return path


def test_the_page_of_many_heads(page, tmp_path):
    text = Text(page.read_text(encoding="utf-8"))
    words = " ".join(text.words)
    assert NEW_INPUTS_NOTE not in words
    for part in (
        "softmax, scored on held-out", "lines@1", "layer 0, head 3",
        "transformers.apply(model, fit)",
        "# logits: (..., heads, queries, items)",
        "0.5 log n + 0.2", "<script>alert(1)</script>",
        "360 inputs of 3 heads",
    ):  # fmt: skip
        assert part in words, part
    assert text.tags.count("img") == text.tags.count("figcaption")
    assert "script" not in text.tags
    assert all(address.startswith(("data:", "#")) for address in text.addresses)
    again = tmp_path / "again.html"
    fit, logits = page.parent / "fits/lines/1.json", page.parent / "held-out.npz"
    said = call("report", fit, "--logits", logits, "--out", again, "--json").stdout
    assert json.loads(said)["report"] == str(again)
    assert again.read_bytes() == page.read_bytes()


def test_the_page_of_heads_by_entropy_and_size(logged):
    save_to_store(FITS["both"], logged / "fits")
    said = call("report", "both", "--logits", "held-out.npz", "--out", "r.html").stdout
    assert "both@1" in said
    text = Text(Path("r.html").read_text(encoding="utf-8"))
    words = " ".join(text.words)
    fit = FITS["both"]
    for entry in fit.entries:
        n = np.repeat(np.geomspace(*np.exp(entry.domain[2:]), 40), 40)
        lo, hi = entry.domain[0], np.minimum(entry.domain[1], np.log(n))
        H = lo + np.tile(np.linspace(0, 1, 40), 40) * (hi - lo)
        beta = reference.inverse_temperature(H, entry.coefficients, entry.domain, fit.rule, n)
        least, most = beta_range(fit, entry)
        assert (least, most) == pytest.approx((beta.min(), beta.max()), abs=0.02)
        assert f"{least:.2f} to {most:.2f}" in words


@pytest.mark.slow
def test_undefined_values_are_not_printed_as_nan(logged):
    """A row alone; heads and sizes none of whose rows has any weight are left out."""
    columns = planted()
    np.savez("row.npz", **{name: x[:1] for name, x in columns.items()})
    weight = (columns["head"] != 0).astype(float)
    np.savez("head.npz", **columns, weight=weight)
    sizes = {name: x for name, x in columns.items() if name not in ("layer", "head")}
    np.savez("size.npz", **sizes, weight=(columns["mask"].sum(axis=1) > 16).astype(float))
    first = Fit(RuleForm.log_size(), LINES[:1], name="first")
    save_to_store(first, logged / "fits")
    with pytest.raises(CalibrateError, match=r"first@1 .*\b2 heads"):
        score_logits(Arrays.read(Path("head.npz")), {"first@1": first})
    for fit, logits in (("alike", "row"), ("lines", "head"), ("alike", "size")):
        said = call("report", fit, "--logits", f"{logits}.npz", "--out", "r.html").stdout
        words = " ".join(Text(Path("r.html").read_text(encoding="utf-8")).words)
        assert not re.search(r"[-+±( ]nan\b", said + words)


@pytest.mark.skipif(sys.platform == "darwin", reason="its names of files are UTF-8")
def test_the_name_of_a_file_need_not_be_utf8(logged):
    name = os.fsdecode(b"\xff<b>&.npz")
    os.rename("held-out.npz", name)
    fit = calibrate.load("alike")
    scores = score_logits(Arrays.read(Path(name)), {"alike@1": fit})
    write_fit_page(Path("r.html"), fit, ScoresRecord(scores, ("alike@1",)))
    assert r"scored on \udcff<b>&" in " ".join(
        Text(Path("r.html").read_text(encoding="utf-8")).words
    )


@browser
@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_in_a_browser(page, width, scheme):
    check_in_a_browser(page, width, scheme)
