"""The coefficient file: what is written is read again, and the bytes do not change."""

import json
import re
import runpy
from contextlib import nullcontext
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from coefficient_cases import (
    DOCUMENTS,
    FITS,
    PAPER,
    SCHEMA_FILE,
    SURFACE,
    TEXT,
    VALIDATOR,
    rich_fit,
)  # fmt: skip
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
)
from calibrate.store.entries import Entry, make_check_pairs, verify_check_pairs
from calibrate.store.fit import Fit, dumps
from calibrate.store.loading import loads, read
from calibrate.store.references import published_store

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"

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
    assert '"description": ""' not in text
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


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "My Head"), ("name", "../x"), ("name", ""), ("name", None), ("version", 0),
     ("evidence", {"verdict": "a\rb"}), ("source", {"seed": -1}), ("extra", {"note": 1}),
     ("provenance", {"created": "today"})],
)  # fmt: skip
def test_a_fit_that_could_not_be_read_again_is_not_saved(tmp_path, field, value):
    place = "`note`" if field == "extra" else rf"\$\.{field}"
    with pytest.raises(calibrate.CoefficientsError, match=place):
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


@pytest.mark.parametrize(("miss", "is_refused"), [(0.9e-9, False), (1.1e-9, True)])
def test_check_pairs_may_miss_by_a_billionth_of_the_largest(miss, is_refused):
    check = ((1.0, -3.0), (7.0, 3.0 + 3 * miss))
    with pytest.raises(calibrate.CoefficientsError) if is_refused else nullcontext():
        verify_check_pairs(Entry((1.0, -4.0), (1.0, 7.0), check=check), LOG_SIZE)
