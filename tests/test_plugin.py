"""Heads from outside: found by module:attribute, and each broken member of the protocol named."""

import sys

import pytest
from conftest import ToyHead

from calibrate.evidence.metrics import LOG_P, RIGHT
from calibrate.rows.collect import collect_from_head
from calibrate.rows.heads import load_head
from calibrate.rows.score import score_head

MINE = """
from conftest import ToyHead

ready = ToyHead()

def make():
    return ToyHead()

def fails():
    raise OSError("no weights")

class Heads:
    first = ready
"""


@pytest.fixture
def mine(here, monkeypatch):
    """A module in the working folder, forgotten after the test."""
    (here / "mine.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield here
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("attribute", ["ready", "ToyHead", "make", "Heads.first"])
@pytest.mark.usefixtures("mine")
def test_a_head_by_module_and_attribute(attribute):
    head = load_head(f"mine:{attribute}")
    assert head.name == "toy"
    assert head.sample(0, 8, 3).target.shape == (3,)


def broken(**members):
    return type("Broken", (ToyHead,), members)()


def test_a_head_that_cannot_be_scored_is_collected(here):
    head = broken(correct=None)
    collect_from_head(head, [8], 200, 0, here / "run")
    scored = score_head(head, [8], 40, 0, {})
    assert LOG_P in scored.values
    assert RIGHT not in scored.values
