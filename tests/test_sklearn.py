"""The scikit-learn estimator: a thin calibrate.fit, and scikit-learn's own checks."""

import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import check_estimator
from test_array_fit import scored

import calibrate
from calibrate.evidence.baselines import log_size
from calibrate.sklearn import EXPECTED_FAILED_CHECKS

Calibrator = calibrate.SoftmaxCalibrator


def test_scikit_learns_own_checks_pass_but_those_listed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(
            Calibrator(), expected_failed_checks=EXPECTED_FAILED_CHECKS, on_skip=None
        )
    by_status = {status: {r["check_name"] for r in results if r["status"] == status}
                 for status in ("passed", "xfail")}  # fmt: skip
    assert by_status["xfail"] == set(EXPECTED_FAILED_CHECKS)
    assert len(by_status["passed"]) > 30


def test_it_is_calibrate_fit_under_scikit_learns_names():
    logits, target = scored(300, 16)
    logits[:, 15] = np.where(target == 15, logits[:, 15], -np.inf)  # masked
    estimator = clone(Calibrator(q=0.0, seed=4)).fit(logits, target)
    fit = calibrate.fit(logits, target, q=0.0, seed=4)
    assert estimator.coefficients_ == fit
    assert estimator.verdict_ == fit.verdict
    probs = estimator.predict_proba(logits)
    np.testing.assert_allclose(probs, calibrate.adaptive_softmax(logits, fit), atol=1e-6)
    np.testing.assert_array_equal(estimator.predict(logits), logits.argmax(axis=1))
    mean = np.log(probs[np.arange(300), target]).mean()
    assert estimator.score(logits, target) == pytest.approx(mean)
    assert mean > Calibrator.score(_plain(estimator), logits, target)


def _plain(estimator):
    other = clone(estimator)
    other.__dict__ |= {"coefficients_": calibrate.identity(), "n_features_in_": 16}
    return other


def test_large_negative_numbers_mask_as_they_do_in_a_fit():
    """Else n, and with it beta of a rule by size, would count what the fit did not."""
    calibrator = calibrate.SoftmaxCalibrator()
    calibrator.coefficients_ = log_size(2)
    logits = np.linspace(0, 1, 16).reshape(1, -1)
    calibrator.n_features_in_ = 16
    mask = np.arange(16) < 8
    found = [calibrator.predict_proba(np.where(mask, logits, x)) for x in (-np.inf, -1e9)]
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(calibrator.predict_proba(1e307 * mask[None])[0, :8], 1 / 8)


def test_where_nothing_gains_softmax_stays_as_it_is_with_a_warning():
    logits, _ = scored(200, 16)
    target = (logits + np.random.default_rng(0).gumbel(size=logits.shape)).argmax(axis=1)
    with pytest.warns(UserWarning, match="softmax is left as it is: not for this head"):
        estimator = Calibrator().fit(logits, target)
    assert estimator.coefficients_ == calibrate.identity()
    assert "no rule beats plain softmax" in estimator.verdict_


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_numbers_and_targets_are_value_errors(value):
    logits, target = scored(200, 16)
    with pytest.raises(ValueError, match="y has other values than positions 0 to 15"):
        Calibrator().fit(logits, target + 10)
    with pytest.raises(ValueError, match="give a share of the rows between 0 and 1"):
        Calibrator(held_out=2).fit(logits, target)
    logits[0, 0] = value
    with pytest.raises(ValueError, match="X has NaN or infinity"):
        Calibrator().fit(logits, target)
