"""The report: what it says, and how it behaves in a real browser."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from test_cli import call, refusal
from test_compare import make_score

import calibrate
from calibrate.faces.report import write_report
from calibrate.faces.verdict import verdict
from calibrate.pipeline.compare import compare

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
        "0.647 to 5.022 nats",
        "not misranked",
        fit.source["collection"],
        fit.provenance["created"],
        "beside the paper's numbers",
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
    comparison = compare(["toy"], [[make_score(16, rules), make_score(64, rules)]])
    write_report(tmp_path / "r.html", fit, toy_head, comparison, 0)
    text = Text((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "script" not in text.tags
    assert "<script>alert(1)</script>@1" in text.words


def test_a_collection_is_reported_by_the_fit_that_was_made_of_it(here):
    call("collect", "--sizes", "256,1024", "--sets", "512", "--out", "runs/a")
    assert "no published fit is of the collection runs/a" in refusal(
        "report", "runs/a", "--out", "a.html"
    )
    call("fit", "runs/a", "--name", "mine", "--objective", "theta")
    said = call("report", "runs/a", "--out", "a.html", "--sizes", "256", "--sets", "64").stdout
    assert "mine@1 is" in " ".join(said.split())
    words = " ".join(Text((here / "a.html").read_text(encoding="utf-8")).words)
    assert "one constant, fitted" in words  # its rivals, fitted to the same rows


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["max-retrieval", "--out", "r.pdf"], 2, "'r.pdf' is no .html file"),
        (["nope", "--out", "r.html"], 1, "nope"),
        (["paper", "--out", "r.html"], 1, "names no head; say which to score: --head"),
        (["max-retrieval", "--head", "max-retrieval-3", "--out", "r.html"], 1, "was made for"),
    ],
)
def test_refusals(here, arguments, code, message):
    assert message in refusal("report", *arguments, code=code)
    assert not (here / "r.html").exists()


browser = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium on this machine")


@browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(page, width, scheme):
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


def test_verdict_names_gains_losses_and_what_makes_no_difference():
    scores = [
        make_score(16, {"plain": 0.9, "paper": 0.9, "own": 0.9}),
        make_score(64, {"plain": 0.5, "paper": 0.6, "own": 0.7}),
        make_score(256, {"plain": 0.5, "paper": 0.6, "own": 0.8}),
        make_score(1024, {"plain": 0.5, "paper": 0.5, "own": 0.4}),
    ]
    said = verdict(compare(["toy"], [scores]), "mine@2")
    assert said == (
        "mine@2 is right more often than plain softmax at n = 64 to 256, most at n = 256 (50.0 % "
        "to 80.0 %); it is right less often at n = 1,024, by up to 10.0 points; it makes no "
        "measurable difference at n = 16; beside the paper's numbers it is better than them at "
        "n = 64 to 256, worse than them at n = 1,024 and level elsewhere."
    )


def test_verdict_without_any_difference():
    same = {"plain": 0.5, "paper": 0.5, "own": 0.5}
    said = verdict(compare(["toy"], [[make_score(16, same), make_score(64, same)]]), "mine@1")
    assert said == (
        "mine@1 is nowhere measurably better than plain softmax; beside the paper's numbers it is "
        "level at every size."
    )
    assert np.isnan(compare(["toy"], [[make_score(16, same)]]).p_plain).all()
