"""The language of the documentation: phrases that readers had to read twice do not come back.

Each pattern has the wording to use instead. They are phrases, not everyday words. Add one when a
review finds another.
"""

import re
from pathlib import Path

import pytest
from test_cli import WORDS
from typer.testing import CliRunner

from calibrate.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = ["README.md"] + [
    str(page.relative_to(ROOT))
    for folder in ("fits", "scripts")
    for page in sorted((ROOT / folder).rglob("*.md"))
]

# Pattern, without regard to case and line breaks: what to write.
PHRASES = {
    r"beyond chance|told apart|evident(ly)? (gain|loss|better|worse)": "statistically significant",
    r"(has|have) (not|never) seen|nothing has seen|\(not seen\)": "held-out",
    r"plain softmax": "baseline",
    r"\b(own|this) fits?\b": "fitted rule",
    r"\bas sure as\b|\bhow sure\b|\bsurer than\b": "calibrated probability, over-confident",
    r"hard attention": "argmax",
    r"\bregisters of text\b|\b(nine|six|five|of) registers\b": "text domains",
    r"\b(eighteen|built-in|four|ten|of) layouts?\b": "prompt templates",
    r"protected text": "retention text",
    r"\bmay lose little\b|\bloses? at most what\b|\bwhat (it|they|text) may lose\b": "tolerance",
    r"\bpromis(e|es|ed|ing)\b": "tolerance, non-inferiority margin",
    r"\brivals?\b": "other rules, baselines",
    r"\b(head|heads|model|row|rows|logits)( that| which)? wants?\b": "optimal beta, gain",
    r"\bwants? (to be|more|less|it sharper)\b": "optimal beta, gain",
    r"\bstrength of\b|\bwhole strength\b": "interpolation weight",
    r"\bjudged? (alone|by|on|whether)\b|\b(that|which) judges?\b|\bdo not judge\b": "test split",
    r"\b(that|which) (fit|fits|choose|chooses) and\b|\bexamples that choose\b": "validation split",
    r"\b(fit|rule|fits|rules) (is|are|was|were|not) made (of|from)\b": "fitted to",
    r"\bmade of (rows|the rows|these rows|examples|it)\b": "fitted to",
    r"\bthe paper's numbers\b": "the paper's published polynomial",
    r"\bheads? alike\b": "shared by all heads",
    r"\bis an? gate\b|\bgated (at|by|rows)\b": "entropy threshold",
    r"\bright most often\b": "accuracy, exact match",
    r"\bwithout a word\b|\bin a word\b": "without a message",
    r"\bis worth (it|having)\b|\bworth it\b": "significant gain",
    r"\bgoes by (it|the|both)\b": "depends on",
    r"\b(it|this) tells (which|what|whether|how)\b": "shows",
    r"\bnats a token\b|\ba (size|row|head|token) each\b": "per token, for each",
    r"\bbends? what\b|\bthe bend\b|\bspare\b": "Fisher information, curvature, slack",
}
# The name of a verdict, in a table.
ALLOWED = ("| not worth it |",)


def phrases_in(text, patterns=frozenset(PHRASES)):
    """A line for each phrase in a text: where it is, and the wording to use instead."""
    for allowed in ALLOWED:
        text = text.replace(allowed, " " * len(allowed))
    found = []
    for pattern in sorted(patterns):
        for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE):
            line = text[: match.start()].count("\n") + 1
            phrase = " ".join(match[0].split())
            found.append(f"line {line}: {phrase!r}; write: {PHRASES[pattern]}")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_a_page_uses_the_terms_of_the_field(page):
    found = phrases_in((ROOT / page).read_text(encoding="utf-8"))
    assert not found, "\n".join([page, *found])


@WORDS
def test_help_uses_the_terms_of_the_field(words):
    shown = CliRunner().invoke(app, [*words, "--help"]).stdout
    found = phrases_in(shown)
    assert not found, "\n".join([" ".join(words), *found])


def test_phrases_are_found_across_line_breaks():
    assert phrases_in("It gains\nbeyond\n  chance.") == [
        "line 2: 'beyond chance'; write: statistically significant"
    ]
