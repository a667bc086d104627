"""The paper's procedure: least squares on the optimal beta of misranked rows, all rows equal."""

import numpy as np

from calibrate.errors import QualityError
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths.rule import Rule
from calibrate.maths.rule_forms import DEGREE
from calibrate.rows.rule_fitting import (
    ADVICE,
    DOMAIN_PERCENTILES,
    RANK_TOLERANCE,
    require_rows,
)
from calibrate.rows.solved_rows import Rows


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
    require_rows(len(entropy), "interior")
    mean, deviation = float(entropy.mean()), float(entropy.std())
    deviation = deviation if deviation > RANK_TOLERANCE * abs(mean) else 1.0
    powers = np.polynomial.polynomial.polyvander((entropy - mean) / deviation, DEGREE)[:, 1:]
    centre = powers.mean(axis=0)
    slopes, _, rank, _ = np.linalg.lstsq(powers - centre, beta - beta.mean(), rcond=RANK_TOLERANCE)
    if rank < DEGREE:
        raise QualityError(
            f"the rows' entropies determine only {rank + 1} of the {DEGREE + 1} coefficients; "
            f"{ADVICE}"
        )
    ascending = [beta.mean() - centre @ slopes, *slopes]
    standardised = np.polynomial.Polynomial([-mean / deviation, 1 / deviation])
    plain = np.polynomial.Polynomial(ascending)(standardised).coef[::-1]
    lo, hi = (float(h) for h in np.percentile(entropy, DOMAIN_PERCENTILES))
    return tuple(plain.tolist()), (lo, hi)


def refuse_negative(entry: Entry) -> None:
    """Raises QualityError if the polynomial is not positive on its domain; guards would hide it."""
    lo, hi = entry.domain
    roots = np.roots(np.polyder(entry.coefficients))
    inside = roots.real[(np.abs(roots.imag) < 1e-9) & (roots.real > lo) & (roots.real < hi)]
    lowest = float(np.polyval(entry.coefficients, [lo, hi, *inside]).min())
    if lowest <= 0:
        raise QualityError(
            f"the polynomial falls to {lowest:.3g} on its domain [{lo:.3f}, {hi:.3f}] nats, and "
            f"beta must be positive; {ADVICE}"
        )
