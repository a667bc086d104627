"""Heads from outside: found by module:attribute, and each broken member of the protocol named."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ToyHead
from test_cli import refusal

from calibrate.errors import CalibrateError
from calibrate.rows.collect import collect
from calibrate.rows.heads import load_head
from calibrate.rows.score_head import score_head
from calibrate.store.coefficient_file import dumps

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


@pytest.mark.usefixtures("mine")
def test_a_report_says_how_the_head_of_its_collection_was_loaded(make_fit):
    """It is named, not loaded: whoever reads a file of others runs no code of theirs."""
    collection = collect(load_head("mine:make"), [8], 200, 0, Path("runs/mine"))
    source = {"head": "toy", "collection": collection.digest}
    Path("mine.json").write_text(dumps(replace(make_fit(), source=source)), encoding="utf-8")
    message = refusal("report", "./mine.json", "--out", "r.html")
    assert "name its head with --head mine:make (no file chooses code to run)" in message
    shutil.rmtree("runs")
    message = refusal("report", "./mine.json", "--out", "r.html")
    assert "name its head with --head MODULE:ATTRIBUTE (no file" in message


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere:head", "'nowhere:head' failed with ModuleNotFoundError: No module named 'now"),
        ("mine:absent", "failed with AttributeError: .* 'absent'; modules are searched in /"),
        ("mine:fails", r"'mine:fails' failed with OSError: no weights; .* --debug`. shows where"),
        ("calibrate.core.rule:Rule", "name is None; give a printable text"),
        ("no-such-head", "module:attribute of a head of yours"),
    ],
)
def test_what_is_no_head(reference, message):
    with pytest.raises(CalibrateError, match=message):
        load_head(reference)


def broken(**members):
    return type("Broken", (ToyHead,), members)()


def raises(self, *_):
    raise TypeError("no such thing")


def attended(logits):
    return lambda self, batch: type("Attended", (), {"logits": logits})()


# One bug in each member: how it shows when the head is loaded, or used.
BROKEN = [
    ({"name": 3}, "head broken:head: name is 3; give a printable text"),
    ({"fingerprint": "v1"}, 'fingerprint is \'v1\'; give "sha256:" and a digest of what det'),
    ({"sample": None}, "sample is None; give a method"),
    ({"sample": raises}, "head 'toy': sample failed with TypeError: no"),
    ({"sample": lambda *_: (np.zeros((40, 8)),)}, "sample gave a tuple; give a pytree with"),
    ({"attend": 1}, "attend is 1; give a method"),
    ({"attend": raises}, "attend failed with TypeError: no such thing"),
    ({"attend": lambda self, batch: 0}, r"attend gave no .logits; give .logits of shape \(40, 8\)"),
    ({"attend": attended(np.zeros((40, 9)))}, r"logits float64\(40, 9\); give .logits of"),
    ({"attend": attended(np.zeros((40, 8), int))}, r"logits int64\(40, 8\); give .* floats"),
    ({"attend": attended(np.full((40, 8), 1 / 8))},
     "attend gave rows that are >= 0 and sum to 1, as probabilities do; give the scores"),
    ({"correct": 1}, "correct is 1; give a method"),
    ({"correct": raises}, "correct failed with TypeError: no such"),
    ({"correct": lambda self, attended, weights: np.ones(3)}, r"correct gave float64\(3,\)"),
]  # fmt: skip


@pytest.mark.parametrize(("members", "message"), BROKEN)
def test_each_member_of_the_protocol_that_is_broken_is_named(members, message, here, monkeypatch):
    head = broken(**members)
    if "name" in members or "fingerprint" in members:
        for member, value in members.items():
            setattr(head, member, value)
    monkeypatch.setitem(sys.modules, "broken", type("Module", (), {"head": head}))

    def use():
        found = load_head("broken:head")
        collect(found, [8], 40, 0, here / "run")
        score_head(found, [8], 40, 0, {})

    with pytest.raises(CalibrateError, match=message):
        use()


def test_a_head_that_cannot_be_scored_is_collected(here):
    head = broken(correct=None)
    collect(head, [8], 200, 0, here / "run")
    with pytest.raises(CalibrateError, match="head 'toy' has no correct; "):
        score_head(head, [8], 40, 0, {})
