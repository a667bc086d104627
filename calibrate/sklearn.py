"""A scikit-learn estimator around `calibrate.fit`, for pipelines and cross-validation."""

from typing import Any

import numpy as np
from scipy.special import entr, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from calibrate.array_fit import fit
from calibrate.core.masking import default_errstate, is_masked, on_cpu
from calibrate.errors import CalibrateError, QualityError, warn_user
from calibrate.fitting.options import FitOptions
from calibrate.rows.rows import UnusableRowsError
from calibrate.store.fit import Fit, identity


class SoftmaxCalibrator(ClassifierMixin, BaseEstimator):
    """Calibrated softmax(beta(H, n) z) of logits z, with beta = 1/temperature from `calibrate.fit`.

    >>> import calibrate
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> value = rng.uniform(0, 6, (1000, 32))
    >>> logits = value + 0.5 * rng.standard_normal(value.shape)
    >>> target = value.argmax(axis=1)
    >>> calibrator = calibrate.SoftmaxCalibrator().fit(logits, target)
    >>> probs = calibrator.predict_proba(logits)
    >>> bool(calibrator.score(logits, target) > -np.log(32))  # mean log-likelihood, nats
    True

    X are logits (rows, n), -inf where masked; y (rows,) int is the position of the right item. If
    no rule gains significantly over softmax on held-out folds, or there are too few rows to tell,
    `fit` warns, and `coefficients_` has beta = 1. `predict_proba` computes in float64.

    To calibrate a classifier from its features and labels by one constant, use scikit-learn's
    `CalibratedClassifierCV(method="temperature")`, 1.8 or later; kind="constant" gives the same
    result. Use this estimator for masked logits, for positions that are right in no row, for a beta
    that depends on the entropy or on the number of items, and for a verdict on held-out folds.
    Labels of a classifier become positions by `numpy.searchsorted(classifier.classes_, labels)`. A
    binary `decision_function` z becomes X = `numpy.c_[numpy.zeros(len(z)), z]`, where position 1 is
    the positive class. To metrics and meta-estimators this is a classifier; those that encode
    labels, such as VotingClassifier, need every position in y.

    Args:
      kind, seed: as of `calibrate.fit`, which has more options.
    Attributes:
      coefficients_: the Fit, or calibrate.identity().
      verdict_: NLL of held-out rows before and after, or the reason why nothing was fitted.
      classes_: (n,) int, 0 to n - 1, the positions of the columns of `predict_proba`, for metrics
        such as `sklearn.metrics.log_loss(y, probs, labels=calibrator.classes_)`.
      n_features_in_: n.
    """

    coefficients_: Fit
    classes_: np.ndarray

    def __init__(
        self,
        kind: str | None = FitOptions.kind,
        seed: int = FitOptions.seed,
    ) -> None:
        self.kind, self.seed = kind, seed

    @default_errstate
    def fit(
        self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None
    ) -> "SoftmaxCalibrator":
        """Fits the rule.

        Args:
          X: (rows, n) logits.
          y: (rows,) int, positions in [0, n).
          groups: (rows,) of numbers or strings, equal in dependent rows; None: each is its own.
          sample_weight: (rows,) float >= 0, of a row in every mean; None: 1.
        Raises:
          ValueError: invalid arrays or parameters.
        Warns:
          UserWarning: the rule does not gain significantly over softmax, or rows are too few to
            tell; and the warnings of `calibrate.fit`.
        """
        X, y = on_cpu(X, "X"), on_cpu(y, "y")
        _refuse_binary(X)
        X, y = validate_data(self, X, y, **_LOGITS, ensure_min_features=2)
        _refuse_infinite(X)
        check_classification_targets(y)
        y = _positions(y, X.shape[1])
        self.classes_ = np.arange(X.shape[1])
        try:
            self.coefficients_ = fit(
                X,
                y,
                group=groups,
                weight=_weights(sample_weight, X),
                kind=self.kind,
                seed=self.seed,
            )
            self.verdict_ = self.coefficients_.verdict
        except UnusableRowsError as failure:
            raise ValueError(str(failure)) from None
        except QualityError as refusal:
            self.coefficients_, self.verdict_ = identity(), str(refusal)
            warn_user(f"softmax is left as it is: {refusal}")
        except CalibrateError as failure:
            raise ValueError(str(failure)) from None
        return self

    @default_errstate
    def predict_proba(self, X: Any) -> np.ndarray:
        """(rows, n) probabilities of logits (rows, n); NaN for a row without an unmasked item.

        An item more than 9,000 below the highest logit of its row is masked, as in `fit`.
        """
        check_is_fitted(self)
        X = validate_data(self, on_cpu(X, "X"), reset=False, **_LOGITS)
        _refuse_infinite(X)
        X, fit = X.astype(np.float64), self.coefficients_
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # empty rows
            X -= np.maximum(X.max(axis=1, keepdims=True), np.finfo(X.dtype).min)
            H, log_n = entr(softmax(X, axis=1)).sum(axis=1), np.log((~is_masked(X)).sum(axis=1))
            beta = fit.only.beta_at(H, log_n, fit.rule)
            return np.asarray(softmax(beta[:, None] * X, axis=1))

    def predict(self, X: Any) -> np.ndarray:
        """(rows,) position of the largest logit, which no rule changes."""
        positions: np.ndarray = self.predict_proba(X).argmax(axis=1)
        return positions

    @default_errstate
    def score(self, X: Any, y: Any) -> float:
        """Mean of log p of the targets, nats."""
        probs = self.predict_proba(X)
        y = _positions(column_or_1d(on_cpu(y, "y")), probs.shape[1])
        with np.errstate(divide="ignore"):
            return float(np.log(probs[np.arange(len(y)), y]).mean())


_AS_POSITIONS = (
    "give the right items, and of a classifier's labels "
    "numpy.searchsorted(classifier.classes_, labels)"
)
_LOGITS: dict[str, Any] = {"dtype": [np.float64, np.float32], "ensure_all_finite": False}


def _refuse_infinite(logits: np.ndarray) -> None:
    """Raises ValueError for NaN or +inf; -inf is a mask."""
    if not (logits < np.inf).all():
        raise ValueError("X has NaN or infinity; give logits, -inf where masked")


def _refuse_binary(logits: Any) -> None:
    """Raises ValueError for one score a row, as of a binary classifier."""
    scores = np.asarray(logits)
    shape = scores.shape
    if len(shape) == 1 or (shape[1:] == (1,) and scores.dtype.kind != "c"):
        raise ValueError(
            f"X has the shape {shape}, 1 feature(s): one score a row. Reshape your data: of a "
            "binary classifier's scores z give X = numpy.c_[numpy.zeros(len(z)), z]"
        )


def _weights(sample_weight: Any, X: np.ndarray) -> np.ndarray | None:
    """(rows,) float weights; a single number is that of every row."""
    if sample_weight is None:
        return None
    return np.asarray(
        _check_sample_weight(on_cpu(sample_weight, "sample_weight"), X, dtype=np.float64)
    )


def _positions(y: Any, n: int) -> np.ndarray:
    """(rows,) int positions; ValueError for other values."""
    positions = np.asarray(y)
    if not np.isin(positions, np.arange(n)).all():
        raise ValueError(f"y has other values than positions 0 to {n - 1}; {_AS_POSITIONS}")
    return positions.astype(int)
