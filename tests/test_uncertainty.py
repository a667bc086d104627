"""Uncertainty: the spread of refits, against fits to fresh rows."""

import numpy as np
import pytest
from planted import planted_rows

from calibrate.core.rule_kinds import KINDS
from calibrate.fitting import bootstrap as uncertainty
from calibrate.fitting.fit_rule import fit_kind
from calibrate.fitting.options import Options
from calibrate.fitting.select import fit_and_select
from calibrate.parallel.jobs import Jobs


def bootstrap(candidate, *jobs):
    return uncertainty.bootstrap(candidate.fitted, *jobs, n_resamples=200)  # as users have


def rising(H, n):
    return 1.2 + 0.5 * H


@pytest.fixture(scope="module")
def rows():
    return planted_rows(rising)


@pytest.fixture(scope="module")
def selection(rows):
    return fit_and_select(rows, Options())


def of_kind(selection, kind):
    return next(c for c in selection.candidates if c.kind == kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_standard_errors_are_the_spread_of_fits_to_fresh_rows(selection, kind):
    errors, band = bootstrap(of_kind(selection, kind))
    assert len(errors) == len(of_kind(selection, kind).coefficients.only.coefficients)
    assert errors[-1] > 0
    if kind == "entropy-and-size":
        assert band is None
        return
    # In plain powers errors of a polynomial cancel: the value in the middle is what is compared.
    H = 3.5
    fresh = [
        np.polyval(fit_kind(planted_rows(rising, seed=seed), kind).only.coefficients, H)
        for seed in range(1, 13)
    ]
    _, low, high = band[np.abs(band[:, 0] - H).argmin()]
    assert 0.4 < (high - low) / 3.92 / np.std(fresh, ddof=1) < 2.5
    assert np.mean([low <= value <= high for value in fresh]) > 0.5


@pytest.mark.slow
def test_the_band_holds_the_fit(selection):
    for candidate in selection.candidates[:3]:
        x, low, high = bootstrap(candidate)[1].T
        beta = np.clip(np.polyval(candidate.coefficients.only.coefficients, x), 1, 64)
        assert np.mean((low - 1e-9 <= beta) & (beta <= high + 1e-9)) > 0.9


def test_of_few_groups_resamples_are_of_those_there_are(rows):
    few = rows.take(rows.size != 256)
    few = few._replace(group=np.arange(len(few.size)) % 6)
    options = Options(prior_rows=0.0)  # ten rows would outweigh six prompts
    selection = fit_and_select(few, options)
    errors, band = bootstrap(selection.published)
    assert band is None or np.isfinite(band).all()
    assert errors[-1] > 0


@pytest.mark.slow
def test_the_number_of_jobs_changes_nothing(selection):
    one, two = (bootstrap(selection.published, jobs) for jobs in (Jobs(1), Jobs(2)))
    assert one[0] == two[0]
    np.testing.assert_array_equal(one[1], two[1])
