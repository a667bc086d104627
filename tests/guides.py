"""Sections and code blocks of the README and the guides, for the tests that run them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = "calibrate/guides"


def section(page, heading, folder=FOLDER):
    """The text under a heading of the second level of a guide, or of a page elsewhere."""
    text = (ROOT / folder / page).read_text(encoding="utf-8")
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def blocks_of(text, language="python"):
    """The code blocks of a text in a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def blocks(page, language="python"):
    """The code blocks of a page, a path from the root of the repository."""
    return blocks_of((ROOT / page).read_text(encoding="utf-8"), language)


def lines_of(text, language="sh"):
    """The shell lines of a text, without comments."""
    lines = "\n".join(blocks_of(text, language)).splitlines()
    return [line for line in lines if line and not line.startswith("#")]
