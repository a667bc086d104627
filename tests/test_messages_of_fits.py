"""Wording of messages about fits to rows, and of what they warn."""

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import ToyHead, reopen
from messages import says, warns
from planted import planted_rows

import calibrate
from calibrate.datasets.collection import open_collection
from calibrate.datasets.logits_files import Arrays
from calibrate.errors import CalibrateError, QualityError
from calibrate.fitting.fit_collection import open_for_fit
from calibrate.fitting.fit_rule import fit_kind
from calibrate.fitting.options import Options
from calibrate.fitting.select import fit_and_select
from calibrate.parallel.jobs import Jobs
from calibrate.rows.collect import collect, collect_arrays
from calibrate.rows.score_head import score_head

RNG = np.random.default_rng(0)
Z = 2 * RNG.normal(size=(1_000, 8))
T = (Z + RNG.gumbel(size=Z.shape)).argmax(1)  # as softmax(Z) has it
NOISE = RNG.integers(0, 8, 1_000)


def changed(rows, value):
    """The logits, whose targets in so many rows have that value."""
    logits = Z.copy()
    logits[np.arange(rows), T[:rows]] = value
    return logits


def fit(logits=Z, target=T, **options):
    return partial(calibrate.fit, logits, target, **options)


def collected():
    return collect(ToyHead(), [16, 32], 64, 0, Path("run"))


def unfinished(*lost):
    collected()
    reopen(Path("run"), *lost)


SHARD = "n00016-unit00000.npz"


def without_shards():
    unfinished(SHARD, "n00032-unit00000.npz")
    open_for_fit(Path("run"), allow_partial=True)


def damaged():
    collected()
    os.truncate(f"run/{SHARD}", 100)
    collected()


def of_other_bytes():
    """A shard is made again, and its bytes are not those that the manifest lists."""
    collected()
    manifest = Path("run/manifest.json")
    text = manifest.read_text()
    digest = json.loads(text)["shards"][0]["sha256"]
    manifest.write_text(text.replace(digest, "sha256:" + "0" * 64))
    with pytest.warns(UserWarning, match=SHARD):
        collected()


def part_of_a_collection():
    unfinished()
    open_for_fit(Path("run"), allow_partial=True)


def limited():
    np.savez("mine.npz", logits=Z, target=T)
    collect_arrays(Arrays.read(Path("mine.npz")), Path("run"), max_bytes=20_000)


def changed_file():
    np.savez("mine.npz", logits=Z, target=T)
    read = Arrays.read(Path("mine.npz")).reader(8, 0, 20)
    np.savez("mine.npz", logits=-Z, target=T)
    read()


def padded():
    logits = Z.copy()
    logits[:600, 6:] = 0
    np.savez("mine.npz", logits=logits, target=np.minimum(T, 5))
    Arrays.read(Path("mine.npz"))


def planted(beta=1.0, **columns):
    rows = planted_rows(lambda H, n: np.full_like(H, beta), (64,))
    return rows._replace(**{name: make(rows) for name, make in columns.items()})


def of_another_head():
    head = ToyHead()
    score_head(head, [8], 10, 0, {"own": calibrate.load("max-retrieval")})


def masked_by_a_number():
    def spoil(logits):
        logits[logits < 1] = -1e9

    collect(ToyHead(spoil=spoil), [16], 64, 0, Path("run"))


# How to provoke it, what is raised, and its text.
MESSAGES = {
    "no-information": (
        fit(target=NOISE),
        QualityError,
        (
            "the logits carry no information about the targets (argmax is right in 13.4% of the "
            "rows, a guess in 12.5%); check that target holds the positions that should win"
        ),
    ),
    "bad-rows": (
        fit(changed(20, np.nan)),
        QualityError,
        (
            "20 of 1,000 rows are bad (20 nan), more than 1%; look at the head's logits before "
            "calibrating it"
        ),
    ),
    "targets-of-probability-0": (
        fit(changed(80, -np.inf)),
        QualityError,
        (
            "80 of 1,000 rows are bad (80 masked_target), more than 1%; a target must be a real "
            "item; the logits of these are -inf (probability 0) or far below the highest: clip "
            "probabilities before the logarithm, or check the targets"
        ),
    ),
    "inverted-mask": (
        fit(changed(80, -np.inf), mask=np.ones(8, bool)),
        QualityError,
        (
            "80 of 1,000 rows are bad (80 masked_target), more than 1%; a target must be a real "
            "item; is the mask, True for real items, inverted?"
        ),
    ),
    "no-weight": (
        fit(weight=np.zeros(1_000)),
        QualityError,
        "arrays has no row of any weight; give some",
    ),
    "few-prompts": (
        fit(group=np.arange(1_000) % 5),
        QualityError,
        (
            "arrays has 1000 usable rows from 5 groups (prompts), of which 20% are held out; "
            "give at least 125 rows from 10 groups"
        ),
    ),
    "no-shard": (
        without_shards,
        CalibrateError,
        "run has no shard yet; run the same command again",
    ),
    "other-bytes": (
        of_other_bytes,
        CalibrateError,
        "{here}/run/n00016-unit00000.npz cannot be repaired: made again, it has another digest "
        "than manifest.json lists, as on another machine or with another version; restore the file "
        "from a copy, or collect into a new folder",
    ),
    "changed-file": (
        changed_file,
        CalibrateError,
        "{here}/mine.npz changed while it was in use; run the command again",
    ),
    "unfinished": (
        lambda: (unfinished(), open_collection(Path("run"))),
        CalibrateError,
        (
            "run is unfinished; run the same command again or fit its finished shards: "
            "`calibrate fit --allow-partial`"
        ),
    ),
    "one-size": (
        lambda: fit_kind(planted(), "entropy-and-size"),
        QualityError,
        (
            "the rows have 1 number of items and entropies of 1.466 to 4.119 nats, too few for "
            "such a rule; collect sets of more sizes"
        ),
    ),
    "one-entropy": (
        lambda: fit_kind(planted(entropy=lambda rows: 5 + 1e-9 * rows.entropy), "polynomial"),
        QualityError,
        "the entropies 5 to 5 nats are too close together for powers of them",
    ),
    "few-groups": (
        lambda: fit_kind(planted(group=lambda rows: np.arange(len(rows.size)) % 4), "constant"),
        QualityError,
        (
            "the rows come from 4 groups (prompts), fewer than the 5 that a fit needs; collect "
            "rows of more prompts"
        ),
    ),
    "unsent-head": (
        lambda: collect(
            type("Head", (ToyHead,), {"__reduce__": lambda self: [] + 1})(),
            [16],
            64,
            0,
            Path("run"),
            jobs=Jobs(2),
        ),
        CalibrateError,
        (
            "the task cannot be sent to another process (TypeError: can only concatenate list "
            '(not "int") to list); load the head by its name (module:attribute), or use one '
            "process"
        ),
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_names_the_fault_and_the_remedy(name):
    fails, kind, text = MESSAGES[name]
    with says(kind, text):
        fails()


NO_GAIN = (
    "not for this head: no rule beats the baseline by 0.01 nats on average and significantly on "
    "held-out rows (nats of log-likelihood, sizes equal: <*>); "
)


def test_no_gain():
    text = NO_GAIN + (
        "leave its softmax as it is, check that the targets are the items that should win, or give "
        "more rows"
    )
    with says(QualityError, text):
        fit_and_select(planted(), Options())


def test_a_beta_below_1():
    text = NO_GAIN + "<*> is below 1: give a smaller min_beta="
    with says(QualityError, text):
        fit_and_select(planted(0.3), Options())


def test_an_option_that_is_the_cause():
    rows = planted_rows(lambda H, n: np.full_like(H, 2.5))
    text = (
        "0 usable rows, fewer than the 100 that a fit needs; collect more sets, or larger sets; of "
        "arrays, give more rows; min_entropy=10.0 is the cause: with 0.0 constant gains <*> nats"
    )
    with says(QualityError, text):
        fit_and_select(rows, Options(min_entropy=10.0))


@pytest.mark.parametrize(
    ("logits", "target", "text"),
    [
        (
            Z,
            T + 8,
            "y has other values than positions 0 to 7; give the items to win, and of a "
            "classifier's labels numpy.searchsorted(classifier.classes_, labels)",
        ),
        (changed(1, np.nan), T, "X has NaN or infinity; give logits, -inf where masked"),
    ],
)
def test_numbers_for_scikit_learn(logits, target, text):
    with says(ValueError, text):
        calibrate.SoftmaxCalibrator().fit(logits, target)


# How to provoke it, and its text; numbers that are only counts are left open.
WARNINGS = {
    "rows-left-out": (
        lambda: calibrate.fit(0.4 * changed(4, np.nan), T),
        "4 of 1,000 rows are left out: they have NaN, +inf or a masked target",
    ),
    "upper-bound": (
        lambda: calibrate.fit(1e-3 * Z, T),
        "beta is at its upper bound 64 on most rows: multiply the logits by 64 and fit again",
    ),
    "sample": (
        limited,
        "mine.npz: <*> of 1,000 rows are kept, a sample by size, head and weight; the limits are "
        "262,144 rows and 20,000 bytes",
    ),
    "padding": (
        padded,
        "{here}/mine.npz: logits have rows, 59% of them, that end in equal scores (0): padding? "
        "give mask=, or -inf there, or these items count",
    ),
    "damaged-shard": (damaged, "run/n00016-unit00000.npz is damaged; it is collected again"),
    "unfinished": (
        part_of_a_collection,
        "run is unfinished; the fit is made of its 2 finished shards",
    ),
    "another-head": (
        of_another_head,
        "max-retrieval@4 was made for head 'max-retrieval-0' (sha256:<*>), and is "
        "scored on 'toy' (sha256:toy-0.5)",
    ),
    "finite-masks": (
        masked_by_a_number,
        "head 'toy': attend gave <*> finite logits that count as masked, as they lie more than "
        "9,000 below the highest logit of their row; the fit, once loaded, treats them so too. "
        "Write -inf for masked items to say so yourself",
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning_names_the_fault_and_the_remedy(name):
    told, text = WARNINGS[name]
    with warns(text):
        told()
