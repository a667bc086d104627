"""`calibrate fits`: what its commands print, write and refuse."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import call

import calibrate
from calibrate.core.rule import CONSTANT, ENTROPY_AND_SIZE, RuleForm
from calibrate.report.fit_record import load_line, usage
from calibrate.store import references
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit, dumps
from calibrate.store.references import published_store
from calibrate.store.saving import save_to_store

ROOT = Path(__file__).parents[1]

SHIPPED = (
    "chython-rxnmap",
    "max-retrieval",
    "paper",
    "rxnmapper",
    "smollm2-135m-instruct",
    "smollm2-135m-instruct-polynomial",
)


@pytest.fixture
def store(here, make_fit):
    """./fits with two versions of `made`."""
    save_to_store(make_fit(), here / "fits")
    save_to_store(make_fit(powers=(0.0, 0.0, 0.0, 1.0, 1.5), domain=(1.0, 5.0)), here / "fits")
    return here / "fits"


@pytest.fixture
def publish_in(monkeypatch):
    """Takes another folder for the package's store."""
    return lambda folder: monkeypatch.setattr(references, "published_store", lambda: folder)


@pytest.fixture
def shipped(tmp_path_factory, publish_in):
    """The package's store with only what ships: `calibrate run` in a clone publishes there too."""
    copy = tmp_path_factory.mktemp("package")
    for name in SHIPPED:
        shutil.copytree(published_store() / name, copy / name)
    publish_in(copy)
    return copy


def cells(table):
    rows = (re.split(r" {2,}", line.strip()) for line in table.splitlines())
    return {first: rest for first, *rest in rows}


def test_list_says_where_each_came_from(store, shipped, make_fit, monkeypatch):
    save_to_store(make_fit(), Path("named"))
    monkeypatch.setenv("CALIBRATE_FITS", "named")
    records = json.loads(call("fits", "list", "--json").stdout)
    found = [(r["name"], r["store"], r["origin"], r["shadowed"]) for r in records]
    package = str(shipped)
    assert found == [
        ("made", "named", "$CALIBRATE_FITS", False),
        ("made", "fits", "./fits", True),
        *((name, package, "package", False) for name in SHIPPED),
    ]
    assert records[1]["versions"] == [1, 2]
    table = call("fits", "list").stdout
    assert cells(table)["made"] == ["(hidden)", "1, 2", f"./fits: {store}"]
    monkeypatch.setenv("CALIBRATE_FITS", str(store))  # by another path
    records = json.loads(call("fits", "list", "--json").stdout)
    assert [r["origin"] for r in records] == ["$CALIBRATE_FITS", *["package"] * len(SHIPPED)]


def test_show_has_rule_evidence_source_and_load_line(here, store, by_size, by_both, constant):
    kinds = [{"kind": "log-size", "nll": 0.5, "gain": 0.125, "se": 0.0625}]
    inputs = {"seen": 45_056, "misranked": 17_396, "fitted": 45_056}
    evidence = {"kinds": kinds, "inputs": inputs, "verdict": "log-size gains"}
    save_to_store(replace(by_size, evidence=evidence), store)
    save_to_store(by_both, store)
    save_to_store(constant, store)
    for name, parts in {
        "max-retrieval@1": [
            calibrate.load("max-retrieval").fingerprint,
            *calibrate.load("max-retrieval").verdict.split("\n"),
            'fit = calibrate.load("max-retrieval@1")',
        ],
        "paper": [
            "-0.037 H^4 + 0.481 H^3 - 2.3 H^2 + 4.917 H - 1.791",
            "0.5 .. 5.945 nats",
            "beta is 1 outside",
        ],
        "constant": ["kind constant beta 1.75 (theta = 0.571)"],
        "by-size": [
            "0.5 log n + 0.6",
            "16 .. 1,024 items",
            "log-size 0.500 +0.125 ± 0.062",
            "45,056: 17,396 misranked",
            "log-size gains",
        ],
        "by-both": [
            "-0.002 H^4 + 0.02 H^3 - 0.1 H^2 + 0.4 H + 0.2 - 0.05 H log n - 0.01 (log n)^2"
            " + 0.4 log n",
            "0.2 .. 5 nats and sets of 16 .. 1,024 items",
        ],
    }.items():
        out = " ".join(call("fits", "show", name).stdout.split())
        for part in parts:
            assert part in out, part
    record = json.loads(call("fits", "show", "made@1", "--json").stdout)
    assert record["fit"] == json.loads((store / "made/1.json").read_text())
    assert record["load"] == 'calibrate.load("made@1")'
    assert record["path"] == "fits/made/1.json"


@pytest.mark.parametrize(
    ("reference", "store_given", "typed"),
    [
        ("made@1", None, "made@1"),
        ("made", "elsewhere", "elsewhere/made/2.json"),  # ./fits has another made@2
        ("copy.json", None, "copy.json"),
        ("fits/made/1.json", None, "made@1"),
    ],
)
def test_the_load_line_loads_this_very_file(here, store, reference, store_given, typed):
    shutil.copytree("fits", "elsewhere")
    shutil.copy("fits/made/1.json", "copy.json")
    shown = calibrate.load(reference, store_given)
    line = load_line(replace(shown, path=shown.path.absolute()))
    assert line == load_line(shown) == f'calibrate.load("{typed}")'
    assert eval(line, {"calibrate": calibrate}).path.samefile(shown.path)
    save_to_store(replace(calibrate.load("max-retrieval"), version=0), store)
    assert "@" not in load_line(calibrate.load("max-retrieval", published_store()))  # it is hidden


@pytest.mark.parametrize("name", SHIPPED)
def test_a_fit_of_the_package_is_loaded_by_its_name(here, name):
    fit = calibrate.load(name)
    assert load_line(fit) == f'calibrate.load("{fit.reference}")'


def test_the_lines_of_a_fit_with_layers_run(here, make_fit):
    fit = make_fit()
    entries = tuple(replace(fit.only, layer=3, head=i) for i in range(2))
    code = usage(save_to_store(replace(fit, entries=entries), here / "fits")[0]).text
    assert "transformers.apply(model, fit)" in code
    logits = np.zeros((1, 2, 3, 8))
    jax = [line for line in code.splitlines() if "load(" in line or "calibrate.adaptive" in line]
    space = {"calibrate": calibrate, "logits": logits}
    exec("\n".join(jax), space)
    assert space["probs"].shape == logits.shape
    of_model = replace(make_fit(name="one"), source={"options": {"through": "model"}})
    code = usage(save_to_store(of_model, here / "fits")[0]).text
    assert "transformers.apply(model, fit)" in code  # one rule for all heads of a model
    assert "transformers" not in usage(save_to_store(make_fit(), here / "other")[0]).text


def test_a_constant_is_a_line_of_code_and_comes_first(here, make_fit):
    constant = Fit(RuleForm.constant(), (Entry((2.0,)),), name="two")
    published = save_to_store(constant, here / "fits")[0]
    lines = usage(published).text.splitlines()
    z = np.linspace(0, 3, 5, dtype=np.float32)
    expected = calibrate.adaptive_softmax(z, published)
    space = {"jax": jax, "query": z, "logits": z}
    exec("\n".join(lines[:4]), space)
    for found in (space["probs"], jax.nn.softmax(space["query"])):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert lines[2] == "# or torch.softmax(2 * logits, -1):"
    powers = (0.0, 0.0, 0.0, 0.0, 2.0)
    for other in (make_fit(), make_fit(powers, min_entropy=0.5)):  # a threshold: not on every row
        assert "query = " not in usage(save_to_store(other, here / "fits")[0]).text


CONSTANTS = [
    (RuleForm.constant(), (1.73,), ()),
    (RuleForm(0.0), (0, 0, 0, 0, 1.73), (0, 3)),
    (RuleForm.log_size(0.5), (0, 1.73), (2, 6)),
    (RuleForm(0.0, kind=ENTROPY_AND_SIZE), (0, 0, 0, 0, 1.73, 0, 0, 0), (0, 3, 2, 6)),
]


@pytest.mark.parametrize(("rule", "coefficients", "domain"), CONSTANTS)
def test_show_of_constants(here, rule, coefficients, domain):
    entry = Entry(coefficients, domain)
    heads = tuple(replace(entry, layer=1, head=i) for i in range(24))
    for name, entries in (("one", (entry,)), ("of-head", heads[2:3]), ("many", heads)):
        save_to_store(Fit(rule, entries, name=name), here / "fits")
    out = {name: call("fits", "show", name).stdout for name in ("one", "of-head", "many")}
    for name in ("one", "of-head"):
        assert re.search(r"^  beta.* 1\.73\b", out[name], re.M)
    assert "  layer 1, head 2; other heads keep the baseline\n" in out["of-head"]
    assert len(re.findall(r"^ layer 1, head \d+ +1.73 *$", out["many"], re.M)) == 20
    assert "And 4 more" in out["many"]
    if rule.kind == CONSTANT:
        assert not re.search("domain|bounds|outside|beta[(][Hn]", "".join(out.values()))


def test_verify_names_file_and_field_of_a_flipped_digit(here):
    """In a copy of the shipped store, which is green."""
    shutil.copytree(published_store() / "max-retrieval", here / "copy" / "max-retrieval")
    shutil.copytree(published_store() / "paper", here / "copy" / "paper")
    assert call("fits", "verify", "--store", "copy").stdout.count("ok ") == 2
    path = here / "copy" / "paper" / "1.json"
    path.write_text(path.read_text().replace("0.481", "0.482", 1))
    result = call("fits", "verify", "--store", "copy", code=1)
    assert "FAILED  copy/paper/1.json: " in result.stdout
    assert "entries[0].coefficients is [-0.037, 0.482" in result.stdout
    assert "calibrate: 1 of 2 failed; see above" in result.stderr


def test_verify_one_version_one_name_or_one_file(store):
    assert call("fits", "verify", "made@1").stdout == "ok      fits/made/1.json\n"
    assert len(json.loads(call("fits", "verify", "made", "--json").stdout)) == 2
    (store / "made" / "1.json").write_text("{}")
    assert "FAILED" in call("fits", "verify", "fits/made/1.json", code=1).stdout
    first, second = json.loads(call("fits", "verify", "made", "--json", code=1).stdout)
    assert first["error"].startswith("fits/made/1.json: the file is not a fit file; give a coeff")
    assert second == {"path": "fits/made/2.json", "error": None}


SPECIFICATION = ROOT / "fits" / "README.md"


def fields_of(schema):
    """The fields in a JSON Schema, by name."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {}).items()
    for item in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(item, dict | list):
            yield from fields_of(item)


def test_the_schema_has_the_meaning_of_every_field():
    path = ROOT / "calibrate" / "store" / "schemas" / "coefficient-file-1.0.json"
    schema = json.loads(path.read_text())
    fields = [*fields_of({"properties": schema["properties"]}), *fields_of(schema["$defs"])]
    assert {"at_bound", "coefficients", "size_unit"} <= {*dict(fields)}
    assert [name for name, field in fields if "description" not in field] == []


def test_the_specifications_example_is_a_file(here):
    (example,) = re.findall(r"```json\n(.*?)```", SPECIFICATION.read_text(), re.DOTALL)
    Path("example.json").write_text(example)
    fit = calibrate.load("example.json")
    assert dumps(fit) == example


def test_the_specifications_evaluation_is_ours(here):
    """Of every shipped file, in the NumPy of the page."""
    (block,) = re.findall(r"```python\n(import math\n.*?)```", SPECIFICATION.read_text(), re.DOTALL)
    space = {}
    exec(block, space)
    rng = np.random.default_rng(0)
    for path in (published_store() / name / "1.json" for name in SHIPPED):
        fit, document = calibrate.load(path), json.loads(path.read_text())
        for entry, stored in list(zip(fit.entries, document["entries"], strict=True))[::20]:
            for H, n in zip(rng.uniform(0, 9, 20), rng.integers(1, 10**6, 20), strict=True):
                found = space["beta_of"](document["rule"], stored, H, n)
                assert found == pytest.approx(float(entry.beta_at(H, np.log(n), fit.rule)))


def test_the_specifications_digest_is_the_files(monkeypatch):
    specification = (ROOT / "fits" / "README.md").read_text()
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"```python\n(import hashlib.*?)```", specification, re.DOTALL)
    exec(block, {})
