"""Refusals of the public doors: the class of the error, and the value that it names."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from attention_cases import qkv
from cases import per_head
from commands import refusal
from conftest import ToyHead, reopen

import calibrate
from calibrate.core.rule import Rule
from calibrate.datasets.logits_files import Arrays
from calibrate.datasets.row_quality import UnusableRowsError
from calibrate.errors import CalibrateError, CoefficientsError, DamagedError, QualityError
from calibrate.jax.attention import dot_product_attention
from calibrate.store.entry import Entry
from calibrate.store.fit import Fit

RNG = np.random.default_rng(0)
Z = 2 * RNG.normal(size=(400, 8))
T = (Z + RNG.gumbel(size=Z.shape)).argmax(1)  # as softmax(Z) has it
NOISE = RNG.integers(0, 8, 400)
PAPER = calibrate.load("paper")
HEADS, _ = per_head("polynomial")
BY_SIZE = Fit(Rule.log_size(), (Entry((0.5, 0.6), (2.7, 7.0)),), name="by-size")
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
        ({"group": [None] * 400}, CalibrateError, "^group .*None"),
        ({"where": np.ones(8, bool), "mask": np.ones(8, bool)}, CalibrateError, "where="),
        ({"tolerance": np.inf}, CalibrateError, "^tolerance .*inf"),
        ({"seed": True}, CalibrateError, "^seed .*True"),
        ({"head": np.full(400, -2)}, CalibrateError, "^head .* -2 to -2"),
        ({"seed": 0.5}, CalibrateError, r"^seed .* 0\.5\b"),
        ({"trained_up_to": 16.5}, CalibrateError, r"^trained_up_to .* 16\.5\b"),
        ({"tolerance": -0.1}, CalibrateError, r"^tolerance .* -0\.1\b"),
        ({"min_beta": 1.5}, CalibrateError, r"^min_beta .* 1\.5\b"),
        ({"kind": "quartic"}, CalibrateError, "^kind .*'quartic'"),
        ({"name": "Bad Name"}, CoefficientsError, "^'Bad Name'"),
        ({"logits": Z[:40], "target": T[:40]}, QualityError, r"^40 .*\b100 "),
        ({"group": np.arange(400) % 5}, QualityError, r"\b5 groups"),
        ({"target": NOISE}, QualityError, "targets"),
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
    for call in (
        lambda: calibrate.adaptive_softmax(zeros(3, 4), PAPER, where=where),
        lambda: calibrate.entropy(zeros(3, 4), where=where),
    ):
        refuses(call, ValueError, r"^where .*\(3, 5\).*\(3, 4\)")
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
        (unfinished, CalibrateError, "^run .*--allow-partial"),
        (changed_manifest, DamagedError, "16,777,216 .* 8,388,608"),
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
        (lambda: Arrays.read(written("x.csv", b"1")), CalibrateError, r'read_csv\("x\.csv"\)'),
        (lambda: Arrays.read(written("x.parquet", b"PAR1")), CalibrateError, "read_parquet"),
        (lambda: Arrays.read(written("x.safetensors", b"0")), CalibrateError, "load_file"),
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


@pytest.mark.parametrize(
    ("command", "code", "value"),
    [
        ("collect --head nope", 1, "'nope'"),
        ("collect --logits no.npz", 1, "no.npz"),
        ("collect --logits x.npz --sets 1", 2, "--sets"),
        ("collect --sizes 16,x", 2, "'x'"),
        ("collect --sets 0", 2, "--sets"),
        ("collect --max-bytes 1e999", 2, "--max-bytes"),
        ("fit nowhere --name x", 1, "nowhere "),
        ("fit nowhere --name ../x", 1, "'../x'"),
        ("fit nowhere --name x --loss some", 2, "'some'"),
        ("fit nowhere --name x --min-beta 2", 2, "--min-beta"),
        ("fit nowhere --name x --paper --kind constant", 2, "constant"),
        ("run --name Bad-Name", 1, "'Bad-Name'"),
        ("evaluate --fits nope", 1, "'nope'"),
        ("report paper --out nope/r.html", 2, "'nope/r.html'"),
    ],
)
def test_commands(here, command, code, value):
    """Before anything is collected or written."""
    assert value in refusal(*command.split(), code=code)
    assert list(here.iterdir()) == []
