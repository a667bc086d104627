"""The report: what it says, and how it behaves in a real browser."""

import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from conftest import ToyHead
from test_cli import call, refusal
from test_comparison import make_score

import calibrate
from calibrate.evaluation.comparison import compare
from calibrate.files.coefficient_file import dumps
from calibrate.report.head_page import write_head_page
from calibrate.report.verdict import beside_rivals, verdict

SIZES = ["--sizes", "16,256,1024", "--sets", "128"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report on the shipped fit."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    call("report", "max-retrieval", "--out", path, *SIZES)
    return path


class Text(HTMLParser):
    """Tags, addresses, and the words of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.addresses, self.words = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_data(self, data):
        self.words += data.split()


def test_the_page_holds_what_it_must(page):
    text = Text(page.read_text(encoding="utf-8"))
    words = " ".join(text.words)
    fit = calibrate.load("max-retrieval")
    for part in (
        "max-retrieval@1",
        "max-retrieval-0",
        'calibrate.load("max-retrieval@1")',
        "0.6472 to 5.022 nats; H is clamped to it",
        "not misranked",
        fit.source["collection"],
        fit.provenance["created"],
        "Of its rivals,",
        "Left out are “the paper's procedure” and “polynomial, fitted” and “kappa log n + b,",
        "best constant in hindsight",
    ):
        assert part in words, part
    assert text.tags.count("img") == text.tags.count("figcaption") == 8
    assert "script" not in text.tags
    assert all(address.startswith("data:") for address in text.addresses)


def test_the_same_fit_gives_the_same_page(page, tmp_path):
    call("report", "max-retrieval", "--out", tmp_path / "again.html", *SIZES)
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()


def test_a_hostile_name_stays_text(tmp_path, toy_head):
    fit = replace(calibrate.load("max-retrieval"), name="<script>alert(1)</script>", source={})
    fit = replace(fit, path=tmp_path / "f.json")
    rules = {"plain": 0.5, "paper": 0.6, "own": 0.7, "hindsight": 0.8}
    comparison = compare("toy", [make_score(16, rules), make_score(64, rules)])
    write_head_page(tmp_path / "r.html", fit, toy_head, comparison, 0)
    text = Text((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "script" not in text.tags
    assert "<script>alert(1)</script>@1" in text.words


def test_a_collection_is_reported_by_the_fit_that_was_made_of_it(here):
    call("collect", "--sizes", "256,1024", "--sets", "512", "--out", "runs/a")
    assert "runs/a has no published fit; make one with" in refusal(
        "report", "runs/a", "--out", "a.html"
    )
    call("fit", "runs/a", "--name", "mine", "--objective", "theta")
    output = call("report", "runs/a", "--out", "a.html", "--sizes", "256", "--sets", "64").stdout
    assert "mine@1 is" in " ".join(output.split())
    words = " ".join(Text((here / "a.html").read_text(encoding="utf-8")).words)
    assert "one constant, fitted" in words  # its rivals, fitted to the same rows


def test_a_log_size_fit_has_a_page_in_words_of_its_own(here, by_size):
    fit = replace(by_size, path=here / "f.json", quality={"residuals": {"beta_r_squared": 0.25}})
    rules = {"plain": 0.5, "paper": 0.6, "own": 0.7, "hindsight": 0.8}
    comparison = compare("toy", [make_score(16, rules), make_score(2048, rules)])
    write_head_page(here / "r.html", fit, ToyHead(noise=3.0), comparison, 0)
    text = Text((here / "r.html").read_text(encoding="utf-8"))
    words = " ".join(text.words)
    for part in (
        "beta(n) = 0.5 log n + 0.6",
        "Fitted on sets of 16 to 1,024 items; the line goes on outside. 1 <= beta <= 64 at every",
        "50 % of the sets are of sizes that the fit was made of, 16 to 1,024 items",
        "set size explains 25 % of the variance",
    ):
        assert part in words, part
    assert "clamped" not in words
    assert text.tags.count("img") == 8


def test_a_head_that_misranks_nothing_has_a_page_too(here):
    call("report", "max-retrieval", "--out", "r.html", "--sizes", "2", "--sets", "32")
    text = Text((here / "r.html").read_text(encoding="utf-8"))
    assert text.tags.count("img") == 7  # all but the polynomial among misranked sets


def test_a_fit_that_says_little_of_its_rows_has_a_page_too(here, toy_head, make_fit):
    fit = replace(make_fit(), quality={"rows": {"rows": 5}}, path=here / "f.json")
    rules = {"plain": 0.5, "paper": 0.6, "own": 0.7, "hindsight": 0.8}
    comparison = compare("toy", [make_score(16, rules), make_score(64, rules)])
    write_head_page(here / "r.html", fit, toy_head, comparison, 0)
    assert "does not say which sets were left out" in (here / "r.html").read_text(encoding="utf-8")


def test_a_head_that_never_lets_go_has_a_page_too(here, make_fit):
    def sharpen(logits):
        logits *= 1e5

    fit = replace(make_fit(), path=here / "f.json")
    rules = {"plain": 0.5, "paper": 0.6, "own": 0.7, "hindsight": 0.8}
    comparison = compare("toy", [make_score(16, rules), make_score(64, rules)])
    write_head_page(here / "r.html", fit, ToyHead(noise=0.0, spoil=sharpen), comparison, 0)
    words = " ".join(Text((here / "r.html").read_text(encoding="utf-8")).words)
    assert "at no size plain softmax gives the target less than half of its attention" in words
    assert "estimated from sets of 64 items: nowhere." in words
    assert "inf" not in words.split()


def test_a_masked_head_has_a_page_too(here, make_fit):
    def mask(logits):
        logits[:, logits.shape[1] // 2 :] = -np.inf

    fit = replace(make_fit(), path=here / "f.json")
    rules = {"plain": 0.5, "paper": 0.6, "own": 0.7, "hindsight": 0.8}
    comparison = compare("toy", [make_score(16, rules), make_score(64, rules)])
    write_head_page(here / "r.html", fit, ToyHead(spoil=mask), comparison, 0)
    assert (here / "r.html").exists()


def test_a_file_names_no_path_of_this_machine(here):
    os.mkfifo("pipe.npz")
    fit = replace(calibrate.load("max-retrieval"), name="f", path=None)
    write = replace(fit, source=dict(fit.source) | {"head": "pipe.npz"})
    Path("f.json").write_text(dumps(write), encoding="utf-8")
    said = refusal("report", "./f.json", "--out", "r.html")
    assert "made for head 'pipe.npz', which does not come with the package; give its" in said


def test_a_yanked_fit_is_not_reported(here):
    call("collect", "--sizes", "256,1024", "--sets", "512", "--out", "runs/a")
    call("fit", "runs/a", "--name", "mine")
    call("fits", "yank", "mine@1")
    assert "has no published fit; make one" in refusal("report", "runs/a", "--out", "a.html")


def test_run_says_its_results_though_the_page_cannot_be_written(here):
    (here / "fits/mine/1.html").mkdir(parents=True)
    said = call("run", "--sizes", "256,1024", "--sets", "256", "--name", "mine")
    assert "the report is not written: cannot write" in said.stderr
    assert "calibrate.load(" in said.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["max-retrieval", "--out", "."], 2, "'.' is not an .html file"),
        (["max-retrieval", "--out", "folder.html"], 1, "cannot write folder.html"),
        (["runs/none", "--out", "r.html"], 1, "runs/none is not a collection"),
        (["max-retrieval", "--out", "r.pdf"], 2, "'r.pdf' is not an .html file"),
        (["nope", "--out", "r.html"], 1, "nope"),
        (["paper", "--out", "r.html"], 1, "names no head; name the one to score: --head"),
        (["max-retrieval", "--head", "max-retrieval-3", "--out", "r.html"], 1, "was made for"),
    ],
)
def test_refusals(here, arguments, code, message):
    (here / "folder.html").mkdir()
    (here / "runs/none").mkdir(parents=True)
    assert message in refusal("report", *arguments, code=code)
    assert not (here / "r.html").exists()


browser = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium on this machine")


@browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(page, width, scheme):
    check_in_a_browser(page, width, scheme)


def check_in_a_browser(page, width, scheme):
    """It loads nothing, says nothing, and keeps to the window."""
    with Browser() as window:
        events = window.open(page.as_uri(), width, prefers_color_scheme=scheme)
        said = [e for e in events if e["method"] in (
            "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")]  # fmt: skip
        assert said == []
        asked = [e["params"]["request"]["url"] for e in events
                 if e["method"] == "Network.requestWillBeSent"]  # fmt: skip
        assert {re.split("[:]", url)[0] for url in asked} <= {"file", "data"}
        assert asked.count(page.as_uri()) == 1
        assert window.evaluate("innerWidth") == width
        assert window.evaluate("document.documentElement.scrollWidth") <= width
        # What is wider than the page lies in a box that scrolls.
        too_wide = """[...document.querySelectorAll('body *')].filter(e =>
            !e.closest('.scroll, pre') && e.getBoundingClientRect().right > innerWidth + 0.5
        ).map(e => e.outerHTML.slice(0, 80))"""
        assert window.evaluate(too_wide) == []
        assert window.evaluate("[...document.images].every(i => i.naturalWidth > 500)")
        ground = window.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


def test_verdict_names_gains_losses_rivals_and_what_makes_no_difference():
    shares = {
        16: (0.9, 0.9, 0.9, 0.9, 0.9),
        64: (0.5, 0.6, 0.7, 0.7, 0.7),
        256: (0.5, 0.6, 0.8, 0.8, 0.7),
        1024: (0.5, 0.5, 0.4, 0.4, 0.4),
    }
    rules = ("plain", "paper", "own", "constant", "hard")
    scores = [make_score(n, dict(zip(rules, x, strict=True))) for n, x in shares.items()]
    found = compare("toy", scores)
    assert verdict(found, "mine@2") == (
        "mine@2 is right more often than plain softmax at n = 64 to 256, most at n = 256 (50.0 % "
        "to 80.0 %); it is right less often at n = 1,024, by up to 10.0 points; it makes no "
        "measurable difference at n = 16."
    )
    assert beside_rivals(found) == (
        "Of its rivals, better: the paper's numbers (n = 1,024); worse: the paper's numbers "
        "(n = 64 to 256) and hard attention (n = 256); not measurably different: one constant, "
        "fitted."
    )


def test_verdict_without_any_difference():
    same = {"plain": 0.5, "paper": 0.5, "own": 0.5}
    found = compare("toy", [make_score(16, same), make_score(64, same)])
    assert verdict(found, "mine@1") == (
        "mine@1 is nowhere measurably better than plain softmax on 2,000 sets of a size."
    )
    assert beside_rivals(found) == ("Of its rivals, not measurably different: the paper's numbers.")
    assert np.isnan(compare("toy", [make_score(16, same)]).p_plain).all()
