"""Fit: against least squares by other means, planted polynomials, and hopeless data."""

import numpy as np
import pytest
from conftest import ToyHead
from scipy.optimize import minimize

import calibrate
from calibrate.errors import CalibrateError, QualityError
from calibrate.files.coefficient_file import dumps, read
from calibrate.files.coefficients import Entry
from calibrate.files.publishing import publish
from calibrate.maths import reference, solver
from calibrate.pipeline.collect import collect
from calibrate.pipeline.fit import (
    fit_collection,
    fit_polynomial,
    refuse_negative,
    same_fit,
    solve_collection,
)

PLANTED = (0.02, -0.3, 1.2, 0.4, 0.9)


@pytest.fixture
def noisy():
    """Rows around a planted polynomial."""
    rng = np.random.default_rng(0)
    H = rng.uniform(0.3, 7, 5_000)
    return H, np.polyval(PLANTED, H) + 0.1 * rng.standard_normal(len(H))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "toy"
    collect(ToyHead(noise=1.0), [16, 64, 256], 1_000, 0, folder)
    return folder


@pytest.mark.parametrize("objective", ["beta", "theta"])
def test_recovers_a_planted_polynomial(objective):
    H = np.linspace(0.1, 9, 400)
    powers, domain = fit_polynomial(H, np.polyval(PLANTED, H), objective)
    np.testing.assert_allclose(powers, PLANTED, rtol=1e-6)
    assert domain == pytest.approx(np.percentile(H, [0.5, 99.5]))


def test_beta_objective_is_least_squares(noisy):
    powers, _ = fit_polynomial(*noisy)
    np.testing.assert_allclose(powers, np.polyfit(*noisy, 4), rtol=1e-6)


def test_theta_objective_is_least_squares_in_theta(noisy):
    H, beta = noisy

    def loss(powers):
        applied = 1 / np.maximum(np.polyval(powers, H), 1)
        return np.sum((applied - np.minimum(1 / beta, 1)) ** 2)

    powers, _ = fit_polynomial(H, beta, "theta")
    start, _ = fit_polynomial(H, beta, "beta")
    assert loss(powers) < loss(start)
    polished = minimize(loss, powers, method="Nelder-Mead", options={"maxiter": 2_000})
    assert loss(powers) <= polished.fun * (1 + 1e-4)


def test_solves_every_row_as_the_reference_does(folder):
    collection = calibrate.files.collection.open_collection(folder)
    rows = solve_collection(collection)
    everything = [(s.logits[i], s.target[i]) for _, s in collection.shards() for i in range(5)]
    first = np.flatnonzero(np.diff(rows.size, prepend=0))
    for k, (logits, target) in enumerate(everything):
        row = first[k // 5] + k % 5
        expected = reference.optimal_beta(logits, target)
        assert rows.beta[row] == pytest.approx(expected, rel=1e-3)
    assert sum(rows.count_by_status().values()) == len(rows.beta)
    assert (rows.interior().status == solver.INTERIOR).all()


@pytest.mark.parametrize("objective", ["beta", "theta"])
def test_a_collection_becomes_a_file_that_loads(folder, tmp_path, objective):
    fit = fit_collection(folder, "toy", objective)
    published, _ = publish(fit.coefficients, tmp_path)
    loaded = calibrate.load("toy", tmp_path)
    assert loaded == fit.coefficients
    assert loaded.source["head"] == "toy"
    assert loaded.source["fingerprint"] == "sha256:toy-1.0"
    assert loaded.source["options"]["objective"] == objective
    rows = loaded.quality["rows"]
    assert rows["misranked"] == rows["interior"] + rows["flat"] + rows["sharp"] + rows["unsolved"]
    assert rows["sharp"] == rows["unsolved"] == 0
    assert read(published.path) == loaded
    H = np.linspace(*loaded.only.domain, 50)
    assert float(np.max(calibrate.inverse_temperature(H, loaded))) > 1


def test_a_refit_says_the_same_and_another_objective_does_not(folder, tmp_path):
    first, _ = publish(fit_collection(folder, "toy").coefficients, tmp_path, same_fit)
    again, written = publish(fit_collection(folder, "toy").coefficients, tmp_path, same_fit)
    assert (again.path, written) == (first.path, False)
    other, written = publish(
        fit_collection(folder, "toy", "theta").coefficients, tmp_path, same_fit
    )
    assert (other.version, written) == (2, True)


def test_same_bytes_but_for_created(folder):
    one, two = (fit_collection(folder, "toy").coefficients for _ in range(2))
    strip = [dumps(f).replace(f.provenance["created"], "") for f in (one, two)]
    assert strip[0] == strip[1]


def test_too_few_rows_are_exit_3_with_advice(tmp_path):
    collect(ToyHead(), [8], 50, 0, tmp_path / "run")
    with pytest.raises(QualityError, match="fewer than the 100 .*sizes 16..16384") as caught:
        fit_collection(tmp_path / "run", "toy")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("n_distinct", [1, 2, 4])
def test_a_rank_deficient_fit_is_refused(n_distinct):
    H = np.resize(np.linspace(1, 3, n_distinct), 500)
    with pytest.raises(QualityError, match="determine only .* of the 5 coefficients"):
        fit_polynomial(H, H + 1)


def test_a_polynomial_that_is_not_positive_is_refused():
    H = np.linspace(1, 5, 500)
    with pytest.raises(QualityError, match="falls to .* on its domain"):
        refuse_negative(Entry(*fit_polynomial(H, (H - 3) ** 2 - 0.5)))


def test_an_absent_or_unfinished_collection_is_named(tmp_path):
    with pytest.raises(CalibrateError, match="holds no collection"):
        fit_collection(tmp_path, "x")
