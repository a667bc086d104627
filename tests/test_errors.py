"""Errors of the public doors and of commands: the class, the value, and the names of parameters."""

import ast
import inspect
import os
import pickle
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from attention_cases import qkv
from cases import per_head
from commands import call, refusal
from conftest import ToyHead, reopen
from typer.main import get_command

import calibrate
from calibrate.cli.command import option_of, with_options
from calibrate.cli.main import app
from calibrate.core.rule import RuleForm
from calibrate.errors import (
    CalibrateError,
    CoefficientsError,
    DamagedError,
    QualityError,
    as_option,
    command,
)
from calibrate.jax.attention import dot_product_attention
from calibrate.parallel import Jobs, run
from calibrate.rows.collection import RowCollection, open_collection
from calibrate.rows.diagnosis import diagnose
from calibrate.rows.logits_files import Arrays
from calibrate.rows.rows import UnusableRowsError
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

PACKAGE = Path(__file__).parents[1] / "calibrate"
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
RNG = np.random.default_rng(0)
Z = 2 * RNG.normal(size=(400, 8))
T = (Z + RNG.gumbel(size=Z.shape)).argmax(1)  # as softmax(Z) has it
NOISE = RNG.integers(0, 8, 400)
PAPER = calibrate.load("paper")
HEADS, _ = per_head("polynomial")
BY_SIZE = Fit(RuleForm.log_size(), (Entry((0.5, 0.6), (2.7, 7.0)),), name="by-size")
LAYERED = replace(PAPER, entries=(replace(PAPER.only, layer=3),))


def refuses(fails, error, value):
    with pytest.raises(error, match=value) as caught:
        fails()
    assert type(caught.value) is error  # and none of a class below it
    assert "\n" not in str(caught.value)


def spoilt(rows, value):
    logits = Z.copy()
    logits[np.arange(rows), T[:rows]] = value
    return logits


@pytest.mark.parametrize(
    ("arguments", "error", "value"),
    [
        ({"logits": Z[0]}, CalibrateError, r"^logits .*float64\(8,\)"),
        ({"logits": Z > 0}, CalibrateError, r"^logits .*bool\(400, 8\)"),
        ({"logits": [[1.0, 2.0], [[1.0]]]}, CalibrateError, "^logits "),
        ({"logits": np.full((400, 8), 1 / 8)}, CalibrateError, "^logits .*sum to 1"),
        ({"target": None}, CalibrateError, r"^target .*\(400,\)"),
        ({"target": T[1:]}, CalibrateError, r"^target .*int64\(399,\)"),
        ({"target": T + 8}, CalibrateError, r"^target .*\b\d+, .*\[0, 8\)"),
        ({"mask": np.ones(7, bool)}, CalibrateError, r"^mask .*bool\(7,\)"),
        ({"logits": [Z, Z], "target": [T]}, CalibrateError, "^target .* 2 "),
        ({"logits": [Z, Z], "target": [T, T[1:]]}, CalibrateError, r"^part 1: target .*\(399,\)"),
        ({"weight": np.arange(400) - 1.0}, CalibrateError, "^weight .* -1 to 398"),
        ({"weight": np.ones(5)}, CalibrateError, r"^weight .*float64\(5,\)"),
        ({"weight": np.zeros(400)}, UnusableRowsError, "weight"),
        ({"group": T[1:]}, CalibrateError, r"^group .*int64\(399,\).*\(400,\)"),
        ({"group": np.where(T > 0, T, np.nan)}, CalibrateError, "^group .*nan"),
        ({"group": np.where(T > 0, T, np.nan).astype(object)}, CalibrateError, "^group .*nan"),
        ({"group": np.full(400, "NaT", "datetime64[D]")}, CalibrateError, "^group .*NaT"),
        ({"group": [None] * 400}, CalibrateError, "^group .*None"),
        ({"tolerance": np.inf}, CalibrateError, "^tolerance .*inf"),
        ({"head": np.full(400, -2)}, CalibrateError, "^head .* -2 to -2"),
        ({"seed": 0.5}, CalibrateError, r"^seed .* 0\.5\b"),
        ({"trained_up_to": 16.5}, CalibrateError, r"^trained_up_to .* 16\.5\b"),
        ({"tolerance": -0.1}, CalibrateError, r"^tolerance .* -0\.1\b"),
        ({"min_beta": 1.5}, CalibrateError, r"^min_beta .* 1\.5\b"),
        ({"kind": "quartic"}, CalibrateError, "^kind .*'quartic'"),
        ({"name": "Bad Name"}, CoefficientsError, "^'Bad Name'"),
        ({"logits": Z[:40], "target": T[:40]}, QualityError, r"^40 .*\b100 "),
        ({"group": np.arange(400) % 5}, QualityError, r"\b5 groups"),
        ({"target": NOISE, "group": np.arange(400) % 15}, QualityError, "targets"),
        ({"logits": spoilt(20, np.nan)}, UnusableRowsError, "^20 .*20 nan.* mask"),
        ({"logits": spoilt(20, -np.inf)}, UnusableRowsError, "^20 .*20 masked_target"),
    ],
)
def test_fit(arguments, error, value):
    refuses(partial(calibrate.fit, **{"logits": Z, "target": T} | arguments), error, value)


@pytest.mark.parametrize(
    ("logits", "target", "where", "value"),
    [
        (np.zeros((2, 3)), np.array([0]), None, r"^target .*int64 .*\(1,\).*\(2, 3\)"),
        (np.zeros((2, 3)), np.array([0, 3]), None, r"^target .*\(1,\) .*\[0, 3\)"),
        (np.zeros((2, 3)), np.array([0, -1]), None, r"^target .*\(1,\) .*\[0, 3\)"),
        (np.zeros((2, 3)), np.array([0.0, 1.0]), None, "^target .*float64"),
        (np.zeros((2, 3)), np.ones(2, bool), None, "^target .*bool"),
        (np.array([[1.0, np.nan]]), np.array([0]), None, r"^logits .*\(0,\) .*NaN"),
        (np.array([[1.0, -np.inf]]), np.array([1]), None, r"^target .*\(0,\) .*masked"),
        (np.zeros((2, 3)), np.eye(2, 3, 1) > 2, None, r"^target .*\(0,\) .*masked"),
        (np.ones((1, 2)), np.array([1]), np.array([True, False]), r"^where .*\(2,\).*\(1, 2\)"),
    ],
)
def test_optimal_beta(logits, target, where, value):
    refuses(lambda: calibrate.optimal_beta(logits, target, where), ValueError, value)


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("logits", "fit", "error", "value"),
    [
        (zeros(4), "paper", CoefficientsError, "'paper'"),
        (zeros(4), HEADS, CoefficientsError, r"unnamed@1 .*\(4,\)"),
        (zeros(2, 5, 9), HEADS, CoefficientsError, r"unnamed@1 .*head 2\b.* 2 heads"),
        (zeros(4, 4, 4), LAYERED, CoefficientsError, r"paper@1 .*layer\(i\)"),
        (zeros(4).astype(complex), PAPER, TypeError, "^logits .*complex64"),
        (["a", "b"], PAPER, TypeError, "^logits .*<U1"),
    ],
)
def test_adaptive_softmax(logits, fit, error, value):
    refuses(lambda: calibrate.adaptive_softmax(logits, fit), error, value)


def test_a_mask_of_another_shape():
    where = np.ones((3, 5), bool)
    for masked in (
        lambda: calibrate.adaptive_softmax(zeros(3, 4), PAPER, where=where),
        lambda: calibrate.entropy(zeros(3, 4), where=where),
    ):
        refuses(masked, ValueError, r"^where .*\(3, 5\).*\(3, 4\)")
    refuses(
        lambda: calibrate.inverse_temperature(np.ones(3), BY_SIZE, n=np.ones(4)), ValueError,
        r"^n .*\(4,\).*\(3,\)",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("H", "fit", "options", "value"),
    [
        (1.0, None, {}, "^coefficients .*None"),
        (2.0, BY_SIZE, {}, "by-size@1 .*n="),
        (None, PAPER, {"n": 3}, "paper@1 .*H,"),
    ],
)
def test_inverse_temperature(H, fit, options, value):
    refuses(lambda: calibrate.inverse_temperature(H, fit, **options), CoefficientsError, value)


@pytest.mark.parametrize(
    ("change", "error", "value"),
    [
        ({"implementation": "cudnn"}, ValueError, "implementation="),
        ({"mask": np.ones((3, 1, 1, 1), bool)}, ValueError, r"^mask .*\(3, 1, 1, 1\)"),
        ({"bias": np.ones((2, 3, 11, 11))}, ValueError, r"^bias .*\(2, 3, 11, 11\)"),
        ({"query_seq_lengths": np.ones(3, int)}, ValueError, r"^query_seq_lengths .*\[1 1 1\]"),
        ({"scale": np.ones(8)}, ValueError, r"^scale .*\(8,\)"),
        ({"query": np.ones((2, 11, 3, 8), "f4")}, ValueError, r"^query.*\(2, 11, 3, 8\)"),
        ({"query": np.ones((2, 11, 4, 8), "c8")}, TypeError, "^query .*complex64"),
        ({"coefficients": "paper"}, CoefficientsError, "'paper'"),
    ],
)
def test_attention(change, error, value):
    arguments = dict(zip(("query", "key", "value"), qkv(), strict=True)) | {"coefficients": PAPER}
    refuses(lambda: dot_product_attention(**arguments | change), error, value)


def collected(**changes):
    options = {"sizes": [16], "sets": 64, "folder": "run"} | changes
    return calibrate.collect(ToyHead(), **options)


def unfinished():
    collected()
    reopen(Path("run"))
    calibrate.solve("run")


def changed_manifest():
    collected()
    os.truncate("run/manifest.json", 1 << 24)
    calibrate.solve("run")


def foreign_folder():
    Path("run").mkdir()
    Path("run/thesis.tex").touch()
    collected()


@pytest.mark.parametrize(
    ("fails", "error", "value"),
    [
        (foreign_folder, CalibrateError, "^run "),
        (lambda: (collected(), collected(sets=65)), CalibrateError, r"sets .*\b64\b.*\b65\b"),
        (lambda: collected(max_bytes=1_000), CalibrateError, r"^max_bytes .*\b1000\b.* \d+$"),
        (lambda: collected(seed=1 << 64), CalibrateError, "seed .*18446744073709551616"),
        (lambda: calibrate.collect("nope", [16], 64), CalibrateError, "'nope'"),
        (lambda: calibrate.solve("nowhere"), CalibrateError, "^nowhere "),
        (unfinished, CalibrateError, "^run "),
        (changed_manifest, DamagedError, "run/manifest.json"),
        (lambda: calibrate.fit_polynomial(calibrate.solve(collected()), loss="x"), CalibrateError,
         "^loss .*'x'"),
        (lambda: calibrate.fit_polynomial(calibrate.solve(collected())), QualityError, r"\b100\b"),
    ],
)  # fmt: skip
def test_collect_solve_and_fit_polynomial(here, fails, error, value):
    refuses(fails, error, value)


def written(name, data):
    path = Path(name)
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize(
    ("fails", "error", "value"),
    [
        (lambda: calibrate.load(None), CoefficientsError, "^None "),
        (lambda: calibrate.load("paper@"), CoefficientsError, "^'paper@' "),
        (lambda: calibrate.load("paper@9"), CoefficientsError, "^'paper@9' .*paper@1"),
        (lambda: calibrate.load("paper", "nowhere"), CoefficientsError, "^nowhere "),
        (lambda: calibrate.load("./absent.json"), CoefficientsError, r"absent\.json"),
        (lambda: calibrate.load("max-retrieval", fingerprint="sha256:0"), CoefficientsError,
         "max-retrieval@.* sha256:0;"),
        (lambda: calibrate.load(written("./x.json", b"{}")), CoefficientsError, r"x\.json"),
        (lambda: PAPER.save("x.txt"), CoefficientsError, r"^'x\.txt' "),
        (lambda: Arrays.read("absent.npz"), CalibrateError, r"absent\.npz"),
        (lambda: Arrays.read(written("x.npz", b"PK")), DamagedError, r"x\.npz"),
        (lambda: Arrays.read(written("x.csv", b"1")), DamagedError, r"x\.csv .*savez"),
        (lambda: Arrays.read(Path(written("x.csv", b"1")).absolute().parent), CalibrateError,
         "savez"),
        (lambda: calibrate.fingerprint({"name": "x"}), CalibrateError, "^name .*<U1"),
    ],
)  # fmt: skip
def test_files(here, fails, error, value):
    refuses(fails, error, value)


@pytest.mark.parametrize(
    ("logits", "target", "value"),
    [(Z, T + 8, "^y .* 0 to 7"), (spoilt(1, np.nan), T, "^X .*NaN"), (Z[:, 0], T, "numpy.c_")],
)
def test_the_estimator(logits, target, value):
    with pytest.raises(ValueError, match=value):
        calibrate.SoftmaxCalibrator().fit(logits, target)


ALL = {"--max-kl", "--kind", "--overwrite", "--model", "--out", "--trained-up-to", "--loss"}


@pytest.mark.parametrize(
    ("in_python", "in_command"),
    [
        ("lower max_kl=, or", "lower --max-kl, or"),
        ("(max_kl=)?", "(--max-kl)?"),
        ('kind="log-size"; x', "--kind log-size; x"),
        ("overwrite=True to", "--overwrite to"),
        ("trained_up_to=64.", "--trained-up-to 64."),
        ("trained_up_to=0.5,", "--trained-up-to 0.5,"),
        ("trained_up_to=1e-05", "--trained-up-to 1e-05"),
        ("trained_up_to=1e+16", "--trained-up-to 1e+16"),
        ("trained_up_to=inf", "--trained-up-to inf"),
        ("max_kl=0.1 and rows=", "--max-kl 0.1 and rows="),  # not declared
        ("up_max_kl=0.1", "up_max_kl=0.1"),
        ("fit again, or max_kl=0.1", "fit again, or --max-kl 0.1"),
    ],
)
def test_a_command_shows_its_options_in_place_of_parameters(in_python, in_command):
    declared = ("max_kl", "kind", "overwrite", "trained_up_to")
    error = CalibrateError(in_python, parameter=declared)
    assert str(error) == error.args[0] == in_python
    assert with_options(error, ALL) == in_command


@pytest.mark.slow
def test_the_parameters_of_an_error_survive_another_process():
    sent = pickle.loads(pickle.dumps(QualityError('give rows="misranked"', parameter="rows")))
    assert isinstance(sent, QualityError)
    assert sent.parameters == ("rows",)
    with pytest.raises(CalibrateError) as failed:
        run([fail, fail], Jobs(2))
    assert failed.value.parameters == ("max_kl", "rows")


def fail():
    raise CalibrateError("give max_kl= or rows=", parameter=("max_kl", "rows"))


def test_text_of_others_is_escaped():
    error = CalibrateError("x\x1b[31m\ufdd0 is no file; give model=", parameter="model")
    assert str(error) == "x\\x1b[31m\\ufdd0 is no file; give model="


def test_a_folder_is_the_option_that_a_command_has():
    assert option_of({"--out", "--name"}, "folder") == "--out"
    assert option_of({"--name"}, "folder") == "--name"
    assert command("model fit RUN", for_export=True, kind="constant") == (
        "calibrate model fit RUN --for-export --kind constant"
    )


def options_of(words):
    """The options of a command, "model fit" for instance."""
    group = get_command(app)
    for word in words.split():
        group = group.commands[word]
    return {name for option in group.params for name in option.opts}


def test_commands_of_messages_exist():
    """Calls of `command` with literal arguments, wherever they stand."""
    n = 0
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "command":
                continue
            words = node.args[0] if node.args else None
            if not isinstance(words, ast.Constant) or not isinstance(words.value, str):
                continue
            known = options_of(re.sub(r"\b[A-Z]+\b", "", words.value))
            assert {as_option(keyword.arg, "") for keyword in node.keywords} <= known, path
            n += 1
    assert n > 5


def test_a_parameter_of_an_error_is_an_option_of_some_command():
    commands = ["collect", "fit", "export", "model collect", "model fit", "model evaluate"]
    known = set().union(*map(options_of, commands))
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "parameter":
                names |= {x.value for x in ast.walk(node.value) if isinstance(x, ast.Constant)}
    assert len(names) > 8
    assert {option_of(known, name) for name in names} <= known


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with collections of a head: of all rows, of misranked ones, of a part."""
    folder = tmp_path_factory.mktemp("messages")
    small = ("--sizes", 16, "--sets", 64)
    call("collect", *small, "--out", folder / "all")
    call("collect", *small, "--keep", "misranked", "--out", folder / "misranked")
    call("collect", *small, "--out", folder / "part")
    reopen(folder / "part")
    return folder


def other_sets(home):
    calibrate.collect("max-retrieval", [16], 65, folder=home / "all")


def all_of_misranked(home):
    calibrate.fit_polynomial(calibrate.solve(home / "misranked"))


def diagnosis_of_misranked(home):
    diagnose(open_collection(home / "misranked", RowCollection))


def unfinished(home):
    calibrate.solve(home / "part")


# A call in Python, the same on the command line, and what the message names in each.
FAILURES = {
    other_sets: (
        "collect --sizes 16 --sets 65 --out {home}/all",
        "overwrite=True",
        "--overwrite",
    ),
    all_of_misranked: (
        "fit {home}/misranked --name x",
        'loss="least-squares"',
        "--loss least-squares",
    ),
    diagnosis_of_misranked: ("diagnose {home}/misranked", *2 * ["misranked"]),
}


@pytest.mark.parametrize("fails", FAILURES, ids=lambda x: x.__name__)
def test_a_failure_names_parameters_in_python_and_options_in_a_command(home, fails):
    words, in_python, in_command = FAILURES[fails]
    with pytest.raises(CalibrateError) as failed:
        fails(home)
    assert in_python in str(failed.value)
    command, *arguments = words.format(home=home).split()
    line = refusal(command, *arguments)
    assert in_command in line
    own = OPTION.findall(re.sub("`.*?`", "", line))  # without commands to run
    assert set(own) <= options_of(command)


@pytest.mark.parametrize(
    ("fails", "function"),
    [(other_sets, calibrate.collect), (all_of_misranked, calibrate.fit_polynomial)],
)
def test_parameters_of_a_failure_are_those_of_the_function(home, fails, function):
    with pytest.raises(CalibrateError) as failed:
        fails(home)
    names = failed.value.parameters
    assert names
    assert {*names} <= inspect.signature(function).parameters.keys()


def test_a_run_into_another_collection_names_its_own_option(here):
    call("collect", "--sizes", 16, "--sets", 64, "--out", "runs/x")
    line = refusal("run", "--sizes", 16, "--sets", 65, "--name", "x")
    assert {"--name", "--overwrite"} <= set(OPTION.findall(line))
