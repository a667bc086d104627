"""The coefficient file: what is refused, of whatever bytes."""

import contextlib
import copy
import json
import re
import tracemalloc
from functools import reduce
from operator import getitem

import numpy as np
import pytest
from coefficient_cases import (
    DOCUMENTS,
    FITS,
    PAPER,
    SURFACE,
    TEXT,
    VALIDATOR,
    changed,
    rich_fit,
    sealed,
)  # fmt: skip

import calibrate
from calibrate.core.rule import CONSTANT, ENTROPY_AND_SIZE, KINDS, LOG_SIZE, POLYNOMIAL
from calibrate.store.coefficient_file import MAX_FIT_BYTES, MAX_FIT_MIB
from calibrate.store.entries import Entry
from calibrate.store.fit import dumps
from calibrate.store.loading import loads, read


def refusal(data):
    data = json.dumps(data) if isinstance(data, dict) else data
    with pytest.raises(calibrate.CoefficientsError) as caught:
        loads(data if isinstance(data, bytes) else data.encode())
    message = str(caught.value)
    assert message.isprintable(), message
    assert len(message) < 600
    return message


REVERSED = list(PAPER[::-1])
CHANGED = "they were rounded or changed since the fit"
CHECK = DOCUMENTS[ENTROPY_AND_SIZE]["entries"][0]["check"]
REFUSALS = {
    POLYNOMIAL: [
        ("format", "other", "not a fit file"),
        ("schema_version", "2.0", 'schema_version is "2.0"; this calibrate reads "1.0"'),
        ("name", "../evil", r"\$.name"),
        ("name", "\x1b[2J", r"\$.name"),
        ("version", 10**9, r"\$.version"),
        ("id", "sha256:" + "0" * 64, "id is sha256:0000.* give sha256:"),
        ("new\nline", 1, "unknown field `new line`"),
        ("\ud800", 1, r"\\ud800"),
        ("quality", {}, "unknown field `quality`"),
        ("x-deep", json.loads("[" * 40 + "]" * 40), "nested"),
        ("rule.kind", "log-size", "unknown field `entropy_unit`|`size_unit`"),
        ("rule.kind", "entropy-polynomial", r"\$.rule.kind"),
        ("rule.order", "ascending", r"\$.rule.order"),
        ("rule.outside", "extrapolate", r"\$.rule.outside"),
        ("rule.max_beta", 0.5, r"^rule is .*max_beta=0\.5"),
        ("rule.max_beta", 10**400, r"\$.rule.max_beta"),
        ("rule.min_entropy", -1.0, r"\$.rule.min_entropy"),
        ("rule.novel", 1, "unknown field `novel`"),
        ("entries", [], r"\$.entries"),
        ("entries.0.domain", [5.0, 1.0], r"entries\[0\].domain is \[5.0, 1.0\]"),
        ("entries.0.coefficients", [1.0, 2.0], r"entries\[0\].coefficients are .* give the 5"),
        ("entries.0.coefficients.2", None, r"\$.entries\[0\].coefficients\[2\]"),
        ("entries.0.coefficients.2", 1e39, r"\$.entries\[0\].coefficients\[2\]"),
        ("entries.0.coefficients", [1e38] * 5, "beyond float32"),
        (
            "entries.0.check",
            [[1.0, 2.0]] * 4,
            r"check is a list of 4; give .* \[\[0\.5\]",
        ),
        (
            "entries.0.check",
            [[1.0, 2.0]] * 5,
            r"check is a list of 5; give the rule's",
        ),
        ("entries.0.coefficients", REVERSED, r"write those of H\^4, H\^3, H\^2, H, 1$"),
        ("entries.0.coefficients", [0.0, 0.5, -2.3, 4.9, -1.8], CHANGED),
        ("entries.0.coefficients", [c * 1.001 for c in PAPER], CHANGED),
        ("entries.1.coefficients.3", 4.927, r"entries\[1\].*" + CHANGED),
        ("entries.0.layer", 40_000, r"\$.entries\[0\].layer"),
        ("entries.0.layer", 0.0, r"\$.entries\[0\].layer"),
        ("entries.1.layer", None, r"entries\[1\] is for layer None, head 0"),
        ("evidence.novel", 1, "unknown field `novel`"),
        ("evidence.inputs.fitted", 1.5, r"\$.evidence.inputs.fitted"),
        ("evidence.heads.0.penalty", "none", r"\$.evidence.heads\[0\].penalty"),
        ("evidence.heads.0.at_bound", True, r"\$.evidence.heads\[0\].at_bound"),
        ("evidence.heads.0.gain", None, r"\$.evidence.heads\[0\].gain"),
        ("evidence.held_out.0.nll_before", 1e39, r"\$.evidence.held_out\[0\].nll_before"),
        ("evidence.held_out.0.n", -1, r"\$.evidence.held_out\[0\].n"),
        ("evidence.kinds", [{}] * 17, r"\$.evidence.kinds"),
        ("evidence.verdict", "two\rlines", r"\$.evidence.verdict"),
        ("evidence.verdict", 2001 * "x", r"\$.evidence.verdict"),
        ("source.seed", 2**64, "source has 18446744073709551616"),
        ("source.options.x", [], "source.options"),
        ("source.options.x", 2**64, "source has 18446744073709551616"),
        ("source.options.a\u200eb", 1, "source.options"),
    ],
    CONSTANT: [
        ("entries.0.coefficients", [1.97182], r"coefficients is \[1.97182\]; .*" + CHANGED),
        ("entries.0.check", [[1.97182]], CHANGED),
        ("entries.0.check", [], r"check is \[\]; give the rule's value p"),
        ("entries.0.check", [[1.0, 1.97]], r"check is a list of 1; give the rule's value p"),
        ("entries.0.domain", [0.5, 5.9], "domain is .* and 0 ends of a domain"),
        ("rule.min_entropy", 0.0, "unknown field `min_entropy`"),
    ],
    LOG_SIZE: [
        ("rule.size_unit", "items", r"\$.rule.size_unit"),
        ("entries.0.coefficients", [0.25, 0.36], "write those of L, 1$"),
        ("entries.0.check", [[3.0, 2.0]] * 2, r"check is a list of 2; .* \[\[2\.5\], \[7\.0\]\]"),
        ("entries.0.domain", [2.5, 65.0], r"\$.entries\[0\].domain\[1\]"),
    ],
    ENTROPY_AND_SIZE: [
        ("rule.order", "descending", r"\$.rule.order"),
        ("entries.0.domain", [0.5, 5.9, 7.0, 2.5], r"domain is \[0.5, 5.9, 7.0, 2.5\]"),
        ("entries.0.check", CHECK[:5], r"check is a list of 5; give the rule's value p"),
        ("entries.0.check", [[0.4, *CHECK[0][1:]], *CHECK[1:]], "give the rule's value p"),
        ("entries.0.check", [*CHECK[:7], [5.9, 7.1, CHECK[7][2]]], "give the rule's value p"),
        ("entries.0.check", [CHECK[0], *CHECK[:1], *CHECK[2:]], "give the rule's value p"),
        ("entries.0.check.7.2", 9.0, CHANGED),
        ("entries.0.coefficients", SURFACE[::-1], r"write those of H\^4, H\^3, H\^2, H, 1, H L,"),
        ("entries.0.coefficients.6", -0.024, CHANGED),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_refusal_names_place_and_value(kind):
    for place, value, message in REFUSALS[kind]:
        text = refusal(changed(kind, place, value))
        assert re.search(message, text), (place, value, text)
        assert "; " in text  # and a remedy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT[: TEXT.index("fingerprint") + 40], "not JSON (Unterminated"),
        ("\ufeff" + TEXT, "not JSON (Unexpected UTF-8 BOM"),
        (TEXT.replace('"version": 1', '"version": 1, "version": 2'), "a key occurs twice"),
        (TEXT.replace("64.0", "NaN"), "not JSON (NaN is not a finite number)"),
        (TEXT.replace("64.0", "1e400"), "not JSON (1e400 is not a finite number)"),
        (TEXT.replace("64.0", "9" * 5_000), "not JSON (Exceeds the limit"),
        (TEXT.replace('"who": [', '"who": [[1e999], '), "1e999 is not a finite number"),
        ("[" * 100_000, "nested too deeply"),
        (TEXT + " " * MAX_FIT_BYTES, f"longer than {MAX_FIT_MIB} MiB"),
        ("[" + "0," * (1 << 21) + "0]", "more than 2,097,152 values"),
        (b"\xff" + TEXT.encode(), "not UTF-8 at byte 0"),
        ("{}", "not a fit file"),
        ('{"a": 1}', "not a fit file"),
        ("[1]", "not a fit file"),
    ],
)  # fmt: skip
def test_hostile_text_is_refused(text, message):
    assert message in refusal(text)


def check_bytes(data):
    """The fit of the bytes, if they are a file: its schema is kept, and it is written as it is."""
    try:
        fit = loads(data)
    except calibrate.CoefficientsError as error:
        assert str(error).isprintable()  # noqa: PT017
        return None
    document = json.loads(data)
    VALIDATOR.validate(document)
    assert json.loads(dumps(fit)) == document
    return fit


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_no_bytes_crash_the_reader_or_change_the_rule(fit):
    data, rng = dumps(fit).encode(), np.random.default_rng(0)
    pieces = (b'"', b"{", b"[", b",", b"1e999", b"NaN", b"\\ud800", b"9", b"\xff", b"")
    for at in rng.integers(len(data), size=200):
        found = check_bytes(data[:at] + pieces[rng.integers(10)] + data[at + rng.integers(3) :])
        assert found in (None, fit)


def paths(value, path=()):
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(item, (*path, key))


def variants(value):
    """What one mistake makes of a value: other types, out of range, longer or shorter."""
    yield from (None, True, 1.5, "", [], {}, -1, 40_000, 2**64, 1e39, "infinite", "min")
    if isinstance(value, str):
        yield from (value + "x", value.upper(), value + "\n", "a" * 1_001)
    if isinstance(value, list):
        yield from (value[:-1], [*value, *value[:1]], value * 300)
    if isinstance(value, dict):
        yield from ({**value, "novel": 1}, {**value, "x-novel": 1}, dict(list(value.items())[1:]))


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=pytest.mark.slow if x == POLYNOMIAL else ()) for x in KINDS]
)
def test_mistakes_that_the_loader_accepts_are_valid_and_written_again(kind):
    original, seen = DOCUMENTS[kind], set()
    for path in paths(original):
        if not path or any(type(step) is int and step > 0 for step in path):
            continue
        if kind != POLYNOMIAL and path[0] not in ("rule", "entries"):
            continue  # of every kind alike
        for value in variants(reduce(getitem, path, original)):
            document = copy.deepcopy(original)
            reduce(getitem, path[:-1], document)[path[-1]] = value
            seen.add(check_bytes(json.dumps(sealed(document)).encode()) is not None)
    assert seen == {True, False}


ENTRIES = tuple(
    Entry((0.1 + i / 3, 0.2, -0.3, 1 / 3, 1.0), (0.5, 5.0), i // 64, i % 64) for i in range(20_000)
)
LARGE = {
    "lists of one": b"[" + b"[0]," * (MAX_FIT_BYTES // 4 - 1) + b"0]",
    "as many lists as are read": b"[" + b"[0]," * ((1 << 20) - 1) + b"0]",
    "objects": b"{" + b",".join(b'"%x":{}' % i for i in range(700_000)) + b"}",
    "wide text": b'["' + "😀".encode() + b"a" * (MAX_FIT_BYTES - 8) + b'"]',
    "depth": b"[" * MAX_FIT_BYTES,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LARGE, "valid"])
def test_peak_memory_stays_within_256_mb(name, tmp_path):
    path = tmp_path / "large.json"
    path.write_bytes(LARGE.get(name) or dumps(rich_fit(entries=ENTRIES)).encode())
    tracemalloc.start()
    with contextlib.suppress(calibrate.CoefficientsError):
        read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 256e6
