"""The page on a fit: its text, and how it behaves in a real browser."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from conftest import ToyHead
from test_cli import call, refusal

import calibrate
from calibrate.evidence.evidence import OWN, Evidence, Scored, Stratum
from calibrate.evidence.metrics import ANSWERS, LOG_P, RIGHT
from calibrate.report.page import write_fit_page
from calibrate.report.scores_record import Sample, ScoresRecord
from calibrate.rows.score_head import score_head
from calibrate.store.coefficient_file import dumps

SIZES = ["--sizes", "64,256", "--sets", "128"]  # as in the other tests: compiled once


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    call("report", "max-retrieval@1", "--out", path, *SIZES)
    return path


def write_toy_page(fit, head, sizes=(16, 64)):
    """The page on a fit of a toy head, in ./r.html."""
    evidence = score_head(head, sizes, 32, 0, {OWN: fit})
    scores = ScoresRecord(evidence, own=fit.reference)
    write_fit_page(Path("r.html"), replace(fit, path=Path("f.json")), scores)
    return Text(Path("r.html").read_text(encoding="utf-8"))


class Text(HTMLParser):
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
        "max-retrieval-0",
        'calibrate.load("max-retrieval@1")',
        "0.6472 .. 5.022 nats",
        "17,396 used of 45,056",
        "Calibration report: max-retrieval@1",
        fit.source["collection"],
        fit.provenance["created"],
        "argmax",
    ):
        assert part in words, part
    assert text.tags.count("img") == text.tags.count("figcaption")
    assert "script" not in text.tags
    assert all(address.startswith(("data:", "#")) for address in text.addresses)


def test_the_page_begins_with_what_to_do(page):
    """Contents, the lines that load the fit, the table that decides; other rules are folded."""
    html = page.read_text(encoding="utf-8")
    text = Text(html)
    links = [address[1:] for address in text.addresses if address[0] == "#"]
    assert links[:3] == ["in-your-code", "scores", "figures"]
    assert re.findall('id="(.*?)"', html) == links
    assert text.tags.index("pre") < text.tags.index("table")
    shown, folded = html.split("<summary>Every rule, in full</summary>")
    assert "the same, rounded" not in " ".join(Text(shown).words)
    assert "the same, rounded" in " ".join(Text(folded.split("</details>")[0]).words)
    assert "Expected calibration error (ECE): baseline " in html


def test_examples_of_a_model_are_cut_and_stay_text(make_fit):
    values = {LOG_P: np.log([[0.5], [0.125]]), RIGHT: np.array([[1], [0]])}
    items = np.zeros(1, int), np.full(1, -1), np.ones(1), Scored("m", items=ANSWERS)
    evidence = Evidence(("plain", OWN), values, (Stratum(2048, "facts"),), *items)
    sample = Sample(0, "facts", "x " * 900 + "last", "<i>Paris\udcff")
    scores = ScoresRecord(evidence, own="mine@1", samples=[sample])
    write_fit_page(Path("r.html"), replace(make_fit(), path=Path("f.json")), scores)
    text = Text(Path("r.html").read_text(encoding="utf-8"))
    words = " ".join(text.words)
    assert r"x last <i>Paris\udcff" in words
    assert re.search(r"baseline .*\b50 %.* 0\.693 .*mine@1 .*\b12\.5 %.* 2\.079 ", words)
    assert words.count("x x") < 200
    assert "i" not in text.tags


def test_the_trade_of_strength_is_on_the_page(toy_head, make_fit):
    trade = [{"strength": s, "gain": s, "kl": s * s / 100, "kl_error": 0.001} for s in (0.5, 1.0)]
    quality = {"verdict": "x", "trade": trade}
    source = {"options": {"through": "model", "strength": 0.5}}
    text = write_toy_page(replace(make_fit(), quality=quality, source=source), toy_head)
    words = " ".join(text.words)
    assert re.search(r"0\.5 \+0\.500 0\.0025.±.0\.0010 selected 1 \+1\.000 0\.0100", words)


@pytest.mark.slow
def test_the_same_fit_gives_the_same_page(page, tmp_path):
    call("report", "max-retrieval@1", "--out", tmp_path / "again.html", *SIZES)
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()


def test_a_hostile_name_stays_text(toy_head, make_fit):
    name = "<script>alert(1)</script>\x1b\0\u202e\udcff"
    text = write_toy_page(replace(make_fit(), name=name), toy_head)
    assert "script" not in text.tags
    assert r"<script>alert(1)</script>\x1b\x00\u202e\udcff@1" in text.words
    assert Path("r.html").read_text("utf-8").translate({10: "", 160: ""}).isprintable()


@pytest.mark.slow
def test_the_page_has_rules_fitted_to_the_same_rows(here):
    call("collect", "--sizes", "256,512", "--sets", "256", "--out", "runs/a")
    call("fit", "runs/a", "--name", "mine", "--kind", "polynomial")
    for number, more in enumerate(([], ["--run", "elsewhere"])):
        out = f"{number}.html"
        call("report", "mine", "--out", out, "--sizes", "256", "--sets", "128", *more)
        words = " ".join(Text((here / out).read_text(encoding="utf-8")).words)
        assert "constant (maximum likelihood)" in words
        assert "Each point is one of" in words
        assert "(of H^4 to 1) R^2 of log beta" in words
        assert "file None" not in words
        if not more:
            Path("runs/a").rename("elsewhere")


def test_a_fit_by_entropy_and_size_has_a_page_of_its_own(by_both):
    records = [
        {"kind": "entropy-and-size", "q": q, "gain": gain}
        for q, gain in ((0.0, 0.3), (0.25, 0.28), (0.5, 0.1))
    ]
    fit = replace(by_both, quality={"candidates": records, "q": 0.25, "verdict": "it gains"})
    words = " ".join(write_toy_page(fit, ToyHead(noise=3.0), sizes=(16, 2048)).words)
    for part in (
        "beta(H, n) -0.002 H^4 + 0.02 H^3",
        "0.2 .. 5 nats and sets of 16 .. 1,024 items",
        "guards 1 <= beta <= 64",
        "Which kind of rule",
    ):  # fmt: skip
        assert part in words, part


@pytest.mark.parametrize("head", [ToyHead(noise=0.0), ToyHead(spoil=lambda z: z.__imul__(1e5))])
def test_a_head_that_misranks_nothing_or_never_disperses_has_a_page_too(make_fit, head):
    words = " ".join(write_toy_page(make_fit(), head, sizes=(2,)).words)
    assert "no significant difference" in words or "so the NLL decides" in words
    assert not {"nan", "inf"} & set(words.split())


def test_a_file_names_no_path_of_this_machine(here):
    Path("weights.npz").write_text("")
    fit = calibrate.load("max-retrieval")
    write = replace(fit, name="f", source=dict(fit.source) | {"head": "weights.npz"})
    Path("f.json").write_text(dumps(write), encoding="utf-8")
    message = refusal("report", "./f.json", "--out", "r.html")
    assert " --head " in message


@pytest.mark.slow
def test_run_prints_its_results_though_the_page_cannot_be_written(here):
    (here / "fits/mine/1.html").mkdir(parents=True)
    done = call("run", "--sizes", "64,256", "--sets", "128", "--name", "mine")
    assert "cannot write" in done.stderr
    assert "calibrate.load(" in done.stdout


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
        ground = window.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
        own = "[...document.querySelectorAll('th')].find(e => e.textContent.includes('@'))"
        assert window.evaluate(f"{own}.getBoundingClientRect().right") <= width  # unscrolled
        dark, ground, bright = np.quantile(brightness(window.shot("figure img")), [1e-3, 0.5, 1])
        assert (bright + 0.05) / (dark + 0.05) > 4.5  # of text and its ground
        assert ground > 0.9 if scheme == "light" else ground < 0.05
        height = "document.querySelector('summary:not(.contents *)').parentNode.scrollHeight"
        folded = window.evaluate(height)
        window.call("Emulation.setEmulatedMedia", media="print")
        assert folded < 60 < 100 < window.evaluate(height)


def brightness(pixels):
    """Relative luminance of sRGB in 0 to 1, as WCAG 2 defines it."""
    linear = np.where(pixels <= 0.04045, pixels / 12.92, ((pixels + 0.055) / 1.055) ** 2.4)
    return linear[..., :3] @ [0.2126, 0.7152, 0.0722]
