"""The coefficient file: what it keeps, and what it refuses."""

import contextlib
import copy
import hashlib
import json
import re
import runpy
import tracemalloc
from contextlib import nullcontext
from functools import reduce
from operator import getitem
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import calibrate
from calibrate.core import rule as rules
from calibrate.core.rule import (
    CONSTANT,
    ENTROPY_AND_SIZE,
    KINDS,
    LOG_SIZE,
    POLYNOMIAL,
    RuleForm,
    surface,
)
from calibrate.store import coefficient_file
from calibrate.store.check_pairs import make_check_pairs, verify_check_pairs
from calibrate.store.coefficient_file import MAX_FIT_BYTES, MAX_FIT_MIB
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit, dumps
from calibrate.store.loading import loads, read
from calibrate.store.references import published_store

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
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


def refusal(data):
    data = json.dumps(data) if isinstance(data, dict) else data
    with pytest.raises(calibrate.CoefficientsError) as caught:
        loads(data if isinstance(data, bytes) else data.encode())
    message = str(caught.value)
    assert message.isprintable(), message
    assert len(message) < 600
    return message


def changed(kind, place, value):
    """The document of a kind with another value at a place, such as "entries.0.domain"."""
    document = copy.deepcopy(DOCUMENTS[kind])
    *parents, last = (int(key) if key.isdigit() else key for key in place.split("."))
    reduce(getitem, parents, document)[last] = value
    return document if place == "id" else sealed(document)


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
printable = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20)
bounds = (st.floats(0.1, 1), st.floats(1, 1e9))
some_rules = {
    CONSTANT: st.builds(RuleForm.constant, *bounds),
    LOG_SIZE: st.builds(RuleForm.log_size, *bounds),
    POLYNOMIAL: st.builds(
        RuleForm,
        st.floats(0, 9),
        *bounds,
        st.sampled_from(["clamp", "identity"]),
        st.just(POLYNOMIAL),
    ),
    ENTROPY_AND_SIZE: st.builds(
        RuleForm, st.floats(0, 9), *bounds, st.just("clamp"), st.just(ENTROPY_AND_SIZE)
    ),
}


@st.composite
def fits(draw):
    kind = draw(st.sampled_from(KINDS))
    powers = draw(st.tuples(*[st.floats(-1e6, 1e6)] * rules.N_COEFFICIENTS[kind]))
    n = rules.N_DOMAIN[kind] // 2
    lows = draw(st.lists(st.floats(0, 10), min_size=n, max_size=n))
    domain = [x for lo in lows for x in (lo, lo + draw(st.floats(0.01, 20)))]
    layer, head = (draw(st.none() | st.integers(0, 32767)) for _ in range(2))
    json_values = st.recursive(
        st.none() | finite | st.booleans() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=6,
    )
    options = st.dictionaries(printable, st.none() | finite | st.booleans() | printable)
    return rich_fit(
        rule=draw(some_rules[kind]),
        entries=(Entry(powers, tuple(domain), layer, head),),
        name=draw(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True)),
        version=draw(st.integers(1, 999_999_999)),
        evidence={"verdict": draw(printable), "heads": [{"penalty": draw(finite)}]},
        source={"seed": draw(st.integers(0, 2**64 - 1)), "options": draw(options)},
        extra=draw(st.dictionaries(printable.map(lambda name: "x-" + name), json_values)),
    )


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(fits())
def test_a_written_fit_keeps_the_schema_and_is_read_again(fit):
    text = dumps(fit)
    VALIDATOR.validate(json.loads(text))
    again = loads(text.encode())
    assert again == fit
    for field in ("name", "version", "evidence", "source", "provenance", "extra"):
        assert getattr(again, field) == getattr(fit, field)
    assert dumps(again) == text


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_file_do_not_change(kind):
    path = GOLDEN / f"coefficient-file-1.0-{kind}.json"
    fit = read(path)
    assert (fit, fit.evidence, fit.source) == (FITS[kind], FITS[kind].evidence, FITS[kind].source)
    assert dumps(fit) == dumps(FITS[kind]) == path.read_text()
    VALIDATOR.validate(json.loads(path.read_text()))


def test_the_schema_has_the_types_that_the_loader_checks():
    write_schemas = runpy.run_path(str(ROOT / "scripts" / "tools" / "write_schemas.py"))
    text = write_schemas["text_of"](write_schemas["json_schema"]()) + "\n"
    assert SCHEMA_FILE.read_text() == text
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)


@pytest.mark.parametrize(
    "path", sorted(published_store().glob("*/1.json")), ids=lambda path: path.parent.name
)
def test_shipped_files_keep_the_schema_and_round_trip(path):
    fit = calibrate.load(path)
    assert (fit.name, fit.version) == (path.parent.name, 1)
    VALIDATOR.validate(json.loads(path.read_text()))
    assert dumps(fit) == path.read_text()


def test_the_shipped_paper_fit_is_the_papers_polynomial(paper):
    assert (paper.only.coefficients, paper.only.domain) == (PAPER, (0.5, 5.945))
    assert paper.rule == RuleForm(0.5, 1.0, 64.0, "identity")
    assert paper.fingerprint is None


def test_numbers_and_layout_may_be_spelled_in_another_way():
    """JavaScript writes 64.0 as 64."""
    entry = Entry((-0.037, 0.481, -2.0, 4.917, -1.0), (1.0, 5.0), 0, 3)
    fit = rich_fit(entries=(entry,))
    shorter = re.sub(r"([0-9])\.0(?=[],\n])", r"\1", dumps(fit))
    assert '"domain": [1, 5]' in shorter
    assert loads(shorter.encode()) == fit
    shuffled = dict(reversed(DOCUMENTS[POLYNOMIAL].items()))
    spaced = json.dumps(shuffled, indent=7).replace("\n", "\r\n")
    assert dumps(loads(spaced.encode())) == TEXT


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"calibrate.fit"', b'"calibrate.row"'), (b'"seed": 9', b'"seed": 8'), (b"\n}\n", b"\n")],
)
def test_saving_over_a_damaged_file_is_refused(tmp_path, old, new):
    """Even if the file still has the id of the fit."""
    path, fit = tmp_path / "mine.json", rich_fit()
    assert fit.save(path) == fit.save(path) == path
    whole = path.read_bytes()
    assert old in whole
    path.write_bytes(whole.replace(old, new))
    with pytest.raises(calibrate.CoefficientsError, match=r"mine\.json exists"):
        fit.save(path)
    assert path.read_bytes() == whole.replace(old, new)
    fit.save(path, overwrite=True)
    assert path.read_bytes() == whole


def test_a_large_fit_is_written_on_one_line():
    fit = rich_fit(extra={"x-list": [""] * 1_500_000})
    text = dumps(fit)
    assert text.count("\n") == 1
    assert loads(text.encode()).extra == fit.extra


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "My Head"), ("name", "../x"), ("name", ""), ("name", None), ("version", 0),
     ("evidence", {"verdict": "a\nb"}), ("source", {"seed": -1}), ("extra", {"note": 1}),
     ("provenance", {"created": "today"})],
)  # fmt: skip
def test_a_fit_that_could_not_be_read_again_is_not_saved(tmp_path, field, value):
    place = "note" if field == "extra" else field
    with pytest.raises(calibrate.CoefficientsError, match=rf"^{place}\b"):
        rich_fit(**{field: value}).save(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


def test_numpys_numbers_become_floats():
    entry = Entry(tuple(np.float32([1, 2, 3, 4, 5])), (np.float32(0.1), 3))
    assert {type(x) for x in (*entry.coefficients, *entry.domain)} == {float}
    assert loads(dumps(rich_fit(entries=(entry,))).encode()).entries == (entry,)


def test_the_largest_number_of_float32_is_read():
    largest = float(np.finfo(np.float32).max)
    fit = Fit(RuleForm.constant(1.0, largest), (Entry((largest,)),))
    assert loads(dumps(fit).encode()) == fit
    assert np.isfinite(calibrate.inverse_temperature(None, fit))


REVERSED = list(PAPER[::-1])
CHANGED = "they were rounded or changed since the fit"
CHECK = DOCUMENTS[ENTROPY_AND_SIZE]["entries"][0]["check"]
REFUSALS = {
    POLYNOMIAL: [
        ("format", "other", 'format is "other"'),
        ("schema_version", "2.0", 'schema_version is "2.0"; this calibrate reads "1.0"'),
        ("name", "../evil", 'name is "../evil"'),
        ("name", "\x1b[2J", r'name is "\\u001b\[2J"'),
        ("version", 10**9, "version is 1000000000"),
        ("id", "sha256:" + "0" * 64, "id is sha256:0000.* give sha256:"),
        ("new\nline", 1, r'^"new\\nline" is not a known field'),
        ("\ud800", 1, r"\\ud800"),
        ("quality", {}, "^quality is not a known field"),
        ("x-deep", json.loads("[" * 40 + "]" * 40), "nested"),
        ("rule.kind", "log-size", "^rule.size_unit is absent|^rule.* is not a known field"),
        ("rule.kind", "entropy-polynomial", 'rule.kind is "entropy-polynomial"'),
        ("rule.order", "ascending", 'rule.order is "ascending"'),
        ("rule.outside", "extrapolate", 'rule.outside is "extrapolate"'),
        ("rule.max_beta", 0.5, "rule.max_beta 0.5"),
        ("rule.max_beta", 10**400, "rule.max_beta is 10000.* out of range"),
        ("rule.min_entropy", -1.0, "rule.min_entropy is -1.0"),
        ("rule.novel", 1, "rule.novel is not a known field"),
        ("entries", [], "entries is .* length >= 1"),
        ("entries.0.domain", [5.0, 1.0], r"entries\[0\].domain is \[5.0, 1.0\]"),
        ("entries.0.coefficients", [1.0, 2.0], r"entries\[0\].coefficients are .* give the 5"),
        ("entries.0.coefficients.2", None, r"coefficients\[2\] is null"),
        ("entries.0.coefficients.2", 1e39, r"coefficients\[2\] is 1e\+39"),
        ("entries.0.coefficients", [1e38] * 5, "beyond float32"),
        ("entries.0.check", [[1.0, 2.0]] * 4, r"check is a list of 4; give 5 pairs"),
        ("entries.0.check", [[1.0, 2.0]] * 5, r"entries\[0\].check is at the .* give 5 distinct"),
        ("entries.0.coefficients", REVERSED, r"write those of H\^4, H\^3, H\^2, H, 1$"),
        ("entries.0.coefficients", [0.0, 0.5, -2.3, 4.9, -1.8], CHANGED),
        ("entries.0.coefficients", [c * 1.001 for c in PAPER], CHANGED),
        ("entries.1.coefficients.3", 4.927, r"entries\[1\].*" + CHANGED),
        ("entries.0.layer", 40_000, r"entries\[0\].layer is 40000"),
        ("entries.0.layer", 0.0, r"entries\[0\].layer is 0.0"),
        ("entries.1.layer", None, r"entries\[1\] is for layer None, head 0"),
        ("evidence.novel", 1, "evidence.novel is not a known field"),
        ("evidence.inputs.fitted", 1.5, "evidence.inputs.fitted is 1.5"),
        ("evidence.heads.0.penalty", "none", r'evidence.heads\[0\].penalty is "none"'),
        ("evidence.heads.0.at_bound", True, "at_bound is true"),
        ("evidence.heads.0.gain", None, "gain is null"),
        ("evidence.held_out.0.nll_before", 1e39, r"held_out\[0\].nll_before is 1e\+39"),
        ("evidence.held_out.0.n", -1, r"held_out\[0\].n is -1"),
        ("evidence.kinds", [{}] * 17, "evidence.kinds is a list of 17"),
        ("evidence.verdict", "two\nlines", r'evidence.verdict is "two\\nlines"'),
        ("evidence.verdict", 2001 * "x", 'evidence.verdict is "xx.* 2000'),
        ("source.seed", 2**64, "source has 18446744073709551616"),
        ("source.options.x", [], "source.options"),
        ("source.options.x", 2**64, "source has 18446744073709551616"),
        ("source.options.a\u200eb", 1, "source.options"),
    ],
    CONSTANT: [
        ("entries.0.coefficients", [1.97182], "they give 1.97182 where check has .*: " + CHANGED),
        ("entries.0.check", [[1.97182]], CHANGED),
        ("entries.0.check", [], r"check is \[\]; give 1 values"),
        ("entries.0.check", [[1.0, 1.97]], r"check is a list of 1; give 1 values \[p\]"),
        ("entries.0.domain", [0.5, 5.9], "domain is .* give the 0"),
        ("rule.min_entropy", 0.0, "rule.min_entropy is not a known field"),
    ],
    LOG_SIZE: [
        ("rule.size_unit", "items", 'rule.size_unit is "items"'),
        ("entries.0.coefficients", [0.25, 0.36], "write those of L, 1$"),
        ("entries.0.check", [[3.0, 2.0]] * 2, r"check is at the .* give 2 distinct ones"),
        ("entries.0.domain", [2.5, 65.0], r"domain\[1\] is 65.0"),
    ],
    ENTROPY_AND_SIZE: [
        ("rule.order", "descending", 'rule.order is "descending"'),
        ("entries.0.domain", [0.5, 5.9, 7.0, 2.5], r"domain is \[0.5, 5.9, 7.0, 2.5\]"),
        ("entries.0.check", CHECK[:5], r"check is a list of 5; give 8 triples \[H, log n"),
        ("entries.0.check", [[0.4, *CHECK[0][1:]], *CHECK[1:]], "give 8 distinct ones of the do"),
        ("entries.0.check", [*CHECK[:7], [5.9, 7.1, CHECK[7][2]]], "give 8 distinct ones of the"),
        ("entries.0.check", [CHECK[0], *CHECK[:1], *CHECK[2:]], "give 8 distinct ones of the dom"),
        ("entries.0.check.7.2", 9.0, r"they give .* at 5.9, 7 where check has 9: they were"),
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
    """True if the bytes are a file; then its schema is kept, and it is written as it is."""
    try:
        fit = loads(data)
    except calibrate.CoefficientsError as error:
        assert str(error).isprintable()  # noqa: PT017
        return False
    document = json.loads(data)
    VALIDATOR.validate(document)
    assert json.loads(dumps(fit)) == document
    return True


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_no_bytes_crash_the_reader(fit):
    data, rng = dumps(fit).encode(), np.random.default_rng(0)
    pieces = (b'"', b"{", b"[", b",", b"1e999", b"NaN", b"\\ud800", b"9", b"\xff", b"")
    for at in rng.integers(len(data), size=200):
        check_bytes(data[:at] + pieces[rng.integers(10)] + data[at + rng.integers(3) :])


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
            seen.add(check_bytes(json.dumps(sealed(document)).encode()))
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


def test_check_pairs_and_triples_are_of_the_domain(paper):
    assert [H for H, _ in paper.only.check] == pytest.approx([0.5, 1.86125, 3.2225, 4.58375, 5.945])
    check = make_check_pairs(Entry(SURFACE, (1.0, 5.0, 2.0, 6.0)), ENTROPY_AND_SIZE)
    points = [(1.0, 2.0), (2.0, 2.0), (3.0, 2.0), (4.0, 2.0), (5.0, 2.0)]
    points += [(1.0, 4.0), (1.0, 6.0), (5.0, 6.0)]
    assert [(H, L) for H, L, _ in check] == points
    a, b, c, d, e, both, square, line = SURFACE
    for H, L, value in check:
        expected = a * H**4 + b * H**3 + c * H**2 + d * H + e + both * H * L + square * L**2
        assert value == pytest.approx(expected + line * L, rel=1e-14)


def test_check_triples_anywhere_in_the_domain_are_accepted_and_kept():
    """Another writer's, of which five have one log n."""
    points = [(H, 4.0) for H in (0.5, 0.7, 1.0, 3.0, 5.0)] + [(0.5, 7.0), (5.0, 2.5), (5.9, 5.0)]
    check = [[H, L, surface(H, L, SURFACE)] for H, L in points]
    document = changed(ENTROPY_AND_SIZE, "entries.0.check", check)
    fit = loads(json.dumps(document).encode())
    assert fit == FITS[ENTROPY_AND_SIZE]
    assert json.loads(dumps(fit)) == document


@pytest.mark.parametrize(("miss", "is_refused"), [(0.9e-9, False), (1.1e-9, True)])
def test_check_pairs_may_miss_by_a_billionth_of_the_largest(miss, is_refused):
    check = ((1.0, -3.0), (7.0, 3.0 + 3 * miss))
    with pytest.raises(calibrate.CoefficientsError) if is_refused else nullcontext():
        verify_check_pairs(Entry((1.0, -4.0), (1.0, 7.0), check=check), LOG_SIZE)
