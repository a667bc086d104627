"""The coefficient file: what it keeps, and what it refuses."""

import json
import subprocess
import sys

import pytest

import calibrate
from calibrate.files import coefficient_file
from calibrate.files.coefficient_file import dumps, read
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths.rule import Rule


@pytest.fixture
def document(make_fit):
    """A valid file as JSON data, to be mutated."""
    return json.loads(dumps(make_fit((-0.037, 0.481, -2.3, 4.917, -1.791), (0.5, 5.9))))


def sealed(document):
    """The document with its id recomputed, as a forger would."""
    digested = {key: document[key] for key in ("rule", "entries", "source")}
    return document | {"id": coefficient_file._digest(digested)}


def read_text(tmp_path, text):
    path = tmp_path / "fit.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read(path)


def refused(tmp_path, document, message):
    with pytest.raises(calibrate.CoefficientsError, match=message) as caught:
        read_text(tmp_path, json.dumps(document))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_round_trip(tmp_path, make_fit):
    fit = make_fit(outside="identity", max_beta=8.0)
    again = read_text(tmp_path, dumps(fit))
    assert again == fit
    assert dumps(again) == dumps(fit)
    assert again.path == tmp_path / "fit.json"


def test_the_shipped_paper_fit_is_seed_002s_polynomial(paper):
    assert paper.only.coefficients == (-0.037, 0.481, -2.3, 4.917, -1.791)
    assert paper.only.domain == (0.5, 5.945)
    assert paper.rule == Rule(0.5, 1.0, 64.0, "identity")
    assert "fingerprint" not in paper.source


def test_reversed_coefficients_are_refused(tmp_path, document):
    """Trap 1: a public port evaluates the polynomial backwards."""
    document["entries"][0]["coefficients"].reverse()
    refused(tmp_path, sealed(document), r"entries\[0\]\.check.*reversed, rounded or changed")


def test_rounded_coefficients_are_refused(tmp_path, document):
    """Trap 1: two decimals."""
    entry = document["entries"][0]
    entry["coefficients"] = [round(c, 2) for c in entry["coefficients"]]
    refused(tmp_path, sealed(document), r"entries\[0\]\.check.*reversed, rounded or changed")


def test_a_flipped_digit_is_refused_by_the_id(tmp_path, document):
    document["rule"]["max_beta"] = 65.0
    refused(tmp_path, document, "id is sha256:.*restore the file")


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("format", "other", 'format is "other"|format is other'),
        ("schema_version", "9.0", "schema_version"),
        ("name", "../evil", "name is ../evil"),
        ("version", 0, "version is 0"),
        ("version", True, "version is true"),
        ("version", 1.5, "version is 1.5"),
        ("quality", [], "quality is"),
        ("surprise", 1, "surprise is not a known field"),
        ("rule.order", "ascending", "rule.order is ascending; expected 'descending'"),
        ("rule.entropy_unit", "bits", "rule.entropy_unit is bits"),
        ("rule.quantity", "theta", "rule.quantity"),
        ("rule.outside", "extrapolate", "rule.outside"),
        ("rule.min_beta", 0, "min_beta"),
        ("rule.max_beta", 0.5, "max_beta"),
        ("rule.min_entropy", -1, "min_entropy"),
        ("rule.min_entropy", "0.5", "rule.min_entropy is 0.5; give a number"),
        ("rule.extra", 1, "rule.extra is not a known field"),
        ("entries", [], "entries are empty"),
        ("entries", {}, "entries is"),
        ("entries.0.domain", [5.0, 1.0], "domain"),
        ("entries.0.domain", [1.0, 1.0], "domain"),
        ("entries.0.domain", [1.0], "give a list of 2"),
        ("entries.0.coefficients", [1.0, 2.0], "give a list of 5"),
        ("entries.0.coefficients.2", None, r"coefficients\[2\] is null; give a number"),
        ("entries.0.coefficients.2", 10**400, "beyond float64"),
        ("entries.0.check", [[1.0, 2.0]] * 5, "five distinct entropies"),
        ("entries.0.head", -1, "head is -1"),
        ("entries.0.note", "x", r"entries\[0\].note is not a known field"),
    ],
)
def test_every_refusal_names_field_and_value(tmp_path, document, where, value, message):
    *parents, last = where.split(".")
    place = document
    for key in parents:
        place = place[int(key) if isinstance(place, list) else key]
    place[int(last) if isinstance(place, list) else last] = value
    refused(tmp_path, sealed(document), message)


@pytest.mark.parametrize("key", ["format", "id", "rule", "entries", "source", "provenance"])
def test_missing_fields_are_refused(tmp_path, document, key):
    del document[key]
    refused(tmp_path, document, f"{key} is absent")


def test_x_keys_are_ignored_at_the_top_only(tmp_path, document):
    assert read_text(tmp_path, json.dumps(document | {"x-note": [1, 2]})).name == "made"
    document["rule"]["x-note"] = 1
    refused(tmp_path, sealed(document), "rule.x-note is not a known field")


@pytest.mark.parametrize(
    ("mangle", "message"),
    [
        (lambda t: t[: len(t) // 2], "not JSON"),
        (lambda t: t + "{}", "not JSON"),
        (lambda t: "\ufeff" + t, "not JSON"),
        (lambda t: t.replace('"version": 1', '"version": 1, "version": 2'), "two keys 'version'"),
        (lambda t: t.replace("64.0", "NaN"), "NaN; write finite"),
        (lambda t: t.replace("64.0", "-Infinity"), "write finite"),
        (lambda t: t.replace("64.0", "1e400"), "1e400; write numbers within float64"),
        (lambda t: t.replace("64.0", "9" * 5_000), "not JSON"),
        (lambda t: "[" * 100_000, "nested too deeply|not JSON"),
        (lambda t: t + " " * (1 << 20), "at most 1 MiB"),
        (lambda t: b"\xff" + t.encode(), "not UTF-8 at byte 0"),
        (lambda t: "", "not JSON"),
        (lambda t: "[]", "give an object"),
    ],
)
def test_hostile_text_is_refused(tmp_path, make_fit, mangle, message):
    with pytest.raises(calibrate.CoefficientsError, match=message):
        read_text(tmp_path, mangle(dumps(make_fit())))


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(calibrate.CoefficientsError, match="does not exist"):
        read(tmp_path / "none.json")
    with pytest.raises(calibrate.CoefficientsError, match="cannot read"):
        read(tmp_path)


def test_equal_by_what_they_do_and_hashable(make_fit):
    one, same, other = make_fit(), make_fit(name="other-name"), make_fit(max_beta=3.0)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other


@pytest.mark.parametrize(
    "build",
    [
        lambda: Entry((1.0, 2.0), (0.0, 1.0)),
        lambda: Entry((float("nan"),) * 5, (0.0, 1.0)),
        lambda: Entry((1.0,) * 5, (1.0, 1.0)),
        lambda: Coefficients(Rule(outside="both"), (Entry((1.0,) * 5, (0.0, 1.0)),)),
        lambda: Coefficients(Rule(), ()),
    ],
)
def test_impossible_coefficients_cannot_be_made(build):
    with pytest.raises(calibrate.CoefficientsError):
        build()


@pytest.mark.parametrize(
    "beginning",
    [
        "import jax; import calibrate; fit = calibrate.identity()",
        "import calibrate; import jax; fit = calibrate.identity()",
        "import calibrate; fit = calibrate.identity(); import jax",
        "import calibrate; fit = calibrate.identity(); import jax.numpy; import jax",
    ],
)
def test_static_in_jax_in_either_import_order(beginning):
    code = f"""{beginning}
assert jax.tree.leaves(fit) == []
print(jax.jit(lambda x, f: calibrate.adaptive_softmax(x, f))(jax.numpy.zeros(4), fit))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "0.25" in done.stdout
