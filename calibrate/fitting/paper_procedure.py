"""The paper's procedure: least squares on the optimal beta of misranked rows, each row alike."""

import numpy as np

from calibrate.errors import QualityError
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.fitting.rule_fitting import (
    ADVICE,
    DOMAIN_PERCENTILES,
    RANK_TOLERANCE,
    refuse_few,
)
from calibrate.fitting.solved_rows import Rows
from calibrate.maths.likelihood import DEGREE
from calibrate.maths.rule import Rule


def fit_as_in_the_paper(rows: Rows) -> Coefficients:
    """Least squares on p(H) - beta* over the interior rows, without bounds on p.

    Raises:
      QualityError: fewer than 100 interior rows, or a rank-deficient fit.
    """
    used = rows.interior()
    return Coefficients(Rule(), (Entry(*fit_polynomial(used.entropy, used.beta)),))


def fit_polynomial(
    entropy: np.ndarray, beta: np.ndarray
) -> tuple[tuple[float, ...], tuple[float, float]]:
    """Degree-4 polynomial p with p(H) close to optimal beta, and its domain.

    The design matrix is that of the standardised entropy, or the powers of H would be nearly
    collinear; the result is exported in plain powers.

    Args:
      entropy: (rows,) H in nats.
      beta: (rows,) optimal beta, finite and positive.
    Returns:
      (coefficients, highest power first; domain, the 0.5 % to 99.5 % range of the entropies).
    Raises:
      QualityError: fewer than 100 rows, or a rank-deficient fit.
    """
    refuse_few(len(entropy), "interior")
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    features = make_pipeline(StandardScaler(), PolynomialFeatures(DEGREE, include_bias=False))
    design = features.fit_transform(entropy[:, None])
    regression = LinearRegression().fit(design, beta)
    rank = int((regression.singular_ > RANK_TOLERANCE * regression.singular_.max()).sum())
    if rank < DEGREE:
        raise QualityError(
            f"the rows' entropies determine only {rank + 1} of the {DEGREE + 1} "
            f"coefficients; {ADVICE}"
        )
    ascending = np.append(regression.intercept_, regression.coef_)
    coefficients = _plain_powers(ascending, features[0].mean_[0], features[0].scale_[0])
    lo, hi = (float(h) for h in np.percentile(entropy, DOMAIN_PERCENTILES))
    return coefficients, (lo, hi)


def _plain_powers(ascending: np.ndarray, mean: float, deviation: float) -> tuple[float, ...]:
    """Coefficients of the standardised entropy -> of H itself, highest power first."""
    standardised = np.polynomial.Polynomial([-mean / deviation, 1 / deviation])
    plain = np.polynomial.Polynomial(ascending)(standardised)
    return tuple(float(c) for c in plain.coef[::-1])


def refuse_negative(entry: Entry) -> None:
    """The guards would hide it, but such a polynomial does not describe its rows."""
    lo, hi = entry.domain
    lowest = _lowest_value(entry.coefficients, lo, hi)
    if lowest <= 0:
        raise QualityError(
            f"the polynomial falls to {lowest:.3g} on its domain [{lo:.3f}, {hi:.3f}] nats, and "
            f"beta must be positive; {ADVICE}"
        )


def _lowest_value(coefficients: tuple[float, ...], lo: float, hi: float) -> float:
    """The polynomial's minimum over [lo, hi]: at an end or where its derivative is 0."""
    roots = np.roots(np.polyder(coefficients))
    inside = roots.real[(np.abs(roots.imag) < 1e-9) & (roots.real > lo) & (roots.real < hi)]
    return float(np.polyval(coefficients, [lo, hi, *inside]).min())
