"""The coefficient file: what it keeps, and what it refuses."""

import contextlib
import copy
import hashlib
import json
import re
import runpy
import subprocess
import sys
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
    Rule,
    surface,
)
from calibrate.store import coefficient_file, coefficient_schema
from calibrate.store.check_pairs import verify_check_pairs
from calibrate.store.coefficient_document import MAX_BYTES, MAX_MIB
from calibrate.store.coefficient_file import dumps, loads, read
from calibrate.store.entry import Entry
from calibrate.store.fit import Fit
from calibrate.store.fits_store import shipped_files

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
SCHEMA_FILE = Path(coefficient_file.__file__).parent / "schemas" / "coefficient-file-1.0.json"
VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text()))


def rich_fit(**fields):
    """A fit with every field that the format has."""
    polynomial = (-0.037, 0.481, -2.3, 4.917, -1.791)
    return Fit(
        **{
            "rule": Rule(outside="identity"),
            "entries": (Entry(polynomial, (0.5, 5.9), 0, 3), Entry(polynomial, (0.7, 5.0), 2, 0)),
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
                "interpolation": [
                    {"weight": 0.5, "gain": 0.2, "gain_se": 0.02, "calibration_gain": 0.3,
                     "calibration_gain_se": 0.03, "kl": 0.01, "kl_se": 0.001, "kl_999": 0.2,
                     "same_top": 0.94, "inputs": 96},
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


SURFACE = (-0.011, 0.12, -0.53, 1.9, 0.31, 0.047, -0.023, 0.41)


RICH = {
    CONSTANT: (Rule.constant(0.5), Entry((1.971820043551209,), (), 0, 3), Entry((0.75,), (), 2, 0)),
    LOG_SIZE: (
        Rule.log_size(0.5),
        Entry((0.36, 0.25), (2.5, 7.0), 0, 3),
        Entry((0.1, 1.5), (2.5, 6.0), 2, 0),
    ),
    POLYNOMIAL: (rich_fit().rule, *rich_fit().entries),
    ENTROPY_AND_SIZE: (
        Rule(0.25, 0.5, 64.0, kind=ENTROPY_AND_SIZE),
        Entry(SURFACE, (0.5, 5.9, 2.5, 7.0), 0, 3),
        Entry((0.0,) * 4 + SURFACE[4:], (0.5, 4.0, 2.5, 6.0), 2, 0),
    ),
}
FITS = {
    kind: rich_fit(rule=rule, entries=tuple(entries)) for kind, (rule, *entries) in RICH.items()
}
DOCUMENTS = {kind: json.loads(dumps(fit)) for kind, fit in FITS.items()}
DOCUMENT = DOCUMENTS[POLYNOMIAL]


def sealed(document):
    """The document with its id recomputed, as a forger would; as fits/file-format.md defines it."""
    digested = {key: document.get(key) for key in ("rule", "entries", "source")}
    text = json.dumps(digested, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return document | {"id": "sha256:" + hashlib.sha256(text.encode()).hexdigest()}


def refusal(data):
    if isinstance(data, dict):
        data = json.dumps(data)
    with pytest.raises(calibrate.CoefficientsError) as caught:
        loads(data if isinstance(data, bytes) else data.encode())
    message = str(caught.value)
    assert message.isprintable(), message
    assert len(message) < 600
    return message


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
printable = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20)


@st.composite
def entries(draw, kind):
    powers = draw(st.tuples(*[st.floats(-1e6, 1e6)] * rules.N_COEFFICIENTS[kind]))
    n = rules.N_DOMAIN[kind] // 2
    lows = draw(st.lists(st.floats(0, 10), min_size=n, max_size=n))
    domain = [x for lo in lows for x in (lo, lo + draw(st.floats(0.01, 20)))]
    layer, head = draw(st.none() | st.integers(0, 32767)), draw(st.none() | st.integers(0, 32767))
    return Entry(powers, tuple(domain), layer, head)


bounds = (st.floats(0.1, 1), st.floats(1, 1e9))
some_rules = {
    CONSTANT: st.builds(Rule.constant, *bounds),
    LOG_SIZE: st.builds(Rule.log_size, *bounds),
    POLYNOMIAL: st.builds(
        Rule, st.floats(0, 9), *bounds, st.sampled_from(["clamp", "identity"]), st.just(POLYNOMIAL)
    ),
    ENTROPY_AND_SIZE: st.builds(
        Rule, st.floats(0, 9), *bounds, st.just("clamp"), st.just(ENTROPY_AND_SIZE)
    ),
}
kinds = st.one_of(
    st.fixed_dictionaries({"rule": some_rules[kind], "entries": st.tuples(entries(kind))})
    for kind in KINDS
)
fits = st.builds(
    lambda kind, **fields: rich_fit(**kind, **fields),
    kind=kinds,
    name=st.from_regex(coefficient_schema.NAME_PATTERN, fullmatch=True),
    version=st.integers(1, 999_999_999),
    evidence=st.fixed_dictionaries(
        {},
        optional={
            "verdict": printable,
            "heads": st.lists(st.fixed_dictionaries({}, optional={
                "penalty": finite | st.just("infinite") | st.none(),
                "r_squared_log_beta": finite | st.none(),
                "at_bound": st.sampled_from(["", "min", "max"]),
            }), max_size=2),
        },
    ),
    source=st.fixed_dictionaries(
        {},
        optional={
            "head": printable,
            "seed": st.integers(0, 2**64 - 1),
            "options": st.dictionaries(printable, st.none() | finite | st.booleans() | printable),
        },
    ),
    extra=st.dictionaries(
        printable.map(lambda name: "x-" + name),
        st.recursive(st.none() | finite | st.booleans() | st.text(), lambda inner: (
            st.lists(inner) | st.dictionaries(st.text(), inner))),
    ),
)  # fmt: skip


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(fits)
def test_what_is_written_keeps_the_schema_and_is_read_again(fit):
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


def test_there_is_one_schema_with_a_golden_file_of_each_kind():
    names = {path.name for path in GOLDEN.glob("coefficient-*.json")}
    assert names == {f"coefficient-file-1.0-{kind}.json" for kind in KINDS}
    assert list(SCHEMA_FILE.parent.iterdir()) == [SCHEMA_FILE]
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)


def test_the_schema_is_what_the_loader_checks():
    write_schemas = runpy.run_path(str(ROOT / "scripts" / "tools" / "write_schemas.py"))
    assert write_schemas["PATH"] == SCHEMA_FILE
    text = write_schemas["text_of"](write_schemas["json_schema"]()) + "\n"
    assert SCHEMA_FILE.read_text() == text


def variants(value):
    """What one mistake makes of a value: other types, out of range, longer or shorter."""
    yield from (None, True, 1.5, "", [], {}, -1, 40_000, 2**64, 1e39, "infinite", "min")
    if isinstance(value, str):
        yield from (value + "x", value.upper(), "a" * 1_001)
    if isinstance(value, list):
        yield from (value[:-1], [*value, *value[:1]], value * 300)
    if isinstance(value, dict):
        yield from ({**value, "novel": 1}, {**value, "x-novel": 1}, dict(list(value.items())[1:]))


@pytest.mark.parametrize("kind", KINDS)
def test_mistakes_that_the_loader_accepts_are_valid_and_written_again(kind):
    original, seen = DOCUMENTS[kind], set()
    for path in paths(original):
        if not path or any(type(step) is int and step > 1 for step in path):
            continue
        for value in variants(reduce(getitem, path, original)):
            document = copy.deepcopy(original)
            reduce(getitem, path[:-1], document)[path[-1]] = value
            seen.add(check_bytes(json.dumps(sealed(document)).encode()))
    assert seen == {True, False}


@pytest.mark.parametrize("path", shipped_files(), ids=lambda path: path.parent.name)
def test_shipped_files_keep_the_schema_and_round_trip(path):
    fit = calibrate.load(path)
    assert (fit.name, fit.version) == (path.parent.name, 1)
    VALIDATOR.validate(json.loads(path.read_text()))
    assert dumps(fit) == path.read_text()


def test_the_shipped_paper_fit_is_seed_002s_polynomial(paper):
    assert paper.only.coefficients == (-0.037, 0.481, -2.3, 4.917, -1.791)
    assert paper.only.domain == (0.5, 5.945)
    assert paper.rule == Rule(0.5, 1.0, 64.0, "identity")
    assert paper.fingerprint is None


def test_whole_numbers_have_one_meaning_however_they_are_spelled():
    """JavaScript writes 64.0 as 64; other languages write 3 as 3.0."""
    entry = Entry((-0.037, 0.481, -2.0, 4.917, -1.0), (1.0, 5.0), 0, 3)
    text = dumps(rich_fit(entries=(entry,)))
    shorter = re.sub(r"([0-9])\.0(?=[],\n])", r"\1", text)
    assert '"domain": [1, 5]' in shorter
    longer = re.sub(r'("(?:version|layer|head|inputs|n)": [0-9]+)', r"\1.0", text)
    assert '"layer": 0.0' in longer
    for respelled in (shorter, longer):
        assert dumps(loads(respelled.encode())) == text


def test_layout_is_free():
    text = json.dumps(DOCUMENT, indent=7).replace("\n", "\r\n")
    assert loads(text.encode()) == rich_fit()
    shuffled = dict(reversed(DOCUMENT.items()))
    assert dumps(loads(json.dumps(shuffled).encode())) == dumps(rich_fit())


def test_saving_over_a_file_that_was_damaged_is_refused(tmp_path):
    """Even where the id is still that of the fit."""
    path = tmp_path / "mine.json"
    fit = rich_fit()
    assert fit.save(path) == fit.save(path) == path
    whole = path.read_bytes()
    for damaged in (whole[:-3], whole.replace(b'"calibrate.fit"', b'"calibrate.row"')):
        path.write_bytes(damaged)
        with pytest.raises(calibrate.CoefficientsError, match=r"mine\.json exists"):
            fit.save(path)
        assert path.read_bytes() == damaged
    fit.save(path, overwrite=True)
    assert path.read_bytes() == whole


def test_a_large_fit_is_written_without_layout():
    heads = [(i // 128, i % 128) for i in range(20_000)]
    powers, domain = (0.123456789, 0.2, 0.3, 0.4), (0.123456789, 3.0)
    entries = tuple(Entry((*powers, i / 3), domain, *head) for i, head in enumerate(heads))
    records = [{"layer": i, "head": j, "penalty": 0.01, "gain": 0.0123} for i, j in heads]
    fit = rich_fit(entries=entries, evidence={"heads": records})
    text = dumps(fit)
    assert text.count("\n") == 1
    again = loads(text.encode())
    assert (again, again.evidence) == (fit, fit.evidence)


@pytest.mark.parametrize("name", ["My Head", "../x", "", "a" * 65, None, 3])
def test_a_fit_that_could_not_be_read_again_is_not_saved(tmp_path, name):
    with pytest.raises(calibrate.CoefficientsError, match="^name is "):
        rich_fit(name=name).save(tmp_path / "a.json")
    for fields in ({"version": 0}, {"evidence": {"verdict": "a\nb"}}, {"source": {"seed": -1}},
                   {"extra": {"note": 1}}, {"provenance": {"created": "today"}}):  # fmt: skip
        (field,) = fields
        with pytest.raises(
            calibrate.CoefficientsError, match="note" if field == "extra" else field
        ):
            rich_fit(**fields).save(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


def test_numpys_numbers_become_floats():
    entry = Entry(tuple(np.float32([1, 2, 3, 4, 5])), (np.float32(0.1), 3))
    assert {type(x) for x in (*entry.coefficients, *entry.domain)} == {float}
    assert loads(dumps(rich_fit(entries=(entry,))).encode()).entries == (entry,)


REFUSED_NUMBERS = [
    (POLYNOMIAL, (0.0, 0.0, 0.0, 0.0, 1e39), (0.5, 3.0)),
    (POLYNOMIAL, (1e38, -1e38, 0.0, 0.0, 1.0), (0.5, 3.0)),  # the sum of the terms' magnitudes
    (LOG_SIZE, (1e38, 0.0), (1.0, 7.0)),
    (CONSTANT, (1e300,), ()),
    (CONSTANT, (float("nan"),), ()),
    (CONSTANT, (float("inf"),), ()),
]


@pytest.mark.parametrize(("kind", "coefficients", "domain"), REFUSED_NUMBERS)
def test_numbers_that_float32_does_not_hold_are_refused(kind, coefficients, domain):
    with pytest.raises(calibrate.CoefficientsError, match="coefficients are "):
        Fit(Rule(0.0, kind=kind), (Entry(coefficients, domain),))


@pytest.mark.parametrize("guards", [(0.0, 1.0, 1e39), (1e39, 1.0, 2.0), (0.0, float("nan"), 2.0)])
def test_guards_that_float32_does_not_hold_are_refused(guards):
    with pytest.raises(calibrate.CoefficientsError, match=r"rule\.m"):
        Fit(Rule(*guards), (Entry((0.0, 0.0, 0.0, 0.0, 1.0), (0.5, 3.0)),))


def test_the_largest_number_of_float32_is_read():
    largest = float(np.finfo(np.float32).max)
    fit = Fit(Rule.constant(1.0, largest), (Entry((largest,)),))
    assert loads(dumps(fit).encode()) == fit
    assert np.isfinite(calibrate.inverse_temperature(None, fit))


REVERSED = [-1.791, 4.917, -2.3, 0.481, -0.037]
CHANGED = "they were rounded or changed since the fit"
REFUSALS = [
    ("format", "other", 'format is "other"; give a coefficient file, which has "calibrate.fit"'),
    ("schema_version", "2.0", 'schema_version is "2.0"; this calibrate reads "1.0": upgrade'),
    ("schema_version", "1.3", 'schema_version is "1.3"; .* fit again if it is older'),
    ("name", "../evil", 'name is "../evil"; use lower-case'),
    ("name", "\x1b[2J", r'name is "\\u001b\[2J"'),
    ("version", 10**9, "version is 1000000000"),
    ("id", "sha256:" + "0" * 64, 'id is "sha256:0000.*; rule, entries and source give sha256:'),
    ("id", "sha256:" + "0" * 64, "restore the file"),
    ("new\nline", 1, r'"new\\nline" is not a known field; remove it; .* x-'),
    ("quality", {}, "quality is not a known field"),
    ("x-deep", json.loads("[" * 40 + "]" * 40), r"x-deep(\[0\])* is nested more than 32 deep"),
    ("rule.kind", "log-size", "rule.size_unit is absent; this field is required"),
    ("rule.kind", "entropy-polynomial", 'rule.kind is .*; write "constant" or "log-size" or '),
    ("rule.order", "ascending", 'rule.order is "ascending"; this calibrate reads "descending"'),
    ("rule.outside", "extrapolate", 'rule.outside is .*; write "clamp" or "identity"'),
    ("rule.max_beta", 0.5, "rule.max_beta 0.5"),
    ("rule.max_beta", 10**400, "rule.max_beta is beyond float32; give a number of at most"),
    ("rule.min_entropy", -1.0, "rule.min_entropy is -1.0; give nats >= 0"),
    ("rule.novel", 1, "rule.novel is not a known field"),
    ("entries", [], "entries are empty"),
    ("entries.0.domain", [5.0, 1.0], r"entries\[0\].domain is \[5.0, 1.0\]"),
    ("entries.0.coefficients", [1.0, 2.0], "give a list of 5"),
    ("entries.0.coefficients.2", None, r"coefficients\[2\] is null; give a number"),
    ("entries.0.coefficients.2", 1e39, r"coefficients\[2\] is beyond float32"),
    ("entries.0.check", [[1.0, 2.0]] * 4, r"check is a list of 4; give a list of 5 pairs"),
    ("entries.0.check", [[1.0, 2.0]] * 5, r"entries\[0\].check is at the .* give 5 distinct"),
    ("entries.0.coefficients", REVERSED, re.escape(f"entries[0].coefficients is {REVERSED}")),
    ("entries.0.coefficients", REVERSED, r"write those of H\^4, H\^3, H\^2, H, 1$"),
    ("entries.0.coefficients", [0.0, 0.5, -2.3, 4.9, -1.8], CHANGED),
    ("entries.0.coefficients", [-0.04, 0.48, -2.3, 4.92, -1.79], CHANGED),
    ("entries.0.coefficients", [c * 1.001 for c in reversed(REVERSED)], CHANGED),
    ("entries.1.coefficients.3", 4.927, CHANGED),
    ("entries.0.layer", 40_000, r"entries\[0\].layer is 40000; give an integer from 0 to 32767"),
    ("entries.1.layer", None, r"entries\[1\] is for layer None, head 0 .*, which"),
    ("evidence.novel", 1, "evidence.novel is not a known field"),
    ("evidence.inputs.fitted", 1.5, "evidence.inputs.fitted is 1.5; give an integer"),
    ("evidence.inputs.sharp", 1, "evidence.inputs.sharp is not a known field"),
    ("evidence.heads.0.penalty", "none", r'penalty is "none"; give a number or "infinite"'),
    ("evidence.heads.0.at_bound", True, "at_bound is true; write"),
    ("evidence.heads.0.gain", None, "gain is null; give a number"),
    ("evidence.held_out.0.nll_before", 1e39, r"held_out\[0\].nll_before is beyond float32"),
    ("evidence.held_out.0.n", -1, r"held_out\[0\].n is -1; give an integer"),
    ("evidence.kinds", [{}] * 17, "evidence.kinds is a list of 17; give at most 16"),
    ("evidence.interpolation.0.kl", "0.1", 'kl is "0.1"; give a number'),
    ("evidence.verdict", "two\nlines", "evidence.verdict is .* printable"),
    ("evidence.verdict", 2001 * "x", "evidence.verdict is .* 2000 printable"),
    ("source.novel", 1, "source.novel is not a known field"),
    ("source.options.x", [], "source.options.x is .* give a text, a number"),
    ("source.options.a\u200eb", 1, "source.options is .* printable"),
]  # fmt: skip


def check_refusals(original, cases):
    for where, value, message in cases:
        document = copy.deepcopy(original)
        *parents, last = (int(key) if key.isdigit() else key for key in where.split("."))
        reduce(getitem, parents, document)[last] = value
        text = refusal(document if where == "id" else sealed(document))
        assert re.search(message, text), (where, value, text)
        assert "; " in text


SIZE_REFUSALS = [
    ("rule.size_unit", "items", 'rule.size_unit is "items"; this calibrate reads "log items"'),
    ("rule.min_entropy", 0.0, "rule.min_entropy is not a known field"),
    ("entries.0.coefficients", [0.0, 0.0, 0.0, 0.36, 0.25], "coefficients is .* a list of 2"),
    ("entries.0.coefficients", [0.25, 0.36], "write those of L, 1$"),
    ("entries.0.check", [[3.0, 2.0]] * 2, r"check is at the .* give 2 distinct ones"),
    ("entries.0.domain", [2.5, 65.0], r"domain is \[2.5, 65.0\]; .*<= 64"),
]
CONSTANT_REFUSALS = [
    ("entries.0.coefficients", [1.97182], "they give 1.97182 where check has .*: " + CHANGED),
    ("entries.0.coefficients", [2.0], CHANGED),
    ("entries.0.check", [[1.97182]], CHANGED),
    ("entries.0.check", [], "check is .* give a list of 1 values"),
    ("entries.0.check", [[1.0, 1.971820043551209]], r"check\[0\] is .* give a list of 1 numbers"),
    ("entries.0.domain", [0.5, 5.9], "domain is .* give a list of 0 numbers"),
    ("rule.min_entropy", 0.0, "rule.min_entropy is not a known field"),
    ("rule.outside", "clamp", "rule.outside is not a known field"),
    ("rule.kind", "polynomial", "rule.entropy_unit is absent"),
]


def moved(check, *places):
    """The check triples with other points: {index: (H, log n)}, their values as they were."""
    points = dict(places)
    return [[*points.get(i, triple[:2]), triple[2]] for i, triple in enumerate(check)]


CHECK = DOCUMENTS[ENTROPY_AND_SIZE]["entries"][0]["check"]
POINTS = r"check is at the points .* give 8 distinct ones of the domain \[0.5, 5.9, 2.5, 7.0\]"
ORDER = r"write those of H\^4, H\^3, H\^2, H, 1, H L, L\^2, L"
SURFACE_REFUSALS = [
    ("rule.order", "descending", 'rule.order is "descending"; this calibrate reads "H.4, H.3,'),
    ("entries.0.domain", [0.5, 5.9, 7.0, 2.5], r"domain is \[0.5, 5.9, 7.0, 2.5\]"),
    ("entries.0.check", CHECK[:5], r"check is a list of 5; give a list of 8 triples \[H, log n"),
    ("entries.0.check", moved(CHECK, (0, (0.4, 2.5))), POINTS),  # outside
    ("entries.0.check", moved(CHECK, (7, (5.9, 7.1))), POINTS),
    ("entries.0.check", moved(CHECK, (1, (0.5, 2.5))), POINTS),  # twice the same
    ("entries.0.check.7.2", 9.0, r"they give .* at 5.9, 7 where check has 9: they were"),
    ("entries.0.coefficients", SURFACE[::-1], "they are in reverse order; " + ORDER),
    ("entries.0.coefficients.6", -0.024, CHANGED),
]


@pytest.mark.parametrize(
    ("kind", "cases"),
    [(CONSTANT, CONSTANT_REFUSALS), (LOG_SIZE, SIZE_REFUSALS), (POLYNOMIAL, REFUSALS),
     (ENTROPY_AND_SIZE, SURFACE_REFUSALS)],
)  # fmt: skip
def test_every_refusal_names_field_value_and_remedy(kind, cases):
    check_refusals(DOCUMENTS[kind], cases)


def test_check_triples_anywhere_in_the_domain_are_accepted():
    """Another writer's, of which five have one log n."""
    document = copy.deepcopy(DOCUMENTS[ENTROPY_AND_SIZE])
    points = [(H, 4.0) for H in (0.5, 0.7, 1.0, 3.0, 5.0)] + [(0.5, 7.0), (5.0, 2.5), (5.9, 5.0)]
    document["entries"][0]["check"] = [[H, L, surface(H, L, SURFACE)] for H, L in points]
    assert loads(json.dumps(sealed(document)).encode()) == FITS[ENTROPY_AND_SIZE]


def of_heads(*layers_and_heads):
    return tuple(Entry((0.0,) * 4 + (1.0,), (0.0, 1.0), *which) for which in layers_and_heads)


def test_no_head_has_two_polynomials():
    every = (None, None)
    for heads in (
        [every, (0, 0)],
        [(0, 0), every],
        [(0, 0), (0, 0)],
        [(0, 1), (0, None)],
        [(None, 0), (1, 1), (1, 0)],
    ):
        with pytest.raises(
            calibrate.CoefficientsError, match=r"entries\[\d\] .*layer (None|\d), head (None|\d)"
        ):
            Fit(Rule(), of_heads(*heads))
    apart = of_heads((0, 0), (0, 1), (1, None))
    assert Fit(Rule(), apart).entries == apart


TEXT = dumps(rich_fit())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT[: TEXT.index("fingerprint") + 40], "the file is not JSON (Unterminated"),
        ("\ufeff" + TEXT, "the file is not JSON (Unexpected UTF-8 BOM"),
        (TEXT.replace('"version": 1', '"version": 1, "version": 2'), "a key occurs twice"),
        (TEXT.replace("64.0", "NaN"), "the file is not JSON (NaN is not a finite number)"),
        (TEXT.replace("64.0", "1e400"), "rule.max_beta is beyond float32; give a number"),
        (TEXT.replace("-2.3", "-1e400"), "entries[0].coefficients[2] is beyond float32"),
        (TEXT.replace("64.0", "9" * 5_000), "the file is not JSON (Exceeds the limit"),
        (TEXT.replace('"who": [', '"who": [[1e999], '), "x-note.who[0][0] is beyond float64"),
        ("[" * 100_000, "the file is nested too deeply"),
        (TEXT + " " * MAX_BYTES, f"the file is longer than {MAX_MIB} MiB; give a coefficient file"),
        (b"\xff" + TEXT.encode(), "the file is not UTF-8 at byte 0; save it as UTF-8"),
        ("{}", "the file is not a fit file; give a coefficient file, which `calibrate fit` wri"),
        ('{"a": 1}', "the file is not a fit file"),
        ("[1]", "the file is not a fit file"),
    ],
)  # fmt: skip
def test_hostile_text_is_refused(text, message):
    assert message in refusal(text)


def paths(value, path=()):
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(item, (*path, key))


def check_bytes(data):
    """Whether the bytes are a file; then its schema is kept, and it is written as it is."""
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


ENTRIES = tuple(
    Entry((0.1 + i / 3, 0.2, -0.3, 1 / 3, 1.0), (0.5, 5.0), i // 64, i % 64) for i in range(20_000)
)
LARGE = {
    "lists of one": b"[" + b"[0]," * (MAX_BYTES // 4 - 1) + b"0]",
    "as many lists as are read": b"[" + b"[0]," * ((1 << 20) - 1) + b"0]",
    "objects": b"{" + b",".join(b'"%x":{}' % i for i in range(700_000)) + b"}",
    "wide text": b'["' + "😀".encode() + b"a" * (MAX_BYTES - 8) + b'"]',
    "depth": b"[" * MAX_BYTES,
    "valid": dumps(rich_fit(entries=ENTRIES)).encode(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_peak_memory_stays_within_256_mb(name, tmp_path):
    path = tmp_path / "large.json"
    path.write_bytes(LARGE[name])
    tracemalloc.start()
    with contextlib.suppress(calibrate.CoefficientsError):
        read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 256e6


def test_equal_by_what_they_do_and_hashable(make_fit):
    one, same, other = make_fit(), make_fit(name="other-name"), make_fit(max_beta=3.0)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other


def test_check_pairs_and_triples_are_of_the_domain(paper):
    assert [H for H, _ in paper.only.check] == pytest.approx([0.5, 1.86125, 3.2225, 4.58375, 5.945])
    rule = Rule(kind="entropy-and-size")
    entry = Fit(rule, (Entry(SURFACE, (1.0, 5.0, 2.0, 6.0)),)).only
    points = [(1.0, 2.0), (2.0, 2.0), (3.0, 2.0), (4.0, 2.0), (5.0, 2.0)]
    points += [(1.0, 4.0), (1.0, 6.0), (5.0, 6.0)]
    assert [(H, L) for H, L, _ in entry.check] == points
    a, b, c, d, e, both, square, line = SURFACE
    for H, L, value in entry.check:
        expected = a * H**4 + b * H**3 + c * H**2 + d * H + e + both * H * L + square * L**2
        assert value == pytest.approx(expected + line * L, rel=1e-14)


def test_a_kind_in_files_is_known_by_its_name_and_not_by_its_number_of_coefficients(monkeypatch):
    """A line in entropy has two coefficients, as a line in log n does."""
    kind, terms = "entropy-line", ("H", "1")
    monkeypatch.setitem(rules.TERMS, kind, terms)
    monkeypatch.setitem(rules.VARIABLES, kind, ("H",))
    monkeypatch.setitem(rules.N_COEFFICIENTS, kind, 2)
    monkeypatch.setitem(rules.N_DOMAIN, kind, 2)
    fit = Fit(Rule(0.0, kind=kind), (Entry((0.5, 1.25), (1.0, 3.0)),))
    assert fit.only.check == ((1.0, 1.75), (3.0, 2.75))
    assert rules.formula(kind, fit.coefficients) == "0.5 H + 1.25"
    assert fit.only.beta_at(np.array([1.0, 9.0]), None, fit.rule) == pytest.approx([1.75, 2.75])
    assert not fit.ignores_inputs


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_a_layer_that_a_fit_does_not_name_can_be_written_too(fit):
    unnamed = fit.layer(7)
    assert unnamed == calibrate.identity()
    assert loads(dumps(unnamed).encode()) == unnamed


def test_the_identity_is_a_constant_of_1():
    fit = calibrate.identity()
    assert (fit.rule, fit.coefficients) == (Rule.constant(1.0, 1.0), (1.0,))
    assert (fit.is_identity, fit.ignores_inputs) == (True, True)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule(0.5, kind=CONSTANT), "rule.min_entropy is 0.5; a rule of kind 'constant' has none"),
        (Rule(0.0, outside="identity", kind=CONSTANT), "rule.outside is 'identity'; use 'clamp'"),
        (Rule(kind="spline"), "rule.kind is 'spline'; use 'constant' or "),
        (Rule(), r"entries\[0\].coefficients are .* give the 5 of a rule of kind 'polynomial'"),
    ],
)
def test_a_rule_has_the_guards_and_numbers_of_its_kind(rule, message):
    with pytest.raises(calibrate.CoefficientsError, match=message):
        Fit(rule, (Entry((1.5,)),))


def test_the_evidence_of_one_head_is_that_of_the_fit():
    record = rich_fit().evidence["heads"][0]
    entry = Entry(rich_fit().entries[0].coefficients, (0.5, 5.9))
    one = rich_fit(entries=(entry,), evidence={"heads": [record], "verdict": "use it"})
    assert (one.r_squared, one.effective_degrees, one.verdict) == (0.28, 3.5, "use it")
    assert one.coefficients == entry.coefficients
    for fit in (rich_fit(), rich_fit(evidence={})):
        assert (fit.r_squared, fit.effective_degrees) == (None, None)
    assert rich_fit(evidence={}).verdict == ""
    with pytest.raises(calibrate.CoefficientsError, match="entries per layer"):
        _ = rich_fit().coefficients


def test_a_fit_prints_in_ten_lines_and_its_table_in_records():
    fit = rich_fit(entries=(Entry((0.0, 0.0, 0.0, 0.5, 1.25), (0.5, 5.9)),))
    lines = str(fit).splitlines()
    assert len(lines) <= 10
    assert lines[0] == "made@1: polynomial"
    for part in ("beta = 0.5 H + 1.25", "constant +0.0500 ± 0.0200", fit.verdict):
        assert part in str(fit)
    assert len(str(rich_fit()).splitlines()) <= 10
    constant = Fit(Rule.constant(), (Entry((1.25,)),))
    assert "beta = 1.25 (theta = 0.8)" in str(constant).splitlines()
    (of_size,), (baseline, constant) = fit.table.held_out, fit.table.kinds
    assert of_size["gain"] == pytest.approx(0.1)
    assert (baseline["nll"], constant["gain"]) == (0.5, 0.05)
    rows = [line.split() for line in str(fit.table).splitlines()]
    assert rows[1] == ["64", "512", "0.5000", "0.4000", "+0.1000", "±", "0.0100"]
    assert rows[-2:] == [["baseline", "0.5000"], ["constant", "0.4500", "+0.0500", "±", "0.0200"]]
    assert str(calibrate.identity().table)


CALL = "print(jax.jit(lambda x, f: calibrate.adaptive_softmax(x, f))(jax.numpy.zeros(4), fit))"


@pytest.mark.parametrize(
    "beginning",
    [
        "import jax; import calibrate; fit = calibrate.identity()",
        "import calibrate; fit = calibrate.identity(); import jax; import calibrate.jax",
        "import calibrate; fit = calibrate.identity(); import jax; calibrate.entropy",
        "import calibrate; fit = calibrate.identity(); import jax; calibrate.identity()",
    ],
)
def test_static_in_jax(beginning):
    code = f"{beginning}\nassert jax.tree.leaves(fit) == []\n{CALL}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "0.25" in done.stdout


def test_a_fit_loaded_before_jax_is_no_argument_before_a_name_of_ours():
    """The case for which the documentation asks for `import calibrate.jax`."""
    code = f"import calibrate; fit = calibrate.identity(); import jax\n{CALL}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "TypeError" in done.stderr


@pytest.mark.parametrize(("miss", "is_refused"), [(0.9e-9, False), (1.1e-9, True)])
def test_check_pairs_may_miss_by_a_billionth_of_the_largest(miss, is_refused):
    check = ((1.0, -3.0), (7.0, 3.0 + 3 * miss))
    with pytest.raises(calibrate.CoefficientsError) if is_refused else nullcontext():
        verify_check_pairs((1.0, -4.0), (1.0, 7.0), check, "log-size", ("entries", 0))


def test_layers_of_a_fit_have_numbers_of_one_shape():
    """So that they share a compiled graph, though the first names fewer heads."""
    entries = (Entry((1.5,), (), 0, 0), Entry((2.5,), (), 1, 0), Entry((3.5,), (), 1, 3))
    fit = Fit(Rule.constant(), entries)
    assert fit.layer(0).numbers.shape == fit.layer(1).numbers.shape
    assert fit.layer(0).numbers.shape[1] == 4


def test_saving_over_a_file_whose_source_was_changed_is_refused(tmp_path):
    """Its id is still that of the fit, and not of what it holds."""
    path = tmp_path / "mine.json"
    fit = Fit(Rule.constant(), (Entry((1.5,)),), name="mine", source={"head": "toy", "seed": 3})
    fit.save(path)
    damaged = path.read_bytes().replace(b'"seed": 3', b'"seed": 4')
    path.write_bytes(damaged)
    with pytest.raises(calibrate.CoefficientsError, match="exists"):
        fit.save(path)
    assert path.read_bytes() == damaged
