"""The scikit-learn estimator: a thin calibrate.fit, and scikit-learn's own checks."""

import warnings
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin, clone, is_classifier
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import VotingClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import RocCurveDisplay, log_loss, roc_auc_score
from sklearn.model_selection import TunedThresholdClassifierCV, cross_validate
from sklearn.utils.estimator_checks import check_estimator
from test_arrays import scored

import calibrate
from calibrate.evidence.baselines import log_size_rule

Calibrator = calibrate.SoftmaxCalibrator
_NO_POSITIONS = "its y has the classes 0, 1 and 2, and its X two columns: 2 is not a position"
# Of scikit-learn's check_estimator; all others pass.
EXPECTED_FAILED_CHECKS = {
    f"check_{name}": _NO_POSITIONS
    for name in (
        "estimators_fit_returns_self",
        "estimators_overwrite_params",
        "readonly_memmap_input",
        "sample_weights_not_an_array",
        "sample_weights_not_overwritten",
        "sample_weights_pandas_series",
        "sample_weights_shape",
        "classifier_data_not_an_array",
    )
} | {
    "check_classifiers_train": "it asks for 83 % accuracy of features that are no logits",
    "check_classifiers_classes": "its y has texts, not positions",
    "check_classifiers_one_label": "a position that y lacks may be predicted: the highest logit",
}


def few_groups(rows):
    """Too few for a slope: a fit is quick."""
    return np.arange(rows) % 15


@pytest.mark.slow
def test_scikit_learns_checks_pass_except_the_listed_ones():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(
            Calibrator(), expected_failed_checks=EXPECTED_FAILED_CHECKS, on_skip=None
        )
    by_status = {status: {r["check_name"] for r in results if r["status"] == status}
                 for status in ("passed", "xfail")}  # fmt: skip
    # Without pandas scikit-learn leaves this check out.
    left_out = set() if find_spec("pandas") else {"check_sample_weights_pandas_series"}
    assert by_status["xfail"] == set(EXPECTED_FAILED_CHECKS) - left_out
    assert len(by_status["passed"]) > 30


def test_the_estimator_gives_the_fit_of_calibrate_fit():
    logits, target = scored(300, 16)
    logits[:, 15] = np.where(target == 15, logits[:, 15], -np.inf)  # masked
    groups = few_groups(300)
    estimator = clone(Calibrator(seed=4)).fit(logits, target, groups)
    fit = calibrate.fit(logits, target, group=groups, seed=4)
    assert estimator.coefficients_ == fit
    assert estimator.verdict_ == fit.verdict
    probs = estimator.predict_proba(logits)
    np.testing.assert_allclose(probs, calibrate.adaptive_softmax(logits, fit), atol=2e-5)
    np.testing.assert_array_equal(estimator.predict(logits), logits.argmax(axis=1))
    mean = np.log(probs[np.arange(300), target]).mean()
    assert estimator.score(logits, target) == pytest.approx(mean)
    assert mean > Calibrator.score(_plain(estimator), logits, target)


def test_probabilities_are_computed_in_float64():
    logits = scored(300, 16)[0].astype(np.float32)
    probs = [_plain(Calibrator()).predict_proba(x) for x in (logits, logits.astype(float))]
    assert probs[0].dtype == np.float64
    np.testing.assert_array_equal(*probs)


def test_one_constant_is_that_of_scikit_learns_temperature_scaling():
    pytest.importorskip("sklearn", "1.8")
    rng = np.random.default_rng(0)
    for beta in (0.3, 10):
        sharp, fresh = rng.normal(0, 4, (2, 1000, 20))
        logits, target = sharp / beta, (sharp + rng.gumbel(size=sharp.shape)).argmax(axis=1)
        theirs = CalibratedClassifierCV(
            FrozenEstimator(_Logits().fit(logits, target)), method="temperature"
        ).fit(logits, target)
        ours = Calibrator(kind="constant").fit(logits, target, few_groups(1000))
        found = [np.log(c.predict_proba(fresh / beta)) for c in (ours, theirs)]
        losses = [-(softmax(fresh, axis=1) * log_p).sum(axis=1).mean() for log_p in found]
        assert losses[0] == pytest.approx(losses[1], abs=1e-4)


class _Logits(ClassifierMixin, BaseEstimator):
    """A classifier whose features are its logits."""

    def fit(self, X, y):
        self.classes_ = np.arange(X.shape[1])
        return self

    def predict(self, X):
        return X.argmax(axis=1)

    def decision_function(self, X):
        return X


def test_classes_name_the_columns_for_metrics():
    """Metrics could not guess the last position, which no row has as its target."""
    logits, target = scored(300, 16)
    logits, target = logits[target < 15], target[target < 15]
    estimator = Calibrator().fit(logits, target, few_groups(len(target)))
    np.testing.assert_array_equal(estimator.classes_, np.arange(16))
    loss = log_loss(target, estimator.predict_proba(logits), labels=estimator.classes_)
    assert loss == pytest.approx(-estimator.score(logits, target))


def _plain(estimator):
    other = clone(estimator)
    other.__dict__ |= {"coefficients_": calibrate.identity(), "n_features_in_": 16}
    return other


def test_logits_near_the_limit_of_float64_do_not_overflow():
    calibrator = calibrate.SoftmaxCalibrator()
    calibrator.coefficients_, calibrator.n_features_in_ = log_size_rule(2), 16
    probs = calibrator.predict_proba(1e307 * (np.arange(16) < 8)[None])
    np.testing.assert_allclose(probs[0, :8], 1 / 8)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_shift_of_the_logits_changes_nothing_and_finite_logits_give_finite_probabilities(dtype):
    logits, target = scored(400, 16)
    logits = np.round(64 * logits) / 64  # which an offset of 10,000 does not round in float32
    groups = few_groups(400)
    estimator = Calibrator().fit(logits.astype(dtype), target, groups)
    assert estimator.coefficients_ != calibrate.identity()
    probs = estimator.predict_proba(logits.astype(dtype))
    for offset in (1e4, -1e4, -9_001.0) if dtype == "float32" else (-1e4, 1e6, -1e12):
        shifted = (logits + offset).astype(dtype)
        np.testing.assert_allclose(estimator.predict_proba(shifted), probs, rtol=1e-3)
        again = Calibrator().fit(shifted, target, groups)
        np.testing.assert_allclose(again.predict_proba(shifted), probs, rtol=1e-2)
        assert "masked" not in again.verdict_
    wild = [np.r_[-1e300, 1e300, np.zeros(14)], np.full(16, -1e300), np.linspace(-1e5, 0, 16)]
    assert np.isfinite(estimator.predict_proba(np.array(wild))).all()
    low = np.array([[-8995.0, -9001, -8996, -8999] * 4, [5.0, -1, 4, 1] * 4])
    np.testing.assert_allclose(*estimator.predict_proba(low), rtol=1e-9)


def test_joint_log_probabilities_of_long_texts_are_logits():
    """As MultinomialNB.predict_joint_log_proba gives them for texts of some 1,500 words."""
    rng = np.random.default_rng(0)
    words = rng.dirichlet(np.ones(2_000), 4)
    topics = rng.integers(4, size=300)
    counts = np.array([rng.multinomial(1_500, words[t] / 10 + words.mean(0) * 0.9) for t in topics])
    logits = counts @ np.log(0.05 * words + 0.95 * words.mean(axis=0)).T
    assert (logits < -9_001).all()
    groups = few_groups(300)
    estimator = Calibrator().fit(logits, topics, groups)
    probs = estimator.predict_proba(logits)
    np.testing.assert_allclose(probs.sum(axis=1), 1)
    centred = Calibrator().fit(logits - logits.max(axis=1, keepdims=True), topics, groups)
    assert estimator.coefficients_.only == centred.coefficients_.only


def test_without_a_gain_softmax_is_kept_with_a_warning():
    logits, _ = scored(200, 16)
    target = (logits + np.random.default_rng(0).gumbel(size=logits.shape)).argmax(axis=1)
    with pytest.warns(UserWarning, match="softmax"):
        estimator = Calibrator().fit(logits, target, few_groups(200))
    assert estimator.coefficients_ == calibrate.identity()
    assert "no significant gain" in estimator.verdict_


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_numbers_and_targets_are_value_errors(value):
    logits, target = scored(200, 16)
    with pytest.raises(ValueError, match=r"^y .*\b0 .*\b15\b"):
        Calibrator().fit(logits, target + 10)
    with pytest.raises(ValueError, match="classes_"):
        Calibrator().fit(logits, target.astype(str))
    with pytest.raises(ValueError, match="kind"):
        Calibrator(kind="quartic").fit(logits, target)
    logits[0, 0] = value
    with pytest.raises(ValueError, match=r"^X .*NaN"):
        Calibrator().fit(logits, target)


def test_weights_count_as_repeated_rows():
    logits, target = scored(400, 16)
    weight = np.arange(400) % 3
    groups = few_groups(400)
    repeated = [np.repeat(x, weight, axis=0) for x in (logits, target, groups)]
    one = Calibrator(kind="constant").fit(logits, target, groups, sample_weight=weight)
    other = Calibrator(kind="constant").fit(*repeated)
    assert one.coefficients_.coefficients == pytest.approx(other.coefficients_.coefficients)
    unweighted = Calibrator(kind="constant").fit(logits, target, groups)
    assert one.coefficients_ != unweighted.coefficients_


def test_scores_of_a_binary_classifier_need_a_second_column():
    rng = np.random.default_rng(0)
    z = rng.normal(size=900)
    y = (4 * z + rng.logistic(size=900) > 0).astype(int)
    for scores in (z, z[:, None]):
        with pytest.raises(ValueError, match=r"numpy\.c_"):
            Calibrator().fit(scores, y)
    calibrator = Calibrator().fit(np.c_[np.zeros(900), z], y, few_groups(900))
    assert calibrator.coefficients_.only.coefficients[-1] == pytest.approx(4, rel=0.2)


@pytest.mark.parametrize("dtype", ["<U3", object])
def test_labels_that_are_texts_are_refused_with_the_conversion(dtype):
    logits, target = scored(200, 16)
    with pytest.raises(ValueError, match="classes_"):
        Calibrator().fit(logits, np.array([f"c{i:02}" for i in target], dtype))


def test_integer_logits_are_those_of_floats():
    logits, target = scored(600, 16)
    whole = np.round(4 * logits).astype(int)
    groups = few_groups(600)
    fit = calibrate.fit(whole, target, group=groups)
    assert fit == calibrate.fit(whole.astype(float), target, group=groups)
    assert Calibrator().fit(whole, target, groups).coefficients_ == fit


def binary():
    """Logits (rows, 2) of a binary classifier, and its labels."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=600)
    return np.c_[np.zeros(600), z], (4 * z + rng.logistic(size=600) > 0).astype(int)


@pytest.mark.parametrize(
    ("data", "least"),
    [
        (binary, {"roc_auc": 0.9, "average_precision": 0.9, "neg_log_loss": -0.4, "accuracy": 0.8}),
        (partial(scored, 300, 4), {"roc_auc_ovr": 0.9, "neg_log_loss": -1.0}),
    ],
    ids=["binary", "several classes"],
)
def test_metrics_take_the_columns_of_the_classes(data, least):
    """Position 1 of a binary classifier is the positive class."""
    scores = cross_validate(Calibrator(kind="constant"), *data(), scoring=list(least), cv=2)
    for scoring, bound in least.items():
        assert scores[f"test_{scoring}"].min() > bound


def test_meta_estimators_and_displays_take_it_for_a_classifier():
    X, y = binary()
    calibrator = Calibrator(kind="constant").fit(X, y, few_groups(len(y)))
    assert is_classifier(calibrator)
    voting = VotingClassifier([("a", Calibrator(kind="constant"))], voting="soft").fit(X, y)
    np.testing.assert_allclose(voting.predict_proba(X), calibrator.predict_proba(X))
    tuned = TunedThresholdClassifierCV(Calibrator(kind="constant"), cv=2).fit(X, y)
    assert 0.2 < tuned.best_threshold_ < 0.8
    display = RocCurveDisplay.from_estimator(calibrator, X, y)
    assert display.roc_auc == pytest.approx(roc_auc_score(y, X[:, 1]))


@pytest.mark.parametrize("case", ["all targets masked", "no weights", "NaN as a group"])
def test_rows_that_cannot_be_used_are_value_errors(case):
    """Not warnings, as for a rule without a gain."""
    logits, target = scored(200, 16)
    options = {}
    if case == "all targets masked":
        logits[np.arange(200), target] = -np.inf
    elif case == "no weights":
        options["sample_weight"] = np.zeros(200)
    else:
        options["groups"] = np.where(target > 3, target, np.nan)
    with pytest.raises(ValueError, match=r"masked|weight|group .*nan"):
        Calibrator().fit(logits, target, **options)
