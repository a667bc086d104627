"""Wording of messages, each in full: other tests assert the class and the value that is named.

Those of one subject are in test_messages_of_*.py; those about options, commands and parameters in
test_errors.py; verdicts in test_sentences.py.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from conftest import ToyHead
from messages import says
from planted import planted_rows

import calibrate
from calibrate.datasets.collection import open_collection
from calibrate.datasets.logits_files import Arrays
from calibrate.datasets.logits_recorder import Recorder
from calibrate.datasets.resume import discard_collection
from calibrate.errors import CalibrateError, CoefficientsError, DamagedError, QualityError
from calibrate.fitting.fit_rule import fit_kind
from calibrate.fitting.options import Options
from calibrate.rows.collect import collect
from calibrate.rows.work_units import UnitSizes

RNG = np.random.default_rng(0)
Z = RNG.normal(size=(40, 16))
T = Z.argmax(1)


def fit(*arguments, **options):
    return lambda: calibrate.fit(*arguments, **options)


def empty_folder():
    Path("empty").mkdir()
    Arrays.read(Path("empty"))


def collected(**changes):
    """A collection in `run`."""
    options = {"sizes": [8], "sets": 100, "seed": 0, "keep": "misranked"} | changes
    return collect(ToyHead(), folder=Path("run"), **options)


def foreign_folder():
    Path("run").mkdir()
    Path("run/thesis.tex").write_text("important")
    collected()


def foreign_manifest():
    Path("run").mkdir()
    Path("run/manifest.json").write_text('{"format": "web"}')
    discard_collection(Path("run"))


def foreign_file():
    collected()
    Path("run/thesis.tex").write_text("important")
    discard_collection(Path("run"))


def another_collection():
    collected()
    collected(sets=200)


def large_manifest():
    collected()
    os.truncate("run/manifest.json", 1 << 24)
    open_collection(Path("run"))


def manifest_of_many_values():
    collected()
    Path("run/manifest.json").write_bytes(b"[" + b"[]," * 300_000 + b"0]")
    open_collection(Path("run"))


def rule(kind, options=None, n_rows=150, n_entropies=None):
    """Fits a rule to so many rows, and of so many different entropies."""

    def fits():
        rows = planted_rows(lambda H, n: 1.2 + 0.5 * H, count=60).take(np.arange(n_rows))
        if n_entropies:
            rows = rows._replace(entropy=2.0 + np.arange(n_rows) % n_entropies)
        fit_kind(rows, kind, options or Options())

    return fits


def recorded(group):
    """Records the logits of two sequences."""

    def records():
        recorder = Recorder(Path("run"), 10**9)
        recorder.next(query=0, target=1, group=group)
        recorder.add(0, np.zeros((2, 1, 3), np.float32), 3)

    return records


def many_shards():
    collected(sets=30_001, unit_sizes=UnitSizes(max_sets=1))


# How to provoke it, what is raised, and its text.
MESSAGES = {
    "option-min-beta": (
        fit(Z, T, min_beta=0),
        CalibrateError,
        "min_beta is 0; give a number from 0.015625 to 1",
    ),
    "option-of-likelihood": (
        fit(Z, T, kind="polynomial", loss="least-squares", trained_up_to=16),
        CalibrateError,
        "loss least-squares has no trained_up_to; leave out trained_up_to=, or give "
        'loss="likelihood"',
    ),
    "option-tolerance-of-likelihood": (
        fit(Z, T, kind="polynomial", loss="log-least-squares", tolerance=0),
        CalibrateError,
        'loss log-least-squares has no tolerance; leave out tolerance=, or give loss="likelihood"',
    ),
    "option-loss-of-a-polynomial": (
        lambda: calibrate.fit_polynomial(
            calibrate.solve(calibrate.collect(ToyHead(), [16], 8)), loss="likelihood"
        ),
        CalibrateError,
        "loss is 'likelihood'; give one of log-least-squares, least-squares",
    ),
    "option-name": (
        fit(Z, T, name="Bad Name"),
        CoefficientsError,
        "'Bad Name' is not a valid fit name; use lower-case letters, digits, '.', '_' and "
        "'-', at most 64, the first a letter or digit, and no .json at the end",
    ),
    "option-refit": (
        fit(Z, T, head=T % 2, refit=True),
        CalibrateError,
        "refit=True fits one rule; leave it out with layer and head",
    ),
    "few-rows": (
        fit(Z, T),
        QualityError,
        "arrays has 40 usable rows from 40 groups (prompts), of which 20% are held out; give "
        "at least 125 rows from 10 groups",
    ),
    "absent": (
        lambda: Arrays.read(Path("absent.npz")),
        CalibrateError,
        "{here}/absent.npz does not exist; check the path",
    ),
    "no-files": (
        empty_folder,
        CalibrateError,
        "{here}/empty has no .npz file; give files with arrays logits and target",
    ),
    "foreign-folder": (
        foreign_folder,
        CalibrateError,
        "run is not a collection and not empty; choose a new folder",
    ),
    "foreign-manifest": (
        foreign_manifest,
        CalibrateError,
        "run/manifest.json is not the manifest of a collection; choose another folder, or "
        "delete this one",
    ),
    "foreign-file": (
        foreign_file,
        CalibrateError,
        "run/thesis.tex is not part of a collection, and nothing is deleted; move it away, "
        "or choose another folder",
    ),
    "another-collection": (
        another_collection,
        CalibrateError,
        "run is another collection: sets is 100 in the folder and 200 in this call; give the "
        "same options, another folder with folder=, or overwrite=True to replace it",
    ),
    "large-manifest": (
        large_manifest,
        DamagedError,
        "cannot read run/manifest.json: it has 16,777,216 bytes, more than the limit of "
        "8,388,608; restore it or collect into a new folder",
    ),
    "manifest-of-many-values": (
        manifest_of_many_values,
        DamagedError,
        "run/manifest.json is not a manifest (it has more than 524,288 values); restore it "
        "or collect into a new folder",
    ),
    "many-shards": (
        many_shards,
        CalibrateError,
        "run would have 30,001 shards, more than the limit of 30,000; collect less, or into "
        "several folders",
    ),
    "few-bytes": (
        lambda: collected(max_bytes=1_000),
        CalibrateError,
        "max_bytes is 1000, too few for one row of each unit; give at least 4688",
    ),
    "large-seed": (
        lambda: collected(seed=1 << 64),
        CalibrateError,
        "cannot collect into run: configuration.seed is 18446744073709551616; give an "
        "integer from 0 to 18446744073709551615",
    ),
    "save-extension": (
        lambda: calibrate.identity().save("x.txt"),
        CoefficientsError,
        "'x.txt' is not a .json file in an existing folder",
    ),
    "not-a-fit": (
        lambda: calibrate.adaptive_softmax(Z, "paper"),
        CoefficientsError,
        "coefficients is 'paper'; give a fit, such as calibrate.load('max-retrieval')",
    ),
    "absent-fit": (
        lambda: calibrate.load("nothing"),
        CoefficientsError,
        "no fit is named 'nothing' in {here}/fits, {store}; `calibrate fit` makes one",
    ),
    "absent-version": (
        lambda: calibrate.load("paper@9"),
        CoefficientsError,
        "'paper@9' does not exist in {store}/paper; the newest versions there: paper@1",
    ),
    "no-collection": (
        lambda: open_collection(Path("nowhere")),
        CalibrateError,
        "nowhere is not a collection; make one with `calibrate collect`",
    ),
    "few-usable-rows": (
        rule("constant", n_rows=99),
        QualityError,
        "99 usable rows, fewer than the 100 that a fit needs; collect more sets, or larger "
        "sets; of arrays, give more rows",
    ),
    "few-misranked-rows": (
        rule("polynomial", Options.of_the_paper(), n_rows=20),
        QualityError,
        "9 misranked rows with a finite optimal beta, and the polynomial needs 100; collect "
        "more sets, or larger ones",
    ),
    "few-rows-of-all": (
        rule("polynomial", Options.of_the_paper()._replace(rows="all"), n_rows=20),
        QualityError,
        "9 rows with a finite optimal beta, and the polynomial needs 100; collect more sets, "
        "or larger ones",
    ),
    "two-entropies": (
        rule("polynomial", n_entropies=2),
        QualityError,
        "the rows do not determine a rule of kind polynomial; collect more sets, or larger "
        "sets; of arrays, give more rows",
    ),
    "threshold-of-no-entropy": (
        rule("log-size", Options(min_entropy=0.5)),
        QualityError,
        "a rule of log n does not depend on entropy, and has no threshold",
    ),
    "group-count": (
        recorded([1, 2, 3]),
        CalibrateError,
        "group has 3 values for the 2 sequences of the forward pass; give one for each "
        "sequence, or one for all",
    ),
    "group-negative": (
        recorded([1, -1]),
        CalibrateError,
        "group is [1, -1]; give integers >= 0",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_names_the_fault_and_the_remedy(name):
    fails, kind, text = MESSAGES[name]
    with says(kind, text):
        fails()
