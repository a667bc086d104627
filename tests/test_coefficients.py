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
from calibrate.core.rule import Rule, surface
from calibrate.report.rules import polynomial
from calibrate.store import coefficient_file, coefficient_schema
from calibrate.store.coefficient_file import dumps, loads, read
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry

SCHEMAS = Path(coefficient_file.__file__).parent / "schemas"
SCHEMA = {
    version: json.loads((SCHEMAS / f"coefficient-file-{version}.json").read_text())
    for version in ("1.0", "1.1", "1.2", "1.3")
}
VALIDATOR = {version: jsonschema.Draft202012Validator(s) for version, s in SCHEMA.items()}
ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
MIB = 1 << 20


def validate(document):
    """By the schema of its version; the newest describes newer ones too."""
    VALIDATOR.get(str(document["schema_version"]), VALIDATOR["1.3"]).validate(document)


def rich_fit(**fields):
    """A fit with every field that the format knows."""
    polynomial = (-0.037, 0.481, -2.3, 4.917, -1.791)
    return Coefficients(
        **{
            "rule": Rule(outside="identity"),
            "entries": (Entry(polynomial, (0.5, 5.9), 0, 3), Entry(polynomial, (0.7, 5.0), 2, 0)),
            "name": "made",
            "quality": {
                "rows": {"rows": 1000, "misranked": 400, "interior": 390, "flat": 10, "gated": 20,
                         "used": 370, "at_bound": 12},
                "residuals": {"beta_rms": 5.05, "beta_r_squared": 0.0096, "theta_rms": 0.3,
                              "log_beta_r_squared": 0.28},
                "standard_errors": [[0.001, 0.01, 0.1, 0.2, 0.1], [0.1, 0.1, 0.1, 0.1, 1e-5]],
                "held_out": [
                    {"size": 64, "rows": 512, "before": -0.5, "after": -0.4, "error": 0.01}
                ],
                "candidates": [
                    {"kind": "constant", "q": 0.0, "log_p": -0.45, "p": 0.7, "gain": 0.05,
                     "low": -0.01, "high": 0.11},
                    {"kind": "log-size", "q": 0.25, "log_p": -0.41, "p": 0.75, "gain": 0.09,
                     "low": 0.04, "high": 0.14, "loss": "likelihood",
                     "coefficients": [0.3, 0.5], "domain": [2.5, 7.0], "log_beta_r_squared": 0.1},
                ],
                "learning_curve": [{"rows": 100, "log_p": -0.6}, {"rows": 370, "log_p": -0.4}],
                "band": [[0.7, 1.0, 1.2], [5.0, 2.0, 2.9]],
                "condition": 1234.5,
                "verdict": "polynomial",
            },
            "source": {
                "head": "mine",
                "fingerprint": "sha256:" + "a" * 64,
                "collection": "sha256:" + "b" * 64,
                "seed": 2**63,
                "options": {"degree": 4, "objective": "beta", "rate": 0.5, "robust": False,
                            "start": None},
                "citation": "Veličković et al. 2024",
            },
            "provenance": {
                "created": "2026-01-31T12:00:00+00:00", "versions": {"calibrate": "0.1.0"},
            },
            "extra": {"x-note": {"who": ["me", 1, 0.5, None], "deep": [[{"x": []}]]}},
            **fields,
        }
    )  # fmt: skip


def rich_size_fit(**fields):
    """The same of the kind that goes by set size."""
    lines = Entry((0.36, 0.25), (2.5, 7.0), 0, 3), Entry((0.1, 1.5), (2.5, 6.0), 2, 0)
    quality = dict(rich_fit().quality) | {"standard_errors": [[0.01, 0.02], [0.03, 0.04]]}
    return rich_fit(**{"rule": Rule.log_size(0.5), "entries": lines, "quality": quality} | fields)


SURFACE = (-0.011, 0.12, -0.53, 1.9, 0.31, 0.047, -0.023, 0.41)


def rich_surface_fit(**fields):
    """The same of the kind that goes by entropy and size."""
    entries = (
        Entry(SURFACE, (0.5, 5.9, 2.5, 7.0), 0, 3),
        Entry((0.0,) * 4 + SURFACE[4:], (0.5, 4.0, 2.5, 6.0), 2, 0),
    )
    quality = dict(rich_fit().quality) | {
        "standard_errors": [[0.01] * 8] * 2,
        "band": [[0.7, 2.5, 1.0, 1.2], [5.0, 7.0, 2.0, 2.9]],
    }
    rule = Rule(0.25, 0.5, 64.0, kind="entropy-and-size")
    return rich_fit(**{"rule": rule, "entries": entries, "quality": quality} | fields)


FITS = {"entropy": rich_fit(), "size": rich_size_fit(), "both": rich_surface_fit()}
DOCUMENT, SIZE_DOCUMENT, SURFACE_DOCUMENT = (json.loads(dumps(fit)) for fit in FITS.values())


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


finite = st.floats(allow_nan=False, allow_infinity=False)
printable = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20)


@st.composite
def entries(draw, count=5):
    powers = draw(st.tuples(*[st.floats(-1e6, 1e6)] * count))
    lows = draw(st.lists(st.floats(0, 10), min_size=1 + count // 8, max_size=1 + count // 8))
    domain = [x for lo in lows for x in (lo, lo + draw(st.floats(0.01, 20)))]
    layer, head = draw(st.none() | st.integers(0, 32767)), draw(st.none() | st.integers(0, 32767))
    return Entry(powers, tuple(domain), layer, head)


entropy_rules = st.builds(
    Rule, st.floats(0, 9), st.floats(0.1, 1), st.floats(1, 1e9),
    st.sampled_from(["clamp", "identity"]), st.just("entropy-polynomial"),
)  # fmt: skip
size_rules = st.builds(Rule.log_size, st.floats(0.1, 1), st.floats(1, 1e9))
surface_rules = st.builds(
    Rule, st.floats(0, 9), st.floats(0.1, 1), st.floats(1, 1e9), st.just("clamp"),
    st.just("entropy-and-size"),
)  # fmt: skip
kinds = st.fixed_dictionaries({"rule": entropy_rules, "entries": st.tuples(entries())})
kinds |= st.fixed_dictionaries({"rule": surface_rules, "entries": st.tuples(entries(8))})
kinds |= st.fixed_dictionaries({"rule": size_rules, "entries": st.tuples(entries(2))})
fits = st.builds(
    lambda kind, **fields: rich_fit(**kind, **fields),
    kind=kinds,
    name=st.from_regex(coefficient_schema.NAME_PATTERN, fullmatch=True),
    version=st.integers(1, 999_999_999),
    quality=st.fixed_dictionaries(
        {}, optional={"verdict": printable, "residuals": st.just({"beta_rms": 1e-320})}
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
    validate(json.loads(text))
    again = loads(text.encode())
    assert again == fit
    for field in ("name", "version", "quality", "source", "provenance", "extra"):
        assert getattr(again, field) == getattr(fit, field)
    assert dumps(again) == text


@pytest.mark.parametrize(
    "path", sorted(GOLDEN.glob("coefficient-file-*.json")), ids=lambda p: p.stem
)
def test_every_released_schema_is_read_for_ever(path):
    fit = read(path)
    version, _, kind = path.stem.removeprefix("coefficient-file-").partition("-")
    assert fit.schema_version == version
    assert [entry.layer for entry in fit.entries] == [0, 2]
    rules = {
        "": Rule(0.5, 1.0, 64.0, "identity"),
        "log-size": Rule.log_size(0.5),
        "entropy-and-size": Rule(0.25, 0.5, 64.0, kind="entropy-and-size"),
    }
    assert fit.rule == rules[kind]
    assert dumps(fit) == path.read_text()
    validate(json.loads(path.read_text()))


def test_every_schema_has_its_golden_files():
    names = {path.name for path in SCHEMAS.glob("*.json")}
    assert names == {f"coefficient-file-{version}.json" for version in SCHEMA}
    golden = {path.name for path in GOLDEN.glob("coefficient-*.json")}
    kinds = {"1.1-log-size", "1.2-entropy-and-size"}
    assert golden == names | {f"coefficient-file-{kind}.json" for kind in kinds}
    assert DOCUMENT["schema_version"] == max(SCHEMA)
    for schema in SCHEMA.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_the_schemas_are_what_the_loader_checks(monkeypatch):
    write_schemas = runpy.run_path(str(ROOT / "scripts" / "tools" / "write_schemas.py"))
    for path, text in write_schemas["schema_files"]().items():
        assert path.read_text() == text, path.name


def variants(value):
    """What one mistake makes of a value: other types, out of range, longer or shorter."""
    yield from (None, True, 1.5, "", [], {}, -1, 40_000, 2**64)
    if isinstance(value, str):
        yield from (value + "x", value.upper(), "a" * 1_001)
    if isinstance(value, list):
        yield from (value[:-1], [*value, *value[:1]], value * 300)
    if isinstance(value, dict):
        yield from ({**value, "novel": 1}, {**value, "x-novel": 1}, dict(list(value.items())[1:]))


@pytest.mark.parametrize("minor", ["1.3", "1.7"])
def test_what_the_loader_accepts_of_mistakes_is_valid_and_written_again(minor):
    seen = set()
    for original in (DOCUMENT, SIZE_DOCUMENT, SURFACE_DOCUMENT):
        for path in paths(original):
            if not path or any(type(step) is int and step > 0 for step in path):
                continue
            for value in variants(reduce(getitem, path, original)):
                document = copy.deepcopy(original | {"schema_version": minor})
                reduce(getitem, path[:-1], document)[path[-1]] = value
                seen.add(check_bytes(json.dumps(sealed(document)).encode()))
    assert seen == {True, False}


def test_an_old_schema_reads_newer_files_as_its_readers_do():
    """What a later version adds to quality they let through; a new kind of rule they refuse."""
    found = {
        version: [
            VALIDATOR[version].is_valid(document)
            for document in (DOCUMENT, SIZE_DOCUMENT, SURFACE_DOCUMENT)
        ]
        for version in SCHEMA
    }
    assert found == {
        "1.0": [True, False, False], "1.1": [True, True, False], "1.2": [True, True, True],
        "1.3": [True, True, True],
    }  # fmt: skip
    for version in ("1.0", "1.1", "1.2"):
        assert not VALIDATOR[version].is_valid(DOCUMENT | {"schema_version": version})


@pytest.mark.parametrize("name", ["paper", *(f"max-retrieval@{i}" for i in (1, 2, 3, 4))])
def test_shipped_files_keep_the_schema_and_round_trip(name):
    fit = calibrate.load(name)
    validate(json.loads(fit.path.read_text()))
    assert dumps(fit) == fit.path.read_text()


def test_version_4_is_the_rule_of_version_3_with_the_coefficients_of_every_candidate():
    before, after = (calibrate.load(f"max-retrieval@{i}") for i in (3, 4))
    assert (before.rule, before.entries, before.source) == (after.rule, after.entries, after.source)
    assert calibrate.load("max-retrieval") == after
    published = after.quality["candidates"][-2]
    assert published["q"] == after.quality["q"]
    assert tuple(published["coefficients"]) == after.only.coefficients
    assert "baseline" in after.quality["verdict"]


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
    longer = re.sub(r'("(?:version|layer|head|rows|size)": [0-9]+)', r"\1.0", text)
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
    entries = tuple(Entry((0.1, 0.2, 0.3, 0.4, i / 3), (0.5, 3.0), 0, i) for i in range(4_000))
    text = dumps(rich_fit(entries=entries))
    assert text.count("\n") == 1
    assert dumps(loads(text.encode())) == text


def test_numpys_numbers_become_floats():
    entry = Entry(tuple(np.float32([1, 2, 3, 4, 5])), (np.float32(0.1), 3))
    assert {type(x) for x in (*entry.coefficients, *entry.domain)} == {float}
    assert loads(dumps(rich_fit(entries=(entry,))).encode()).entries == (entry,)


def test_a_newer_minor_version_may_add_fields_but_never_to_what_determines_beta():
    document = copy.deepcopy(DOCUMENT) | {"schema_version": "1.7", "novelty": {"a": [1.5]}}
    document["quality"]["rows"]["novel"] = 3
    document["quality"]["held_out"][0]["novel"] = "x"
    document["provenance"]["novel"] = None
    validate(document)
    fit = loads(json.dumps(document).encode())
    assert fit == rich_fit()
    assert json.loads(dumps(fit)) == document
    remedy = "novel is not a known field; remove it, or upgrade calibrate"
    check_refusals(document, [(f"{x}.novel", 1, remedy) for x in ("rule", "entries.0", "source")])


REVERSED = [-1.791, 4.917, -2.3, 0.481, -0.037]
CHANGED = "they were rounded or changed since the fit"
REFUSALS = [
    ("format", "other", 'format is "other"; give a coefficient file, which has "calibrate.fit"'),
    ("schema_version", "2.0", 'schema_version is "2.0"; this calibrate reads 1.x: upgrade it'),
    ("schema_version", "0.1", 'schema_version is "0.1"; .* fit again if it is 0.x'),
    ("name", "../evil", 'name is "../evil"; use lower-case'),
    ("name", "\x1b[2J", r'name is "\\u001b\[2J"'),
    ("version", 10**9, "version is 1000000000"),
    ("id", "sha256:" + "0" * 64, 'id is "sha256:0000.*; rule, entries and source give sha256:'),
    ("id", "sha256:" + "0" * 64, "restore the file"),
    ("new\nline", 1, r'"new\\nline" is not a known field'),
    ("x-deep", json.loads("[" * 40 + "]" * 40), r"x-deep(\[0\])* is nested more than 32 deep"),
    ("rule.kind", "log-size", "rule.size_unit is absent; this field is required"),
    ("rule.kind", "spline", 'rule.kind is "spline"; this calibrate reads .*, "log-size", .*: up'),
    ("schema_version", "1.0", "quality.rows.gated is not a known field"),
    ("rule.order", "ascending", 'rule.order is "ascending"; this calibrate reads "descending"'),
    ("rule.outside", "extrapolate", 'rule.outside is .*; write "clamp" or "identity"'),
    ("rule.max_beta", 0.5, "rule.max_beta 0.5"),
    ("rule.max_beta", 10**400, r"rule.max_beta is 1000.*; give a number within float64"),
    ("rule.min_entropy", -1.0, "rule.min_entropy is -1.0; give nats >= 0"),
    ("entries", [], "entries are empty"),
    ("entries.0.domain", [5.0, 1.0], r"entries\[0\].domain is \[5.0, 1.0\]"),
    ("entries.0.coefficients", [1.0, 2.0], "give a list of 5"),
    ("entries.0.coefficients.2", None, r"coefficients\[2\] is null; give a number"),
    ("entries.0.check", [[1.0, 2.0]] * 4, r"check is a list of 4; give a list of 5 pairs"),
    ("entries.0.check", [[1.0, 2.0]] * 5, r"entries\[0\].check is at the .* give 5 distinct"),
    ("entries.0.coefficients", REVERSED, re.escape(f"entries[0].coefficients is {REVERSED}")),
    ("entries.0.coefficients", REVERSED, r"write those of H\^4, H\^3, H\^2, H, 1$"),
    ("entries.0.coefficients", [0.0, 0.5, -2.3, 4.9, -1.8], CHANGED),
    ("entries.0.coefficients", [-0.04, 0.48, -2.3, 4.92, -1.79], CHANGED),
    ("entries.0.coefficients", [c * 1.001 for c in reversed(REVERSED)], CHANGED),
    ("entries.1.coefficients.3", 4.927, CHANGED),
    ("entries.0.coefficients", [1e308, -1e308, 1e-320, 0.0, 3e200], "coefficients is "),
    ("entries.0.layer", 40_000, r"entries\[0\].layer is 40000; give an integer from 0 to 32767"),
    ("entries.1.layer", None, r"entries\[1\] is for layer None, head 0 .*, which"),
    ("quality.rows.used", 1.5, "quality.rows.used is 1.5; give an integer"),
    ("quality.candidates", [{}] * 17, "quality.candidates is a list of 17; give at most 16"),
    ("quality.verdict", "two\nlines", "quality.verdict is .* printable"),
    ("quality.verdict", 2001 * "x", "quality.verdict is .* 2000 printable"),
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
    ("schema_version", "1.0", 'rule.kind is "log-size"; schema 1.0 has no such rule: write schema'),
    ("rule.size_unit", "items", 'rule.size_unit is "items"; this calibrate reads "log items"'),
    ("rule.min_entropy", 0.0, "rule.min_entropy is not a known field"),
    ("entries.0.coefficients", [0.0, 0.0, 0.0, 0.36, 0.25], "coefficients is .* a list of 2"),
    ("entries.0.coefficients", [0.25, 0.36], "write those of L, 1$"),
    ("entries.0.check", [[3.0, 2.0]] * 2, r"check is at the .* give 2 distinct ones"),
    ("entries.0.domain", [2.5, 65.0], r"domain is \[2.5, 65.0\]; .*<= 64"),
]


def moved(check, *places):
    """The check triples with other points: {index: (H, log n)}, their values as they were."""
    points = dict(places)
    return [[*points.get(i, triple[:2]), triple[2]] for i, triple in enumerate(check)]


CHECK = SURFACE_DOCUMENT["entries"][0]["check"]
POINTS = r"check is at the points .* give 8 distinct ones of the domain \[0.5, 5.9, 2.5, 7.0\]"
ORDER = r"write those of H\^4, H\^3, H\^2, H, 1, H L, L\^2, L"
SURFACE_REFUSALS = [
    ("schema_version", "1.1", 'schema 1.1 has no such rule: write schema_version "1.2"'),
    ("rule.order", "descending", 'rule.order is "descending"; this calibrate reads "H.4, H.3,'),
    ("entries.0.domain", [0.5, 5.9, 7.0, 2.5], r"domain is \[0.5, 5.9, 7.0, 2.5\]"),
    ("entries.0.check", CHECK[:5], r"check is a list of 5; give a list of 8 triples \[H, log n"),
    ("entries.0.check", moved(CHECK, (0, (0.4, 2.5))), POINTS),  # outside
    ("entries.0.check", moved(CHECK, (7, (5.9, 7.1))), POINTS),
    ("entries.0.check", moved(CHECK, (1, (0.5, 2.5))), POINTS),  # twice the same
    ("entries.0.check.7.2", 9.0, r"they give p\(5.9, 7\) = .* where check has 9: they were"),
    ("entries.0.coefficients", SURFACE[::-1], "they are in reverse order; " + ORDER),
    ("entries.0.coefficients.6", -0.024, CHANGED),
]


@pytest.mark.parametrize(
    ("original", "cases"),
    [(DOCUMENT, REFUSALS), (SIZE_DOCUMENT, SIZE_REFUSALS), (SURFACE_DOCUMENT, SURFACE_REFUSALS)],
    ids=FITS,
)
def test_every_refusal_names_field_value_and_remedy(original, cases):
    check_refusals(original, cases)


def test_check_triples_anywhere_in_the_domain_are_accepted():
    """Another writer's, of which five have one log n."""
    document = copy.deepcopy(SURFACE_DOCUMENT)
    points = [(H, 4.0) for H in (0.5, 0.7, 1.0, 3.0, 5.0)] + [(0.5, 7.0), (5.0, 2.5), (5.9, 5.0)]
    document["entries"][0]["check"] = [[H, L, surface(H, L, SURFACE)] for H, L in points]
    assert loads(json.dumps(sealed(document)).encode()) == rich_surface_fit()


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
            Coefficients(Rule(), of_heads(*heads))
    apart = of_heads((0, 0), (0, 1), (1, None))
    assert Coefficients(Rule(), apart).entries == apart


TEXT = dumps(rich_fit())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT[: TEXT.index("fingerprint") + 40], "the file is not JSON (Unterminated"),
        ("\ufeff" + TEXT, "the file is not JSON (Unexpected UTF-8 BOM"),
        (TEXT.replace('"version": 1', '"version": 1, "version": 2'), "a key occurs twice"),
        (TEXT.replace("64.0", "NaN"), "the file is not JSON (NaN is not a finite number)"),
        (TEXT.replace("64.0", "1e400"), "rule.max_beta is beyond float64; give a finite number"),
        (TEXT.replace("-2.3", "-1e400"), "entries[0].coefficients[2] is beyond float64"),
        (TEXT.replace("64.0", "9" * 5_000), "the file is not JSON (Exceeds the limit"),
        (TEXT.replace('"who": [', '"who": [[1e999], '), "x-note.who[0][0] is beyond float64"),
        ("[" * 100_000, "the file is nested too deeply"),
        (TEXT + " " * MIB, "the file is longer than 1 MiB; give a coefficient file"),
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
    validate(document)
    assert json.loads(dumps(fit)) == document
    return True


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_no_bytes_crash_the_reader(fit):
    data, rng = dumps(fit).encode(), np.random.default_rng(0)
    pieces = (b'"', b"{", b"[", b",", b"1e999", b"NaN", b"\\ud800", b"9", b"\xff", b"")
    for at in rng.integers(len(data), size=200):
        check_bytes(data[:at] + pieces[rng.integers(10)] + data[at + rng.integers(3) :])


ENTRIES = tuple(
    Entry((0.1 + i / 3, 0.2, -0.3, 1 / 3, 1.0), (0.5, 5.0), i // 64, i % 64) for i in range(2_400)
)
LARGE = {
    "lists of one": b"[" + b"[0]," * (MIB // 4 - 1) + b"0]",
    "wide text": b'["' + "😀".encode() + b"a" * (MIB - 8) + b'"]',
    "depth": b"[" * MIB,
    "valid": dumps(rich_fit(entries=ENTRIES)).encode(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_peak_memory_stays_within_64_mb(name, tmp_path):
    path = tmp_path / "large.json"
    path.write_bytes(LARGE[name])
    tracemalloc.start()
    with contextlib.suppress(calibrate.CoefficientsError):
        read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64e6


def test_equal_by_what_they_do_and_hashable(make_fit):
    one, same, other = make_fit(), make_fit(name="other-name"), make_fit(max_beta=3.0)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other


def test_check_pairs_and_triples_are_of_the_domain(paper):
    assert [H for H, _ in paper.only.check] == pytest.approx([0.5, 1.86125, 3.2225, 4.58375, 5.945])
    rule = Rule(kind="entropy-and-size")
    entry = Coefficients(rule, (Entry(SURFACE, (1.0, 5.0, 2.0, 6.0)),)).only
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
    fit = Coefficients(Rule(0.0, kind=kind), (Entry((0.5, 1.25), (1.0, 3.0)),))
    assert fit.only.check == ((1.0, 1.75), (3.0, 2.75))
    assert polynomial(fit.rule, fit.only.coefficients) == "0.5 H + 1.25"
    assert fit.only.beta_at(np.array([1.0, 9.0]), None, fit.rule) == pytest.approx([1.75, 2.75])
    assert not fit.ignores_inputs


@pytest.mark.parametrize("fit", [rich_size_fit(), rich_surface_fit()], ids=["size", "both"])
def test_a_layer_that_a_fit_does_not_name_can_be_written_too(fit):
    unnamed = fit.layer(7)
    assert unnamed == calibrate.identity()
    assert loads(dumps(unnamed).encode()) == unnamed


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


def test_a_subclass_is_static_too():
    code = """
import calibrate, jax
from calibrate.array_fit import Fit
given = calibrate.identity()
fit = Fit(given.rule, given.entries, evidence=None, held_out=None)
assert jax.tree.leaves(fit) == []
"""
    subprocess.run([sys.executable, "-c", code], check=True)
