"""The page on a fit: its blocks, its text, and how it behaves in a real browser."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from commands import call, refusal
from conftest import ToyHead

import calibrate
from calibrate.core.rule import RuleForm, formula
from calibrate.evidence.baselines import baselines_beside
from calibrate.fitting.fit_collection import fit_solved
from calibrate.fitting.options import LEAST_SQUARES, FitOptions
from calibrate.report.fit_tables import kinds_tables
from calibrate.report.page import SolvedHead, write_fit_page
from calibrate.report.score_tables import NEW_INPUTS_NOTE
from calibrate.report.scores_record import ScoresRecord
from calibrate.rows.heads import load_head
from calibrate.rows.score import score_head
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit, dumps

SIZES = ["--sizes", "64,256", "--sets", "128"]  # as in the other tests: compiled once
SECTIONS = [
    "in-your-code", "scores", "optimal-temperatures-and-the-rule", "the-rule-in-numbers",
    "which-kind-of-rule", "inputs", "provenance",
]  # fmt: skip


@pytest.fixture(scope="module")
def solved():
    """Inputs of the built-in head, of which many are misranked."""
    inputs = calibrate.solve(calibrate.collect("max-retrieval-0", [256, 1024], 256))
    return SolvedHead(inputs, 2.4)


def fit_of(solved, **options):
    """A fit of the inputs, as if it lay in ./f.json."""
    rows, options = solved.rows, FitOptions(**options)
    made = fit_solved(rows.collection, rows, "mine", options, refuse=False)
    return replace(made.fit, path=Path("f.json"))


@pytest.fixture(scope="module")
def fit(solved):
    return fit_of(solved)


@pytest.fixture(scope="module")
def scores(fit):
    rules = baselines_beside(fit, 2.4)
    evidence = score_head(load_head("max-retrieval-0"), [64, 256], 128, 0, rules)
    return ScoresRecord(evidence, (fit.reference,))


@pytest.fixture(scope="module")
def page(fit, scores, solved, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_fit_page(path, fit, scores, solved)
    return path


def read(path):
    """The words of a page, its tags and its addresses."""
    return Text(Path(path).read_text(encoding="utf-8"))


def page_of(fit, scores=None, solved=None):
    """The page on a fit, in ./r.html."""
    write_fit_page(Path("r.html"), replace(fit, path=Path("f.json")), scores, solved)
    return read("r.html")


def write_toy_page(fit, head, sizes=(16, 64)):
    """The page on a fit of a toy head, in ./r.html."""
    evidence = score_head(head, sizes, 32, 0, {fit.reference: fit})
    return page_of(fit, ScoresRecord(evidence, (fit.reference,)))


def sections_of(text):
    return [address[1:] for address in text.addresses if address[0] == "#"]


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


def test_every_block_is_on_the_page_in_order(page):
    text, html = read(page), page.read_text(encoding="utf-8")
    assert sections_of(text) == SECTIONS
    assert re.findall('id="(.*?)"', html) == SECTIONS
    assert text.tags.index("h1") < text.tags.index("pre") < text.tags.index("table")
    assert text.tags[: text.tags.index("img")].count("table") == 1
    assert text.tags.count("img") == text.tags.count("figcaption") == 6
    assert text.tags.count("details") == 2  # columns, ECE and gain


def test_the_verdict_is_that_of_the_file_and_there_is_no_other(page, fit, scores):
    words = " ".join(read(page).words)
    verdict = fit.verdict.replace("->", "→").replace("<=", "≤")
    assert words.replace(" ", "").count(re.sub(r"[\s`]", "", verdict)) == 1
    (sentences,) = scores.verdict_sentences().values()
    assert not any(sentence in words for sentence in sentences)


def test_one_head_has_one_set_of_numbers(page, fit):
    words = " ".join(read(page).words)
    assert words.count(f"beta(H) {formula(fit.rule.kind, fit.coefficients)}") == 1
    assert words.count("H^4") == words.count("R^2") == 1
    assert f"{fit.effective_degrees:.1f} of 5" in words
    assert f"R^2 of log beta {fit.r_squared:.2f}: " in words


def test_inputs_and_source_are_on_the_page(page, fit):
    words, inputs = " ".join(read(page).words), fit.evidence["inputs"]
    assert f"{inputs['seen']:,}: {inputs['misranked']:,} misranked" in words
    for part in (fit.source["collection"], fit.provenance["created"], "min-entropy 0"):
        assert part in words


def test_without_a_verdict_in_the_file_the_page_has_one_on_the_new_scores(make_fit, toy_head):
    entries = (Entry((9.0,), ()),)
    harmful = replace(make_fit(), name="sharp", rule=RuleForm.constant(), entries=entries)
    words = " ".join(write_toy_page(harmful, toy_head).words)
    verdict, _ = words.split("In your code", 1)
    assert "this fit (constant, beta = 9, theta = 0.111) is significantly worse" in verdict


def test_the_page_is_self_contained_and_marks_the_best_rules(page):
    text, html = read(page), page.read_text(encoding="utf-8")
    assert not {"script", "iframe", "object"} & set(text.tags)
    assert all(address.startswith(("data:", "#")) for address in text.addresses)
    assert html.count('class="best">*\xa0') >= 1 + 3  # all n together, each n, and their mean
    assert html.count("* the best NLL") == 1
    assert "±" in html


def test_the_page_says_once_that_the_scores_are_of_new_inputs(page):
    assert " ".join(read(page).words).count(NEW_INPUTS_NOTE) == 1


@pytest.mark.parametrize("advice", ["constant", "log-size"])
def test_a_constant_that_the_verdict_names_comes_before_the_fit(fit, solved, advice):
    verdict = f"It gains.\nUse another kind: {advice}.\nNo more."
    path = Path("r.html")
    evidence = {"verdict": verdict, "advised_kind": advice}
    write_fit_page(path, replace(fit, evidence=evidence), None, solved)
    page = path.read_text(encoding="utf-8")
    assert ("<code>query = 2.4 * query</code>" in page) == (advice == "constant")
    assert page.count("<p>", page.index('class="verdict"'), page.index("<nav")) == 3


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"kind": "log-size"}, marks=pytest.mark.slow), {"loss": LEAST_SQUARES}],
)
def test_the_table_of_kinds_marks_the_kind_of_the_fit(solved, options):
    (table,) = kinds_tables(fit_of(solved, **options))
    names = [row[0] for row in table.rows]
    assert names[0].startswith("baseline")
    assert {"constant", "log-size", "polynomial", "entropy-and-size"} < set(names)
    (marked,) = (row[0] for row in table.rows if row[-1] == "this fit")
    assert marked.startswith(options.get("kind", "polynomial"))
    assert ("least squares" in marked) == ("loss" in options)


def test_without_new_scores_the_page_has_those_of_the_file(fit):
    text = page_of(fit)
    assert sections_of(text) == [*SECTIONS[:2], "the-rule", *SECTIONS[4:]]
    for record in fit.evidence["held_out"]:
        assert {f"{record['nll_before']:.3f}", f"{record['nll_after']:.3f}"} <= set(text.words)


def test_a_fit_without_evidence_has_a_page(constant):
    text = page_of(constant)
    assert sections_of(text) == ["in-your-code", "scores", "the-rule", "provenance"]
    assert "1.75" in text.words
    entries = tuple(Entry((beta,), (), 0, i) for i, beta in enumerate((0.5, 2.0)))
    assert "the-rule" in sections_of(page_of(Fit(RuleForm.constant(0.25), entries)))


@pytest.mark.slow
def test_the_same_fit_gives_the_same_page(fit, scores, solved):
    page_of(fit, scores, solved)
    first = Path("r.html").read_bytes()
    page_of(fit, scores, solved)
    assert Path("r.html").read_bytes() == first


def test_report_writes_the_page(here):
    call("report", "max-retrieval@1", "--out", "r.html", *SIZES)
    words = " ".join(read("r.html").words)
    assert 'calibrate.load("max-retrieval@1")' in words
    assert "Calibration report: max-retrieval@1" in words


def test_hostile_text_stays_text(toy_head, make_fit):
    hostile = "<script>alert(1)</script>\x1b\0\u202e\udcff"
    shown = r"<script>alert(1)</script>\x1b\x00\u202e\udcff"
    source, evidence = {"head": "<i>\x1b"}, {"verdict": "<u>\0</u>"}
    fit = replace(make_fit(), name=hostile, source=source, evidence=evidence)
    text = write_toy_page(fit, toy_head)
    assert not {"script", "i", "u"} & set(text.tags)
    assert {f"{shown}@1", r"<u>\x00</u>", r"<i>\x1b"} <= set(text.words)
    assert Path("r.html").read_text("utf-8").translate({10: "", 160: ""}).isprintable()


def test_a_fit_by_entropy_and_size_names_its_eight_terms(by_both):
    words = " ".join(write_toy_page(by_both, ToyHead(noise=3.0), sizes=(16, 2048)).words)
    for part in (
        "beta(H, n) -0.002 H^4 + 0.02 H^3",
        "0.2 .. 5 nats and sets of 16 .. 1,024 items",
        "1 ≤ beta ≤ 64",
    ):  # fmt: skip
        assert part in words, part


@pytest.mark.parametrize("head", [ToyHead(noise=0.0), ToyHead(spoil=lambda z: z.__imul__(1e5))])
def test_a_head_that_misranks_nothing_or_never_disperses_has_a_page_too(make_fit, head):
    text = write_toy_page(make_fit(), head, sizes=(2,))
    assert "scores" in sections_of(text)
    assert not {"nan", "inf", "-inf", "+nan"} & set(text.words)


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
        window.evaluate("document.querySelectorAll('details').forEach(x => { x.open = true; })")
        assert window.evaluate("document.documentElement.scrollWidth") <= width
        # What is wider than the page lies in a box that scrolls.
        too_wide = """[...document.querySelectorAll('body *')].filter(e =>
            !e.closest('.scroll, pre') && e.getBoundingClientRect().right > innerWidth + 0.5
        ).map(e => e.outerHTML.slice(0, 80))"""
        assert window.evaluate(too_wide) == []
        ground = window.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
        cut = """[...document.querySelectorAll('.scroll')].filter(e =>
            e.scrollWidth > e.clientWidth).map(e => e.innerText)"""
        assert window.evaluate(cut) == []
        pixels = brightness(window.shot("figure img"))
        darkest, dark, bright, brightest = np.quantile(pixels, [1e-3, 0.1, 0.9, 1])
        assert (brightest + 0.05) / (darkest + 0.05) > 4.5  # of text and its ground
        assert bright > 0.9 if scheme == "light" else dark < 0.05  # the margin of the figure
        broken = """[...document.querySelectorAll('p code')].filter(e =>
            e.getClientRects().length > 1).map(e => e.innerText)"""
        assert window.evaluate(broken) == []


def brightness(pixels):
    """Relative luminance of sRGB in 0 to 1, as WCAG 2 defines it."""
    linear = np.where(pixels <= 0.04045, pixels / 12.92, ((pixels + 0.055) / 1.055) ** 2.4)
    return linear[..., :3] @ [0.2126, 0.7152, 0.0722]
