"""evaluate and report with --logits: what they print, what they refuse, and the page."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from calibrate.report.fit_verdict import verdict_on_logits
from calibrate.report.logits_page import write_logits_page
from calibrate.report.logits_record import LogitsRecord
from calibrate.rows.moments import Moments
from matplotlib.figure import Figure
from test_cli import call, refusal
from test_report import Text, browser, check_in_a_browser
from test_score_logits import FITS, HEADS, LINES, planted

import calibrate
from calibrate.evidence.baselines import one_constant
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.files.publishing import publish
from calibrate.maths import reference
from calibrate.maths.rule import Rule
from calibrate.report import fit_plots, score_plots
from calibrate.report.blocks import WIDEST, Table, as_json
from calibrate.report.rule_curves import beta_range
from calibrate.report.terminal import print_block, show
from calibrate.rows.logits_files import Arrays, InMemory
from calibrate.rows.score_logits import LogitScores, score_logits


def publish_fits(folder, **source):
    """Two heads have a line, and the third none; and one entry for all heads alike."""
    for name, fit in (("lines", FITS["lines"]), ("alike", FITS["all alike"])):
        publish(replace(fit, name=name, source=source), folder / "fits")


@pytest.fixture
def logged(here):
    np.savez(here / "held-out.npz", **planted())
    publish_fits(here)
    return here


def table_of(text, title):
    """The lines of a table, each cut at two spaces or more."""
    lines = text.split(title)[1].splitlines()[1:]
    body = [line.strip() for line in lines if line.strip() and "─" not in line]
    return [[cell for cell in line.split("  ") if cell] for line in body]


def test_evaluate_prints_tables_by_size_and_by_head(logged):
    out = call("evaluate", "--logits", "held-out.npz", "--fits", "lines,alike").stdout
    scores = score_logits(
        Arrays(Path("held-out.npz")), {"lines@1": FITS["lines"], "alike@1": FITS["all alike"]}
    )
    assert "scored     360 rows of 3 heads; left out: none" in out
    headings, *rows = table_of(out, "Mean log-probability of the target, nats")
    assert [cell.strip() for cell in headings] == [
        "n", "rows", "plain softmax", "the paper's", "gain", "lines@1", "gain",
    ]  # fmt: skip
    mean, error = scores.estimate(size=0).of(2, "log_p_gain")
    assert rows[0][0].strip() == "16"
    assert rows[0][6].strip() == f"{mean:+.4f} ± {error:.4f}"
    mean, error = scores.estimate().of(3, "p")
    _, last = (  # of both parts
        row for row in table_of(out, "Mean probability of the target, %") if row[0] == "all"
    )
    assert last[3].strip() == f"{100 * mean:.1f} ± {100 * error:.1f}"
    heads = table_of(out, "By head, the largest gain of lines@1 first")[1:4]
    gains = {i: scores.estimate(head=i).of(2, "log_p_gain")[0] for i in (0, 2)}
    best = scores.head_label(max(gains, key=gains.__getitem__))
    assert heads[0][0].strip() == best
    assert [heads[2][0].strip(), heads[2][4].strip()] == ["layer 0, head 3", "unchanged"]
    assert "of the 2 heads that it has a rule for," in out
    assert "; 1 head is unchanged." in out


def test_a_wide_table_is_printed_in_parts_with_its_keys(capsys):
    """Of 8 + 4 * 24 letters three pairs fit."""
    pairs = [name for i in range(4) for name in (f"rule {i}", "gain")]
    row = ["16", "1,024", *(f"{i} ± 0.1".rjust(10) for i in range(8))]
    table = Table(
        ["n", "rows", *pairs], [row], "Title", "note", bold={(0, 0), (0, 3), (0, 9)}, keys=2,
        together=2,
    )  # fmt: skip
    one, two = table.split()
    assert [*one.columns, *two.columns[2:]] == list(table.columns)
    assert [*one.rows[0], *two.rows[0][2:]] == row
    assert list(two.columns) == ["n", "rows", "rule 3", "gain"]
    assert (one.bold, two.bold) == ({(0, 0), (0, 3)}, {(0, 0), (0, 3)})
    assert (one.title, one.note, two.title, two.note) == ("Title", "", "", "note")
    print_block(table)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDEST
    first, second = (line.split() for line in lines if line.split()[:2] == ["n", "rows"])
    assert ("0" in first, "3" in first, "3" in second) == (True, False, True)
    alone = Table(["a", "b"], [["x" * 150, "y"]])
    assert [part.columns for part in alone.split()] == [["a", "b"]]


def test_progress_counts_bad_rows_and_the_tables_do_not(logged):
    columns = planted()
    columns["logits"][0] = np.nan
    np.savez("spoilt.npz", **columns)
    done = call("evaluate", "--logits", "spoilt.npz")
    said = [line.split("  ")[-1] for line in done.stderr.splitlines() if "n = " in line]
    assert sum(int(words.removesuffix(" rows")) for words in said) == 360
    assert "scored     359 rows of 3 heads; left out: 1 nan" in done.stdout


def test_json_has_every_head_at_every_size(logged):
    record = json.loads(
        call("evaluate", "--logits", "held-out.npz", "--fits", "lines", "--json").stdout
    )
    scores = score_logits(Arrays(Path("held-out.npz")), {"lines@1": FITS["lines"]})
    assert record == as_json(LogitsRecord(scores))
    assert [rule["heads"] for rule in record["rules"]] == [0, 3, 2]
    ranked = [scores.heads[i] for i in scores.ranked(2)]
    assert ranked != scores.heads
    assert [(x["layer"], x["head"]) for x in record["heads"]] == ranked
    (head,) = (x for x in record["heads"] if (x["layer"], x["head"]) == (2, 1))
    for i, size in enumerate(head["sizes"]):
        assert size["size"] == scores.sizes[i]
        found = size["rules"]["lines@1"]["log_p_gain"]
        assert (found["mean"], found["error"]) == scores.estimate(i, 2).of(2, "log_p_gain")


VERDICT = (
    "own makes the target {} probable: on the 2,000 rows of toy, which it was not made of, the "
    "target's log-probability {} nats (mean probability 20.0 % to 30.0 %); {}."
)


def test_rows_without_weight_are_left_out_and_said_to_be():
    columns = planted()
    columns["logits"][5] = np.nan
    columns["weight"] = (np.arange(360) % 4 > 0).astype(float)
    scores = score_logits(Arrays("rows", [InMemory.of(columns)]), {})
    assert LogitsRecord(scores).scored_rows() == (
        "269 rows of 3 heads; left out: 1 nan, 90 without weight"
    )


@pytest.mark.parametrize(
    ("gains", "named", "more", "moves", "heads"),
    [
        ((0.5, 0.3), 2, "more", "rises by 0.4000 ± 0.0032",
         "of the 2 heads that it has a rule for, 2 gain measurably, 0 lose, and 0 do neither"),
        ((-0.5, 0.0), 2, "less", "falls by 0.2500 ± 0.0060",
         "of the 2 heads that it has a rule for, 0 gain measurably, 1 loses, and 1 does neither"),
        ((0.5, 0.3), 1, "more", "rises by 0.4000 ± 0.0032",
         "the only head that it has a rule for gains measurably; 1 head is unchanged"),
        ((-0.5, 0.0), 1, "less", "falls by 0.2500 ± 0.0060",
         "the only head that it has a rule for loses measurably; 1 head is unchanged"),
    ],
)  # fmt: skip
def test_the_verdict_counts_heads(gains, named, more, moves, heads):
    plain, own = [-2.0, 0.2, 0.0, 0.0], [[-2.0 + gain, 0.3, gain, 0.1] for gain in gains]
    mean = np.array([[plain, plain, of_head] for of_head in own])
    rows = np.array([1_000, 1_000])
    cells = Moments(rows, rows, rows, mean, mean, np.full(mean.shape, 10.0))
    identity = calibrate.identity()
    own = identity if named == 2 else replace(identity, entries=(Entry((0.0,) * 5, (0, 1), 0, 0),))
    scores = LogitScores(
        "toy", "sha256:toy", ["plain", "paper", "own"], [identity, identity, own],
        [(0, 0), (0, 1)], [64], [cells], [],
    )  # fmt: skip
    assert verdict_on_logits(scores, 2) == VERDICT.format(more, moves, heads)


@pytest.mark.slow
def test_the_page_says_how_rows_are_weighted(logged):
    columns = {name: x for name, x in planted().items() if name not in ("layer", "head", "mask")}
    np.savez("alike.npz", **columns)
    np.savez("weighed.npz", **columns, weight=1 + np.arange(360.0))
    for name, how in (("alike", "have equal weight."), ("weighed", "are weighted.")):
        call("report", "alike", "--logits", f"{name}.npz", "--out", "r.html")
        words = " ".join(Text(Path("r.html").read_text(encoding="utf-8")).words)
        assert f"Rows of one size {how} Mean" in words  # one size: no line of all
    assert "360 rows of 1 head, weighted; left out" in words
    call("report", "alike", "--logits", "held-out.npz", "--out", "r.html")
    words = " ".join(Text(Path("r.html").read_text(encoding="utf-8")).words)
    assert (
        "have equal weight; sizes too, or less weight where they have fewer than 100 rows." in words
    )


def test_a_fit_that_is_named_twice_is_scored_once(logged):
    twice = call("evaluate", "--logits", "held-out.npz", "--fits", "lines,lines@1,alike", "--json")
    rules = [rule["rule"] for rule in json.loads(twice.stdout)["rules"]]
    assert rules == ["plain", "paper", "lines@1", "alike@1"]


def test_without_fits_the_paper_is_scored(logged):
    out = call("evaluate", "--logits", "held-out.npz").stdout
    assert "By head, the largest gain of the paper's numbers first" in out
    assert "verdict" not in out


def test_many_heads_are_cut_short(here, capsys):
    columns = planted(rows=10, heads=tuple((i, 0) for i in range(23)))
    np.savez(here / "many.npz", **columns)
    show(LogitsRecord(score_logits(Arrays(here / "many.npz"), {"alike": FITS["all alike"]})))
    assert "and 3 more (`calibrate evaluate --json` lists them all)" in capsys.readouterr().out


def test_rows_of_the_fit_itself_are_no_evidence(logged):
    publish_fits(logged, fingerprint=Arrays(logged / "held-out.npz").fingerprint)
    done = call("evaluate", "--logits", "held-out.npz", "--fits", "lines")
    (warned,) = (line for line in done.stderr.splitlines() if "warning" in line)
    assert "lines@2 was made of these very rows (held-out): they are not held out" in warned
    assert "rows of held-out, the very rows it was made of, the target's log-prob" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["evaluate", "--logits", "held-out.npz", "--sizes", "16"], 2, "be used with --logits"),
        (["evaluate", "--logits", "held-out.npz", "--head", "x"], 2, "be used with --logits"),
        (["evaluate", "--logits", "held-out.npz", "--sets", "9"], 2, "--sets cannot be used with"),
        (["evaluate", "--logits", "held-out.npz", "--csv"], 2, "used with --json or --logits"),
        (["evaluate", "--logits", "none.npz"], 1, "none.npz does not exist"),
        (["evaluate", "--logits", "held-out.npz", "--fits", "nope"], 1, "nope"),
        (["evaluate", "--fits", "lines"], 1, "score each head on logits on disk: --logits FILE"),
        (["report", "lines", "--out", "r.html"], 1, "on logits on disk: --logits FILE.npz"),
        (["report", "lines", "--logits", "held-out.npz", "--out", "r.pdf"], 2, "is not an .html"),
        (["report", "lines", "--logits", "held-out.npz", "--out", "r.html", "--sets", "9"], 2,
         "--sets cannot be used with --logits"),
        (["report", "lines", "--logits", "none.npz", "--out", "r.html"], 1, "none.npz does not"),
    ],
)  # fmt: skip
def test_refusals(logged, arguments, code, message):
    assert message in refusal(*arguments, code=code)
    assert not (logged / "r.html").exists()


def test_a_fit_of_arrays_is_referred_to_logits(logged):
    publish_fits(logged, head="example")
    said = refusal("report", "alike", "--out", "r.html")
    assert "made for head 'example'" in said
    assert "with --logits FILE.npz" in said


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
    for part in (
        "softmax for 2 heads, scored on the logits of held-out",
        "lines@1 makes", "1 of 3 heads gains measurably, 0 lose", "set_attn_implementation",
        "logits being (..., heads, queries, items), of one layer in JAX and PyTorch",
        "beta(n) = kappa log n + b, with coefficients of its own for each head", "0.5 log n + 0.2",
        "By head", "<script>alert(1)</script>", "360 rows of 3 heads; left out: none",
    ):  # fmt: skip
        assert part in words, part
    assert text.tags.count("img") == text.tags.count("figcaption") == 4
    assert "script" not in text.tags
    assert all(address.startswith("data:") for address in text.addresses)
    again = tmp_path / "again.html"
    fit, logits = page.parent / "fits/lines/1.json", page.parent / "held-out.npz"
    said = call("report", fit, "--logits", logits, "--out", again, "--json").stdout
    assert json.loads(said)["report"] == str(again)
    assert again.read_bytes() == page.read_bytes()


def test_the_page_of_heads_by_entropy_and_size(logged):
    publish(FITS["both"], logged / "fits")
    said = call("report", "both", "--logits", "held-out.npz", "--out", "r.html").stdout
    assert "both@1 makes" in said
    text = Text(Path("r.html").read_text(encoding="utf-8"))
    words = " ".join(text.words)
    for part in (
        "beta(H, n) = p(H) + (a H + b log n + c) log n, p of degree 4, with coefficients of its",
        "over the domain of each rule, for sets of 49 items, the largest that they were fitted on.",
        "beta(H, n), range",
    ):
        assert part in words, part
    fit = FITS["both"]
    for entry in fit.entries:
        x = [
            (h, n) for n in np.geomspace(*np.exp(entry.domain[2:]), 40)
            for h in np.linspace(entry.domain[0], min(entry.domain[1], np.log(n)), 40)
        ]  # fmt: skip
        H, n = np.array(x).T
        beta = reference.inverse_temperature(H, entry.coefficients, entry.domain, fit.rule, n)
        least, most = beta_range(fit, entry)
        assert least == pytest.approx(beta.min(), abs=0.02)
        assert most == pytest.approx(beta.max(), abs=0.02)
        assert f"{least:.2f} to {most:.2f}" in words


def test_the_page_of_one_head(logged):
    columns = {name: x for name, x in planted().items() if name not in ("layer", "head")}
    np.savez("one.npz", **columns)
    said = call("report", "alike", "--logits", "one.npz", "--out", "r.html").stdout
    assert "alike@1 makes" in said
    text = Text(Path("r.html").read_text(encoding="utf-8"))
    words = " ".join(text.words)
    assert "the largest gain" in words
    assert "beta(H) = 0.02 H^4 - 0.2 H^3 + 0.5 H^2 + 0.6 H + 0.4" in words
    assert "By head" not in words
    assert ".layer(i)" not in words
    assert text.tags.count("img") == 3  # no map


@pytest.mark.slow
def test_undefined_values_are_not_printed_as_nan(logged):
    """A row alone, and heads and sizes none of whose rows has any weight."""
    columns = planted()
    np.savez("row.npz", **{name: x[:1] for name, x in columns.items()})
    weight = (columns["head"] != 0).astype(float)
    np.savez("head.npz", **columns, weight=weight)
    sizes = {name: x for name, x in columns.items() if name not in ("layer", "head")}
    np.savez("size.npz", **sizes, weight=(columns["mask"].sum(axis=1) > 16).astype(float))
    first = Coefficients(Rule.log_size(), LINES[:1], name="first")
    publish(first, logged / "fits")
    for fit, logits in (("alike", "row"), ("lines", "head"), ("first", "head"), ("alike", "size")):
        said = call("report", fit, "--logits", f"{logits}.npz", "--out", "r.html").stdout
        words = " ".join(Text(Path("r.html").read_text(encoding="utf-8")).words)
        assert not re.search(r"[-+±( ]nan\b", said + words)
    assert "at n = 48, the largest gain" in words


def test_colours_reach_as_far_as_the_gains(logged):
    """Also beside a head that has none."""
    columns = planted()
    np.savez("head.npz", **columns, weight=(columns["head"] != 0).astype(float))
    scores = score_logits(Arrays(Path("head.npz")), {"lines": FITS["lines"]})
    gains = [scores.estimate(head=i).of(2, "log_p_gain")[0] for i in range(3)]
    assert np.isnan(gains[0])
    ax = score_plots.plot_gain_map(Figure().add_subplot(), scores, 2)
    assert ax.images[0].get_clim() == (-abs(gains[2]), abs(gains[2]))


@pytest.mark.skipif(sys.platform == "darwin", reason="its names of files are UTF-8")
def test_the_name_of_a_file_need_not_be_utf8(logged):
    name = os.fsdecode(b"\xff<b>&.npz")
    os.rename("held-out.npz", name)
    fit = calibrate.load("alike")
    write_logits_page(Path("r.html"), fit, score_logits(Arrays(Path(name)), {"alike@1": fit}))
    assert "logits of ?<b>&" in " ".join(Text(Path("r.html").read_text(encoding="utf-8")).words)


@pytest.mark.parametrize(
    ("whose", "said"),
    [
        ([(None, None)], "all heads"),
        ([(2, None)], "layer 2"),
        ([(2, 1)], "layer 2, head 1"),
        ([(0, None), (2, None)], "2 layers"),
        ([(0, 0), (0, 3), (2, 1)], "3 heads"),
        ([(0, None), (2, 1)], "2 heads and layers"),
    ],
)
def test_the_heads_of_a_fit(whose, said, logged):
    entries = tuple(Entry((0.0, 2.0), (2.0, 5.0), *of) for of in whose)
    publish(Coefficients(Rule.log_size(), entries, name="some"), logged / "fits")
    call("report", "some", "--logits", "held-out.npz", "--out", "r.html")
    words = " ".join(Text(Path("r.html").read_text(encoding="utf-8")).words)
    assert f"softmax for {said}, scored on" in words


def test_one_head_without_a_name_is_one_head(here):
    columns = planted(heads=HEADS[:1])
    del columns["layer"], columns["head"]
    np.savez("one.npz", **columns)
    publish_fits(here)
    call("report", "alike", "--logits", "one.npz", "--out", "r.html")
    words = " ".join(Text(Path("r.html").read_text(encoding="utf-8")).words)
    assert "softmax for one head, scored on" in words


@pytest.mark.parametrize(
    ("beta", "q", "behind"), [(2.0, 0.25, True), (2.0, 0, False), (1.6, 0.25, False)]
)
def test_a_fit_behind_another_rule_says_that_it_was_made_sharper(beta, q, behind):
    """The paper's numbers gain 0.044 nats on these rows, 2.0 gains 0.037, and 1.6 gains 0.085."""
    tried = [{"kind": "log-size", "q": q, "gain": 0.3 - 0.08 * q, "low": 0.1} for q in (0, 0.25)]
    fit = replace(one_constant(beta), quality={"candidates": tried, "q": q})
    scores = score_logits(Arrays("rows", [InMemory.of(planted())]), {"own": fit})
    sentence = (
        " In log p it is behind the paper's numbers: it was made sharper on purpose (q = 0.25), "
        "which keeps 93 % of the gain that q = 0 has (0.2800 of 0.3000 nats, held out from its own "
        "rows); fit with --q 0 (q=0 in Python) for that gain."
    )
    assert verdict_on_logits(scores, 2).endswith(sentence) == behind
    assert ("sharper" in verdict_on_logits(scores, 2)) == behind


@browser
@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_in_a_browser(page, width, scheme):
    check_in_a_browser(page, width, scheme)


@pytest.mark.parametrize(("n_heads", "told", "grey"), [(3, 3, 0), (10, 10, 0), (14, 5, 9)])
def test_curves_of_many_heads_are_told_apart_or_grey(n_heads, told, grey):
    """Each line that bears a name has a look of its own, also without colour."""
    entries = tuple(Entry((0.1 * i, 1.0), (2.0, 5.0), 0, i) for i in range(n_heads))
    ax = Figure().add_subplot()
    fit_plots.plot_betas(ax, Coefficients(Rule.log_size(), entries), entries)
    named = [line for line in ax.lines if line.get_label().startswith("layer 0, head")]
    assert len(named) == told
    assert len({(line.get_marker(), line.get_linestyle()) for line in named}) == told
    others = [line for line in ax.lines if line.get_label() == f"{grey} other heads"]
    assert bool(others) == bool(grey)
    np.testing.assert_allclose(named[0].get_xdata()[[0, -1]], np.exp([2.0, 5.0]))
    np.testing.assert_allclose(named[1].get_ydata()[-1], 0.1 * 5 + 1)
