"""The paper's procedure: least squares by other means, planted polynomials, and hopeless data."""

import numpy as np
import pytest

from calibrate.errors import QualityError
from calibrate.files.coefficients import Entry
from calibrate.rows.rivals import fit_polynomial, refuse_negative

PLANTED = (0.02, -0.3, 1.2, 0.4, 0.9)


def test_it_is_least_squares():
    rng = np.random.default_rng(0)
    H = rng.uniform(0.3, 7, 5_000)
    beta = np.polyval(PLANTED, H) + 0.1 * rng.standard_normal(len(H))
    np.testing.assert_allclose(fit_polynomial(H, beta)[0], np.polyfit(H, beta, 4), rtol=1e-6)


@pytest.mark.parametrize("n_distinct", [1, 2, 4])
def test_a_rank_deficient_fit_is_refused(n_distinct):
    H = np.resize(np.linspace(1, 3, n_distinct), 500)
    with pytest.raises(QualityError, match="determine only .* of the 5 coefficients"):
        fit_polynomial(H, H + 1)


def test_a_polynomial_that_is_not_positive_is_refused():
    H = np.linspace(1, 5, 500)
    with pytest.raises(QualityError, match="falls to .* on its domain"):
        refuse_negative(Entry(*fit_polynomial(H, (H - 3) ** 2 - 0.5)))
