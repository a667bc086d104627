"""Collect, solve, fit the polynomial and save, step by step in Python and by commands."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from commands import call, refusal
from conftest import ToyHead
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

import calibrate
from calibrate.core.rule import horner
from calibrate.errors import CalibrateError, CoefficientsError, QualityError
from calibrate.rows.rows import UnusableRowsError

HEAD = """
import numpy as np
from conftest import ToyHead

mine = ToyHead(noise=0.3)
"""


@pytest.fixture(scope="module")
def rows():
    return calibrate.collect(ToyHead(noise=0.3), [16, 64, 256], 400)


@pytest.fixture(scope="module")
def solved(rows):
    return calibrate.solve(rows)


@pytest.fixture(scope="module")
def fits(solved):
    """By maximum likelihood, and by least squares."""
    losses = ("likelihood", "least-squares")
    return {loss: calibrate.fit_polynomial(solved, loss=loss) for loss in losses}


@pytest.mark.parametrize("loss", ["likelihood", "least-squares"])
def test_the_four_steps_give_a_fit_that_is_loaded_and_applied(fits, here, loss):
    rule = fits[loss]
    assert len(rule.coefficients) == 5
    assert rule.r_squared <= 1
    again = calibrate.load(rule.save("mine.json"))
    assert again == rule
    assert (again.r_squared, again.verdict) == (rule.r_squared, rule.verdict)
    logits = np.linspace(0, 3, 64, dtype=np.float32)
    H = float(calibrate.entropy(logits))
    inside = np.clip(H, *rule.only.domain)
    beta = np.clip(horner(inside, rule.coefficients), rule.rule.min_beta, rule.rule.max_beta)
    np.testing.assert_allclose(
        calibrate.adaptive_softmax(logits, again), softmax(beta * logits), rtol=1e-4
    )


def test_the_fit_of_a_head_is_the_fit_of_its_arrays(rows, fits):
    shards = [shard for _, shard in rows.shards()]
    fit = calibrate.fit([x.logits for x in shards], [x.target for x in shards])
    assert fit.coefficients == fits["likelihood"].coefficients


def test_another_file_is_overwritten_only_on_request(fits, here):
    smoothed, squares = fits.values()
    assert smoothed.coefficients != squares.coefficients
    smoothed.save("mine.json")
    with pytest.raises(CoefficientsError, match="overwrite=True"):
        squares.save("mine.json")
    assert calibrate.load("./mine.json") == smoothed
    squares.save("mine.json", overwrite=True)
    assert calibrate.load("./mine.json") == squares


def test_theta_maximises_the_probability_of_the_target(rows, solved):
    """By SciPy's minimiser, for some inputs with an interior optimum."""
    (_, shard), *_ = rows.shards()
    some = np.flatnonzero(solved.status[: len(shard.target)] == "interior")[:20]
    assert len(some) == 20
    for i in some:
        z, t = shard.logits[i].astype(float), shard.target[i]
        best = minimize_scalar(
            lambda log_beta, z=z, t=t: -log_softmax(np.exp(log_beta) * z)[t],
            bounds=(-6, 6),
            method="bounded",
            options={"xatol": 1e-9},
        )
        assert solved.theta[i] == pytest.approx(np.exp(-best.x), rel=1e-3)
    np.testing.assert_array_equal(solved.theta[solved.status == "sharp"], 0)
    np.testing.assert_array_equal(solved.theta[solved.status == "flat"], np.inf)
    assert set(solved.n.tolist()) == {16, 64, 256}


def test_too_many_bad_inputs_are_refused_as_by_the_command(here):
    z = np.random.default_rng(0).standard_normal((400, 16)).astype(np.float32)
    z[::20, 0] = np.nan
    np.savez("bad.npz", logits=z, target=np.arange(400) % 16)
    call("collect", "--logits", "bad.npz", code=3)
    with pytest.raises(QualityError, match="20 nan"):
        calibrate.fit_polynomial(calibrate.solve("runs/bad"))
    assert "20 nan" in refusal("fit", "runs/bad", "--name", "bad", "--paper", code=3)


@pytest.mark.slow
def test_commands_give_the_same_fits(here):
    Path("heads.py").write_text(HEAD)
    words = ["--head", "heads:mine", "--sizes", "16,64,256", "--sets", "400", "--out", "runs/mine"]
    call("collect", *words)
    done = json.loads(call("solve", "runs/mine", "--out", "theta.csv", "--json").stdout)
    solved = calibrate.solve("runs/mine")
    assert done["misranked"] == solved.misranked.sum()
    table = np.genfromtxt("theta.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
    np.testing.assert_allclose(table["theta"], solved.theta, rtol=1e-12)
    assert table["status"].tolist() == solved.status.tolist()
    call("solve", "runs/mine", "--out", "theta.npz")
    with np.load("theta.npz") as arrays:
        np.testing.assert_array_equal(arrays["beta"], solved.beta)
    call("fit", "runs/mine", "--name", "mine")
    assert calibrate.load("mine") == calibrate.fit_polynomial(solved)
    call("fit", "runs/mine", "--name", "squares", "--paper")
    assert calibrate.load("squares") == calibrate.fit_polynomial(solved, loss="least-squares")
    assert "not a .csv or .npz file" in refusal("solve", "runs/mine", "--out", "theta.txt", code=2)


def test_a_fingerprint_is_of_values_shapes_and_names(here):
    arrays = {"query": np.ones((2, 3)), "layers": [np.zeros(4), 1.5]}
    found = calibrate.fingerprint(arrays)
    assert found.startswith("sha256:")
    assert len(found) == 71
    assert calibrate.fingerprint(dict(reversed(arrays.items()))) == found
    for other in (
        {**arrays, "query": np.ones((3, 2))},
        {**arrays, "query": np.ones((2, 3), np.float32)},
        {"key": arrays["query"], "layers": arrays["layers"]},
        {**arrays, "layers": [np.zeros(4), 1.25]},
        {**arrays, "layers": [1.5, np.zeros(4)]},
    ):
        assert calibrate.fingerprint(other) != found
    Path("weights.bin").write_bytes(b"1")
    one = calibrate.fingerprint("weights.bin")
    Path("weights.bin").write_bytes(b"2")
    assert calibrate.fingerprint("weights.bin") != one
    with pytest.raises(CalibrateError, match="'absent'"):
        calibrate.fingerprint("absent")
    with pytest.raises(CalibrateError, match=r"name .*<U1"):
        calibrate.fingerprint({"name": "x"})


def test_numbers_may_be_scalars_of_numpy(here):
    options = {"sizes": 2 ** np.arange(4, 6), "sets": np.int64(70), "seed": np.uint8(3)}
    one = calibrate.collect(ToyHead(), **options, folder="run")
    other = calibrate.collect(ToyHead(), [16, 32], 70, seed=3)
    assert one.configuration == other.configuration


@pytest.mark.parametrize(
    ("argument", "value"),
    [("sizes", []), ("sizes", [0]), ("sizes", [1]), ("sets", 0), ("sets", 1e12),
     ("sets", 10**12), ("seed", -1), ("head", None), ("head", 3)],
)  # fmt: skip
def test_wrong_values_are_named(argument, value):
    arguments = {"head": ToyHead(), "sizes": [16], "sets": 64, argument: value}
    shown = type(value).__name__ if argument == "head" else repr(value).strip("[]")
    with pytest.raises(CalibrateError, match=rf"^{argument} .*{re.escape(shown)}"):
        calibrate.collect(**arguments)


def test_a_missing_step_is_named(rows):
    with pytest.raises(CalibrateError, match=r"solve\(rows\)"):
        calibrate.fit_polynomial(rows)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_rows_are_refused_at_every_step(here, value):
    """The collection is written before it is refused."""

    def spoil(logits):
        logits[:5, 3] = value

    for step in (
        lambda: calibrate.collect(ToyHead(spoil=spoil), [16], 200, folder="run"),
        lambda: calibrate.solve("run"),
    ):
        with pytest.raises(UnusableRowsError, match=r"^5 of 200 "):
            step()
    assert "5 of 200" in refusal("solve", "run", "--out", "theta.csv", code=3)
    assert not Path("theta.csv").exists()
