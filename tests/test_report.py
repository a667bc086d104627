"""The page on a fit: its text, its figures, and how it behaves in a real browser."""

import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from calibrate.report.comparison_record import ComparisonRecord
from calibrate.report.fit_verdict import WHY_HARD, compare_rivals, describe_fit, verdict
from calibrate.report.head_page import write_head_page
from calibrate.rows.comparison import compare
from conftest import ToyHead
from test_cli import call, refusal
from test_comparison import make_score

import calibrate
from calibrate.files.coefficient_file import dumps
from calibrate.report import head_page, plot_style

SIZES = ["--sizes", "64,256", "--sets", "128"]  # as in the other tests: compiled once
RULES = {"plain": 0.5, "paper": 0.6, "own": 0.7, "hindsight": 0.8}


@pytest.fixture(scope="module", autouse=True)
def few_examples():
    """Figures of 32 sets of each size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_page, "N_EXAMPLES", 32)
        yield


@pytest.fixture
def small_figures(monkeypatch):
    monkeypatch.setattr(plot_style, "DPI", 30)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report on the shipped fit."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    call("report", "max-retrieval@1", "--out", path, *SIZES)
    return path


def write_toy_page(fit, head, sizes=(16, 64)):
    """The page on a fit of a toy head, in ./r.html."""
    comparison = compare("toy", [make_score(n, RULES) for n in sizes])
    write_head_page(Path("r.html"), replace(fit, path=Path("f.json")), head, comparison, 0)
    return Text(Path("r.html").read_text(encoding="utf-8"))


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
    fit = calibrate.load("max-retrieval@1")
    for part in (
        "max-retrieval@1",
        "max-retrieval-0",
        'calibrate.load("max-retrieval@1")',
        "0.6472 to 5.022 nats; H is clamped to it",
        "not misranked",
        fit.source["collection"],
        fit.provenance["created"],
        "max-retrieval@1 is the polynomial, beta ",
        "Left out are “the paper's procedure”, “entropy and size, fitted”, “polynomial, fitted”,",
        "best constant in hindsight",
    ):
        assert part in words, part
    assert text.tags.count("img") == text.tags.count("figcaption") == 8
    assert "script" not in text.tags
    assert all(address.startswith("data:") for address in text.addresses)


@pytest.mark.slow
def test_the_same_fit_gives_the_same_page(page, tmp_path):
    call("report", "max-retrieval@1", "--out", tmp_path / "again.html", *SIZES)
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()


def test_a_hostile_name_stays_text(small_figures, toy_head, make_fit):
    fit = replace(make_fit(), name="<script>alert(1)</script>", quality={"rows": {"rows": 5}})
    text = write_toy_page(fit, toy_head)
    assert "script" not in text.tags
    assert "<script>alert(1)</script>@1" in text.words
    assert "does not say which sets were left out" in " ".join(text.words)


@pytest.mark.slow
def test_a_collection_is_reported_by_the_fit_that_was_made_of_it(here, small_figures):
    call("collect", "--sizes", "256,512", "--sets", "256", "--out", "runs/a")
    no_fit = "runs/a has no published fit; make one with"
    assert no_fit in refusal("report", "runs/a", "--out", "a.html")
    call("fit", "runs/a", "--name", "mine", "--force-polynomial")
    done = call("report", "runs/a", "--out", "a.html", "--sizes", "256", "--sets", "128")
    assert "mine@1 is" in " ".join(done.stdout.split())
    words = " ".join(Text((here / "a.html").read_text(encoding="utf-8")).words)
    assert "one constant, fitted" in words  # its rivals, fitted to the same rows
    call("fits", "yank", "mine@1")
    assert no_fit in refusal("report", "runs/a", "--out", "b.html")


@pytest.mark.slow
def test_a_log_size_fit_has_a_page_of_its_own(small_figures, by_size):
    fit = replace(by_size, quality={"residuals": {"beta_r_squared": 0.25}})
    text = write_toy_page(fit, ToyHead(noise=3.0), sizes=(16, 2048))
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


def test_a_fit_by_entropy_and_size_has_a_page_of_its_own(small_figures, by_both):
    records = [
        {"kind": "entropy-and-size", "q": q, "log_p": gain - 1, "p": 0.5 + q / 10, "gain": gain,
         "low": gain - 0.01, "high": gain + 0.01}
        for q, gain in ((0.0, 0.3), (0.25, 0.28), (0.5, 0.1))
    ]  # fmt: skip
    fit = replace(by_both, quality={"candidates": records, "q": 0.25, "verdict": "it gains"})
    text = write_toy_page(fit, ToyHead(noise=3.0), sizes=(16, 2048))
    words = " ".join(text.words)
    for part in (
        "over the unmasked items, and n the number of unmasked items (log is the natural",
        "beta(H, n) = -0.002 H^4 + 0.02 H^3",
        "Fitted on entropies from 0.2 to 5 nats and sets of 16 to 1,024 items; H is clamped;",
        "1 <= beta <= 64 at every entropy and set size.",
        "50 % are of other sizes, and",
        "Sets of one entropy and set size need very different temperatures; the curves, one for",
        "A curve ends at the greatest entropy of its sets, log n.",
        "Which kind of rule, and how sharp", "Chosen: q = 0.25, the largest that keeps 90 %",
    ):  # fmt: skip
        assert part in words, part
    assert text.tags.count("img") == 8


def test_a_head_that_misranks_nothing_has_a_page_too(small_figures, make_fit):
    text = write_toy_page(make_fit(), ToyHead(noise=0.0), sizes=(2,))
    assert text.tags.count("img") == 7  # all but the polynomial among misranked sets


def test_the_sets_that_made_the_fit(small_figures, toy_head, make_fit):
    rows = {"rows": 900, "misranked": 100, "kept": 900, "interior": 100, "used": 900}
    words = " ".join(write_toy_page(replace(make_fit(), quality={"rows": rows}), toy_head).words)
    assert "All 900 sets: none was left out." in words


def test_a_head_that_never_disperses_has_a_page_too(small_figures, make_fit):
    def sharpen(logits):
        logits *= 1e5

    words = " ".join(write_toy_page(make_fit(), ToyHead(noise=0.0, spoil=sharpen)).words)
    assert "at no size plain softmax gives the target less than half of its attention" in words
    assert "estimated from sets of 64 items: nowhere." in words
    assert "inf" not in words.split()


@pytest.mark.slow
def test_a_masked_head_has_a_page_too(small_figures, make_fit):
    def mask(logits):
        logits[:, logits.shape[1] // 2 :] = -np.inf

    assert write_toy_page(make_fit(), ToyHead(spoil=mask)).tags.count("img") == 8


def test_a_file_names_no_path_of_this_machine(here):
    os.mkfifo("pipe.npz")
    fit = replace(calibrate.load("max-retrieval"), name="f", path=None)
    write = replace(fit, source=dict(fit.source) | {"head": "pipe.npz"})
    Path("f.json").write_text(dumps(write), encoding="utf-8")
    message = refusal("report", "./f.json", "--out", "r.html")
    assert "made for head 'pipe.npz', which does not come with the package; give its" in message


@pytest.mark.slow
def test_run_prints_its_results_though_the_page_cannot_be_written(here):
    (here / "fits/mine/1.html").mkdir(parents=True)
    done = call("run", "--sizes", "64,256", "--sets", "128", "--name", "mine")
    assert "the report is not written: cannot write" in done.stderr
    assert "calibrate.load(" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["max-retrieval", "--out", "nope/r.html"], 2, "folder 'nope' does not exist; make it"),
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
@pytest.mark.parametrize(
    ("width", "scheme"),
    [(390, "dark"), *(pytest.param(*case, marks=pytest.mark.slow)
                      for case in [(390, "light"), (1280, "light"), (1280, "dark")])],
)  # fmt: skip
def test_in_a_browser(page, width, scheme):
    check_in_a_browser(page, width, scheme)


def check_in_a_browser(page, width, scheme):
    """It requests nothing, logs nothing, and fits into the window."""
    with Browser() as window:
        events = window.open(page.as_uri(), width, prefers_color_scheme=scheme)
        logged = [e for e in events if e["method"] in (
            "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")]  # fmt: skip
        assert logged == []
        requested = [e["params"]["request"]["url"] for e in events
                 if e["method"] == "Network.requestWillBeSent"]  # fmt: skip
        assert {re.split("[:]", url)[0] for url in requested} <= {"file", "data"}
        assert requested.count(page.as_uri()) == 1
        assert window.evaluate("innerWidth") == width
        assert window.evaluate("document.documentElement.scrollWidth") <= width
        # What is wider than the page lies in a box that scrolls.
        too_wide = """[...document.querySelectorAll('body *')].filter(e =>
            !e.closest('.scroll, pre') && e.getBoundingClientRect().right > innerWidth + 0.5
        ).map(e => e.outerHTML.slice(0, 80))"""
        assert window.evaluate(too_wide) == []
        pixels = 5 * plot_style.DPI  # figures are wider than 5 inches
        assert window.evaluate(f"[...document.images].every(i => i.naturalWidth > {pixels})")
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
    comparison = compare("toy", scores)
    mine = replace(calibrate.identity(), name="mine", version=2)
    assert verdict(comparison, mine) == (
        "mine@2 is right more often than plain softmax from 64 to 256 items, most at 256 (50.0 % "
        "to 80.0 %); it is right less often at 1,024 items, by up to 10.0 points. Use it from 64 "
        "to 256 items."
    )
    assert compare_rivals(comparison) == (
        "Beats the paper's numbers from 64 to 256 items; loses at 1,024 items. Beats hard "
        "attention at 256 items. Not measurably different from one constant, fitted."
    )


def test_rivals_include_the_same_kind_with_another_q():
    shares = {"plain": 0.5, "own": 0.7, "q-0": 0.5, "q-0.5": 0.9}
    sentence = compare_rivals(compare("toy", [make_score(64, shares)]))
    assert sentence == "Also right more often: the same kind at q = 0.5 (at 64 items)."


def test_where_hard_attention_is_right_more_often_a_sentence_says_why():
    scores = [make_score(64, {"plain": 0.5, "own": 0.6, "hard": 0.9})]
    comparison = compare("toy", scores)
    assert compare_rivals(comparison) == f"Loses to hard attention at 64 items. {WHY_HARD}"
    table = ComparisonRecord(comparison).accuracy_table()
    assert table.bold == {(comparison.rules.index("own"), 1)}


def test_why_beta_falls_with_n(by_size):
    scores = [
        make_score(n, {"plain": 0.5, "own": 0.6, "hard": share})
        for n, share in ((16, 0.9), (64, 0.7))
    ]
    comparison = compare("toy", scores)
    assert describe_fit(by_size, comparison) == "by-size@1 is kappa log n + b, beta 1.99 to 4.07."
    falling = replace(by_size.only, coefficients=(-0.5, 6.0))
    said = describe_fit(replace(by_size, entries=(falling,), quality={"q": 0.25}), comparison)
    assert "fitted to p^0.25 of the target" in said
    assert "right in 90 % at n = 16, in 70 % at n = 64), and sharpening" in said


def test_verdict_without_any_difference():
    same = {"plain": 0.5, "paper": 0.5, "own": 0.5}
    comparison = compare("toy", [make_score(16, same), make_score(64, same)])
    nowhere = "mine@1 is nowhere measurably better than plain softmax on 2,000 sets a size"
    mine = replace(calibrate.identity(), name="mine")
    tried = [{"kind": "constant", "q": q, "gain": 0.1 - q, "low": 0.05 - q} for q in (0, 0.03, 0.1)]
    for q, advice in (
        (None, ". Leave softmax as it is."),
        (0.03, ", and gains 0.0700 nats of log p on rows held out from its own: score more sets "
               "(--sets) before you use it."),
        (0.1, ". Leave softmax as it is."),
    ):  # fmt: skip
        fit = replace(mine, quality={"q": q, "candidates": tried})
        assert verdict(comparison, fit) == nowhere + advice
    assert compare_rivals(comparison) == "Not measurably different from the paper's numbers."
    assert np.isnan(compare("toy", [make_score(16, same)]).p_plain).all()
