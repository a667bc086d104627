"""Wording of messages about stores, fits in them, and references to them."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from messages import says

import calibrate
from calibrate.core.rule import Rule
from calibrate.errors import CoefficientsError
from calibrate.storage.strict_json import Refusal
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry
from calibrate.store.publishing import alias, publish, yank

FIT = Coefficients(Rule(), (Entry((0.0, 0.0, 0.0, 1.0, 1.0), (0.2, 4.0)),), name="made")
STORE, STATE = Path("fits"), Path("fits/made/state.json")


def published(n=2):
    for ceiling in range(2, 2 + n):
        fit = replace(FIT, rule=Rule(max_beta=float(ceiling)))
        publish(fit, STORE)
    yank("made@2", STORE)


def linked():
    STORE.mkdir()
    Path("outside").mkdir()
    (STORE / "made").symlink_to(Path("outside").resolve())
    publish(FIT, STORE)


def over_a_file():
    STORE.mkdir()
    (STORE / "made").write_text("")
    publish(FIT, STORE)


def renamed():
    published()
    Path("fits/made/1.json").rename("fits/made/7.json")
    calibrate.load("made@7", STORE)


def loaded(reference, *yanked):
    """Loads from a store of two versions, of which the second was yanked."""
    published()
    alias("made@1", "stable", STORE)
    for number in yanked:
        yank(f"made@{number}", STORE)
    calibrate.load(reference, STORE)


def named(reference, name):
    published()
    alias(reference, name, STORE)


def spoilt(**changes):
    published()
    STATE.write_text(json.dumps(json.loads(STATE.read_text()) | changes))
    calibrate.load("made", STORE)


def without_state():
    published()
    STATE.unlink()
    os.mkfifo(STATE)
    calibrate.load("made", STORE)


def damaged_log():
    published()
    STATE.unlink()
    Path("fits/made/log.jsonl").write_text("{")
    calibrate.load("made", STORE)


# How to provoke it, what is raised, and its text.
MESSAGES = {
    "link": (
        linked,
        CoefficientsError,
        "fits/made is a link; write into the store that it points to",
    ),
    "file-for-a-folder": (
        over_a_file,
        CoefficientsError,
        (
            "cannot write fits/made/state.json: Not a directory; choose a folder that you may "
            "write to"
        ),
    ),
    "no-store": (
        lambda: calibrate.load("paper", "nowhere"),
        CoefficientsError,
        "nowhere does not exist; give a folder of fits",
    ),
    "store-of-a-file": (
        lambda: calibrate.load("paper", Path("x.txt").write_text("") or "x.txt"),
        CoefficientsError,
        "x.txt is not a folder; give a folder of fits",
    ),
    "no-alias": (
        lambda: calibrate.load("paper@stable"),
        CoefficientsError,
        "'paper' in {store}/paper has no alias 'stable'; it has none",
    ),
    "no-file": (
        lambda: calibrate.load("nowhere/fit.json"),
        CoefficientsError,
        "nowhere/fit.json does not exist; check the path",
    ),
    "reference-of-none": (
        lambda: calibrate.load(None),
        CoefficientsError,
        "None is not a valid reference; use a name or a path",
    ),
    "reference": (
        lambda: calibrate.load("paper@"),
        CoefficientsError,
        (
            "'paper@' is not a valid reference; use NAME, NAME@VERSION, NAME@ALIAS or a path to "
            "a .json file"
        ),
    ),
    "null-byte": (
        lambda: calibrate.load("a\0/b.json"),
        CoefficientsError,
        "cannot read a\\x00/b.json: embedded null byte; check the path",
    ),
    "other-name-and-version": (
        renamed,
        CoefficientsError,
        (
            "fits/made/7.json is made@1; its path must have that name and version: restore the "
            "file, or load it by its path"
        ),
    ),
    "too-long": (
        lambda: publish(
            replace(FIT, entries=tuple(replace(FIT.only, layer=0, head=i) for i in range(12_000))),
            STORE,
        ),
        Refusal,
        "the file is longer than 1 MiB; give a coefficient file, which never is",
    ),
    "unprintable": (
        lambda: publish(replace(FIT, source={"head": "two\nlines"}), STORE),
        Refusal,
        'source.head is "two\\nlines"; give one line of 1 to 1000 printable characters',
    ),
    "no-json": (
        lambda: publish(replace(FIT, quality={"rows": {1, 2}}), STORE),
        CoefficientsError,
        (
            "made@1 cannot be written as JSON (Object of type set is not JSON serializable); "
            "give texts, finite numbers, lists and dicts of them"
        ),
    ),
    "other-head": (
        lambda: calibrate.load("max-retrieval", fingerprint="sha256:0"),
        CoefficientsError,
        (
            "max-retrieval@4 was made for head 'max-retrieval-0' (sha256:<*>), not for sha256:0; "
            "calibrate this head, or leave `fingerprint` out if you mean it"
        ),
    ),
    "yanked-under-an-alias": (
        partial(loaded, "made@stable", 1),
        CoefficientsError,
        (
            "made@stable leads to made@1, which was yanked; move the alias, or load the version "
            "by its number"
        ),
    ),
    "all-yanked": (
        partial(loaded, "made", 1),
        CoefficientsError,
        (
            "every version of 'made' in fits/made was yanked; pin one, such as made@2, or "
            "publish another"
        ),
    ),
    "yanked": (
        partial(named, "made@2", "stable"),
        CoefficientsError,
        "made@2 was yanked; choose another version",
    ),
    "alias": (
        partial(named, "made@1", "1"),
        CoefficientsError,
        (
            "'1' is not a valid alias; use lower-case letters, digits, '.', '_' and '-', the "
            "first a letter"
        ),
    ),
    "alias-of-no-version": (
        partial(named, "made", "stable"),
        CoefficientsError,
        "'made' has no version number; use NAME@VERSION",
    ),
    "alias-of-a-published-fit": (
        partial(named, "paper@1", "stable"),
        CoefficientsError,
        (
            "paper@1 is in {store}, which is not changed; name its store, or copy its folder "
            "into your own"
        ),
    ),
    "state-value": (
        partial(spoilt, highest=-1),
        CoefficientsError,
        (
            "fits/made/state.json: highest is -1; give an integer from 0 to 999999999; restore "
            "it, or remove it and with it aliases and yanks"
        ),
    ),
    "state-list": (
        partial(spoilt, yanked=[0]),
        CoefficientsError,
        (
            "fits/made/state.json: yanked[0] is 0; give an integer from 1 to 999999999; restore "
            "it, or remove it and with it aliases and yanks"
        ),
    ),
    "state-of-no-file": (
        without_state,
        CoefficientsError,
        "cannot read fits/made/state.json: it is not a regular file; check the path",
    ),
    "log": (
        damaged_log,
        CoefficientsError,
        (
            "fits/made/log.jsonl: the file is not JSON (Expecting property name enclosed in "
            "double quotes (char 1)); restore the file from where it was published; restore it, "
            "or remove it and with it aliases and yanks"
        ),
    ),
    "two-entries-of-a-head": (
        lambda: replace(FIT, entries=(FIT.only, FIT.only)),
        CoefficientsError,
        (
            "entries[0] is for layer None, head None (None: all), which another entry covers "
            "too; keep one of them"
        ),
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_names_the_fault_and_the_remedy(name):
    fails, kind, text = MESSAGES[name]
    with says(kind, text):
        fails()
