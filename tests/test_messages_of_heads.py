"""Wording of messages about heads from outside."""

import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ToyHead
from messages import says
from test_plugin import broken, mine  # noqa: F401

from calibrate.errors import CalibrateError
from calibrate.rows.collect import collect
from calibrate.rows.heads import load_head
from calibrate.rows.score_head import score_head


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (
            "nowhere:head",
            (
                "loading the head 'nowhere:head' failed with ModuleNotFoundError: No module "
                "named 'nowhere'; modules are searched in {here} first; the traceback "
                "(`calibrate --debug`) shows where"
            ),
        ),
        (
            "mine:absent",
            (
                "loading the head 'mine:absent' failed with AttributeError: module 'mine' has no "
                "attribute 'absent'; modules are searched in {here} first; the traceback "
                "(`calibrate --debug`) shows where"
            ),
        ),
        (
            "mine:fails",
            (
                "loading the head 'mine:fails' failed with OSError: no weights; modules are "
                "searched in {here} first; the traceback (`calibrate --debug`) shows where"
            ),
        ),
        (
            "calibrate.core.rule:Rule",
            "head calibrate.core.rule:Rule: name is None; give a printable text",
        ),
        (
            "no-such-head",
            (
                "no head is named 'no-such-head'; use one of max-retrieval, max-retrieval-0, "
                "max-retrieval-1, max-retrieval-2, max-retrieval-3, max-retrieval-4, "
                "max-retrieval-5, max-retrieval-6, max-retrieval-7, max-retrieval-8, "
                "max-retrieval-9, module:attribute of a head of yours, or a weights file (.npz) "
                "of scripts/studies/train_heads.py"
            ),
        ),
    ],
)
def test_what_is_no_head(reference, message):
    with says(CalibrateError, message):
        load_head(reference)


def raises(self, *_):
    raise TypeError("no such thing")


def attended(logits):
    return lambda self, batch: type("Attended", (), {"logits": logits})()


# One bug in each member: how it shows when the head is loaded, or used.
BROKEN = [
    ({"name": 3}, "head broken:head: name is 3; give a printable text"),
    (
        {"fingerprint": "v1"},
        (
            "head broken:head: fingerprint is 'v1'; give \"sha256:\" and a digest of what "
            "determines its logits, such as its weights"
        ),
    ),
    ({"sample": None}, "head broken:head: sample is None; give a method (help(calibrate.Head))"),
    (
        {"sample": raises},
        (
            "head 'toy': sample failed with TypeError: no such thing; the traceback "
            "(`calibrate --debug`) shows where"
        ),
    ),
    (
        {"sample": lambda *_: (np.zeros((40, 8)),)},
        (
            "head 'toy': sample gave a tuple; give a pytree with .target, such as a "
            "NamedTuple, whose leaves have 40 rows each"
        ),
    ),
    ({"attend": 1}, "head broken:head: attend is 1; give a method (help(calibrate.Head))"),
    (
        {"attend": raises},
        (
            "head 'toy': attend failed with TypeError: no such thing; the traceback "
            "(`calibrate --debug`) shows where"
        ),
    ),
    (
        {"attend": lambda self, batch: 0},
        (
            "head 'toy': attend gave no .logits; give .logits of shape (40, 8), floats, the "
            "scores before softmax"
        ),
    ),
    (
        {"attend": attended(np.zeros((40, 9)))},
        (
            "head 'toy': attend gave .logits float64(40, 9); give .logits of shape (40, 8), "
            "floats, the scores before softmax"
        ),
    ),
    (
        {"attend": attended(np.zeros((40, 8), int))},
        (
            "head 'toy': attend gave .logits int64(40, 8); give .logits of shape (40, 8), "
            "floats, the scores before softmax"
        ),
    ),
    (
        {"attend": attended(np.full((40, 8), 1 / 8))},
        (
            "head 'toy': attend gave rows that are >= 0 and sum to 1, as probabilities do; "
            "give the scores before softmax, or the logarithms of the probabilities"
        ),
    ),
    ({"correct": 1}, "head broken:head: correct is 1; give a method (help(calibrate.Head))"),
    (
        {"correct": raises},
        (
            "head 'toy': correct failed with TypeError: no such thing; the traceback "
            "(`calibrate --debug`) shows where"
        ),
    ),
    (
        {"correct": lambda self, attended, weights: np.ones(3)},
        "head 'toy': correct gave float64(3,), expected bool (40,)",
    ),
]


@pytest.mark.parametrize(("members", "message"), BROKEN)
def test_each_member_of_the_protocol_that_is_broken(members, message, here, monkeypatch):
    head = broken(**members)
    if "name" in members or "fingerprint" in members:
        for member, value in members.items():
            setattr(head, member, value)
    monkeypatch.setitem(sys.modules, "broken", type("Module", (), {"head": head}))

    def use():
        found = load_head("broken:head")
        collect(found, [8], 40, 0, here / "run")
        score_head(found, [8], 40, 0, {})

    with says(CalibrateError, message):
        use()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda b: b._replace(target=np.full(64, 64)),
            (
                "head 'toy': sample gave a target of 64, which is not a position in [0, 64); "
                "give the index of the item that should win"
            ),
        ),
        (
            lambda b: b._replace(target=np.full(64, -1)),
            (
                "head 'toy': sample gave a target of -1, which is not a position in [0, 64); "
                "give the index of the item that should win"
            ),
        ),
        (
            lambda b: b._replace(target=np.full(64, 0.5)),
            (
                "head 'toy': sample gave a target of float64(64,); give integers (64,), or bool "
                "(64, 64)"
            ),
        ),
        (
            lambda b: type("Plain", (), {"target": b.target})(),
            (
                "head 'toy': sample gave a Plain; give a pytree with .target, such as a "
                "NamedTuple, whose leaves have 64 rows each"
            ),
        ),
    ],
)
def test_a_head_with_impossible_batches(change, message):
    head = ToyHead()
    sample = head.sample
    head.sample = lambda *arguments: change(sample(*arguments))
    with says(CalibrateError, message):
        collect(head, [64], 64, 0, Path("run"))
