"""Pages of the studies in scripts/results/, and the comparison of their tables with a record."""

import json
from pathlib import Path

STUDIES = Path(__file__).parents[1] / "scripts" / "studies"
RESULTS = STUDIES.parent / "results"


def record_of(study):
    """The record of a study, by the name of its page."""
    return json.loads((RESULTS / f"{study}.json").read_text())


def page_of(study):
    return (RESULTS / f"{study}.md").read_text(encoding="utf-8")


def assert_tables_are(study, lines):
    """Every table row of the page is one of these lines, and each of these is on the page."""
    shown = page_of(study).splitlines()
    assert [line for line in lines if line not in shown] == []
    assert [row for row in shown if row.startswith("|") and row not in lines] == []
