"""The paper's procedure: numpy.polyfit of the optimal beta of misranked inputs, nothing clipped."""

import numpy as np
import pytest
from conftest import ToyHead
from planted import planted_rows
from reference import entropy, softmax
from scipy.optimize import brentq

import calibrate
from calibrate.core.rule import RuleForm
from calibrate.errors import CalibrateError, QualityError
from calibrate.fitting.least_squares import fit_least_squares
from calibrate.rows.collect import collect_from_head
from calibrate.rows.solve import solve_rows


@pytest.fixture(scope="module")
def solved():
    return calibrate.solve(calibrate.collect(ToyHead(noise=0.3), [16, 64, 256], 400))


def test_the_polynomial_is_polyfits(solved):
    """From logits to five numbers by other means: root finding, entropy and polyfit of SciPy."""
    H, betas = [], []
    for _, shard in solved.collection.shards():
        z = shard.logits.astype(float)
        at_target = z[np.arange(len(z)), shard.target]
        for row, target in zip(z, at_target, strict=True):
            if row.max() > target > row.mean():
                gap = lambda beta, row=row, target=target: softmax(row, beta=beta) @ row - target  # noqa: E731
                betas.append(brentq(gap, 1e-3, 1e5))
                H.append(entropy(row))
    expected = np.polyfit(H, betas, 4)
    fit = calibrate.fit_polynomial(solved, loss="least-squares")
    assert fit.rule == RuleForm(0.5, 1.0, 64.0)
    ours, theirs = np.polyval(fit.coefficients, H), np.polyval(expected, H)
    # The optimal beta of a near tie is known to some parts in 10,000 in float32.
    np.testing.assert_allclose(ours, theirs, atol=2e-3 * np.abs(theirs).max())
    used = solved.take(solved.misranked & (solved.status == "interior"))
    polyfit = np.polyval(np.polyfit(used.entropy, used.beta, 4), used.entropy)
    ours = np.polyval(fit.coefficients, used.entropy)
    np.testing.assert_allclose(ours, polyfit, rtol=0, atol=1e-9 * np.abs(polyfit).max())
    np.testing.assert_allclose(fit.entries[0].domain, (used.entropy.min(), used.entropy.max()))
    assert fit.evidence["inputs"]["fitted"] == len(used.beta)
    assert fit.evidence["heads"][0]["penalty"] is None


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_clipped_whatever_the_optimal_betas(seed):
    """Near ties, whose optimal beta is in the thousands, move it as they move polyfit."""
    rows = planted_rows(lambda H, n: 1.5 + 0 * H, count=300, seed=seed)
    extreme = np.where(np.arange(len(rows.beta)) % 50 == 0, 5_000.0, rows.beta)
    rows = rows._replace(beta=np.where(rows.fitted_by_least_squares(), extreme, rows.beta))
    used = rows.take(rows.fitted_by_least_squares())
    expected = np.polyfit(used.entropy, used.beta, 4)
    np.testing.assert_array_equal(fit_least_squares(rows)[0], expected)


def test_misranked_inputs_alone_have_no_verdict(tmp_path):
    folder = tmp_path / "run"
    collect_from_head(ToyHead(noise=0.3), [16, 64, 256], 400, 0, folder, keep="misranked")
    kept = calibrate.solve(folder)
    fit = calibrate.fit_polynomial(kept, loss="least-squares")
    assert "held_out" not in fit.evidence
    assert "no verdict" in fit.verdict
    whole = calibrate.solve(calibrate.collect(ToyHead(noise=0.3), [16, 64, 256], 400))
    other = calibrate.fit_polynomial(whole, loss="least-squares")
    np.testing.assert_allclose(fit.coefficients, other.coefficients, rtol=1e-6)
    with pytest.raises(CalibrateError) as refused:
        calibrate.fit_polynomial(kept)  # by likelihood it would be biased
    assert refused.value.parameters == ("loss",)


def test_likelihood_on_misranked_inputs_would_be_biased():
    """Why it is refused: a planted beta of 3."""
    from calibrate.fitting.penalised_likelihood import fit_constant_beta

    rows = planted_rows(lambda H, n: 3.0 + 0 * H)
    bounds = 1 / 1024, 1024.0
    assert fit_constant_beta(rows, bounds) == pytest.approx(3, rel=0.1)
    assert fit_constant_beta(rows.take(rows.misranked), bounds) < 2.5


def test_a_polynomial_that_loses_is_not_saved():
    """Near ties whose optimal beta is huge make it worse than softmax."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(2_000, 8))
    z[:, 0] = z.max(axis=1) - 1e-4 * rng.random(2_000)
    target = np.where(rng.random(2_000) < 0.3, 0, z.argmax(axis=1))
    z[target != 0, 0] -= 2.0
    flip = rng.random(2_000) < 0.3
    target[flip] = rng.integers(0, 8, flip.sum())
    with pytest.raises(QualityError):
        calibrate.fit(z, target, loss="least-squares")
    assert calibrate.fit(z, target, kind="constant").rule.kind == "constant"


def test_least_squares_fit_no_other_kind():
    z = np.random.default_rng(0).normal(size=(300, 8))
    with pytest.raises(CalibrateError):
        calibrate.fit(z, z.argmax(axis=1), kind="constant", loss="least-squares")


def test_few_misranked_inputs_are_refused_with_their_number():
    few = calibrate.solve(calibrate.collect(ToyHead(noise=0.3), [16], 64))
    count = int((few.misranked & (few.status == "interior")).sum())
    with pytest.raises(QualityError, match=rf"^{count} .*100"):
        calibrate.fit_polynomial(few, loss="least-squares")


def test_weights_are_those_of_repeated_rows():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(400, 12)).astype(np.float32)
    target = (2 * z + rng.gumbel(size=z.shape)).argmax(axis=1)
    once = solve_rows(z, target, entropy(z), 12)
    weight = rng.integers(1, 4, 400)
    again = solve_rows(*(np.repeat(x, weight, axis=0) for x in (z, target, entropy(z))), 12)
    one, _ = fit_least_squares(once._replace(weight=weight.astype(float)))
    two, _ = fit_least_squares(again)
    np.testing.assert_allclose(one, two, rtol=1e-6)
