"""Coefficient files of every kind of rule: with every field that the format has, and changed."""

import copy
import hashlib
import json
from functools import reduce
from operator import getitem
from pathlib import Path

import jsonschema

from calibrate.core.rule import CONSTANT, ENTROPY_AND_SIZE, LOG_SIZE, POLYNOMIAL, RuleForm
from calibrate.store import coefficient_file
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit, dumps

SCHEMA_FILE = Path(coefficient_file.__file__).parent / "schemas" / "coefficient-file-1.0.json"
VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text()))
PAPER = (-0.037, 0.481, -2.3, 4.917, -1.791)
SURFACE = (-0.011, 0.12, -0.53, 1.9, 0.31, 0.047, -0.023, 0.41)


def rich_fit(**fields):
    """A fit with every field that the format has."""
    return Fit(
        **{
            "rule": RuleForm(outside="identity"),
            "entries": (Entry(PAPER, (0.5, 5.9), 0, 3), Entry(PAPER, (0.7, 5.0), 2, 0)),
            "name": "made",
            "evidence": {
                "inputs": {"seen": 1000, "misranked": 400, "optimum_infinite": 600,
                           "optimum_zero": 10, "optimum_finite": 390, "bad": 0, "fitted": 1000},
                "heads": [
                    {"layer": 0, "head": 3, "inputs": 600, "penalty": 0.001,
                     "degrees_of_freedom": 3.5, "r_squared_log_beta": 0.28, "at_bound": "max",
                     "gain": 0.1, "se": 0.02},
                    {"layer": 2, "head": 0, "inputs": 400, "penalty": "infinite",
                     "degrees_of_freedom": 1.0, "r_squared_log_beta": None, "at_bound": "",
                     "gain": 0.01, "se": 0.02},
                ],
                "held_out": [
                    {"n": 64, "inputs": 512, "nll_before": 0.5, "nll_after": 0.4, "se": 0.01}
                ],
                "kinds": [
                    {"kind": "baseline", "nll": 0.5},
                    {"kind": "constant", "nll": 0.45, "gain": 0.05, "se": 0.02},
                ],
                "verdict": "polynomial",
            },
            "source": {
                "head": "mine",
                "fingerprint": "sha256:" + "a" * 64,
                "collection": "sha256:" + "b" * 64,
                "seed": 2**63,
                "options": {"kind": "polynomial", "tolerance": 0.5, "partial": False,
                            "trained_up_to": None, "seed": 7},
                "citation": "Veličković et al. 2024",
            },
            "provenance": {
                "created": "2026-01-31T12:00:00+00:00", "versions": {"calibrate": "0.1.0"},
            },
            "extra": {"x-note": {"who": ["me", 1, 0.5, None], "deep": [[{"x": []}]]}},
            **fields,
        }
    )  # fmt: skip


FITS = {
    CONSTANT: rich_fit(
        rule=RuleForm.constant(0.5),
        entries=(Entry((1.971820043551209,), (), 0, 3), Entry((0.75,), (), 2, 0)),
    ),
    LOG_SIZE: rich_fit(
        rule=RuleForm.log_size(0.5),
        entries=(Entry((0.36, 0.25), (2.5, 7.0), 0, 3), Entry((0.1, 1.5), (2.5, 6.0), 2, 0)),
    ),
    POLYNOMIAL: rich_fit(),
    ENTROPY_AND_SIZE: rich_fit(
        rule=RuleForm(0.25, 0.5, 64.0, kind=ENTROPY_AND_SIZE),
        entries=(
            Entry(SURFACE, (0.5, 5.9, 2.5, 7.0), 0, 3),
            Entry((0.0,) * 4 + SURFACE[4:], (0.5, 4.0, 2.5, 6.0), 2, 0),
        ),
    ),
}
DOCUMENTS = {kind: json.loads(dumps(fit)) for kind, fit in FITS.items()}
TEXT = dumps(rich_fit())


def sealed(document):
    """The document with its id recomputed, as a forger would; as fits/README.md defines it."""
    digested = {key: document.get(key) for key in ("rule", "entries", "source")}
    text = json.dumps(digested, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return document | {"id": "sha256:" + hashlib.sha256(text.encode()).hexdigest()}


def changed(kind, place, value):
    """The document of a kind with another value at a place, such as "entries.0.domain"."""
    document = copy.deepcopy(DOCUMENTS[kind])
    *parents, last = (int(key) if key.isdigit() else key for key in place.split("."))
    reduce(getitem, parents, document)[last] = value
    return document if place == "id" else sealed(document)
