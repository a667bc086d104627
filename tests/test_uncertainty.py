"""Uncertainty: standard errors and bands of refits, against the sandwich formula."""

import numpy as np
import pytest
from planted import planted_rows

from calibrate.core.rule_kinds import KINDS
from calibrate.fitting import bootstrap as uncertainty
from calibrate.fitting.cross_validate import fit_candidate
from calibrate.fitting.fit_rule import applied_beta
from calibrate.fitting.options import Options
from calibrate.parallel import Jobs

OPTIONS = Options(q=0.0, prior_rows=0.0)  # maximum likelihood of the rows alone


def bootstrap(candidate, *jobs):
    return uncertainty.bootstrap(candidate.fitted, *jobs, n_resamples=200)  # as users have


@pytest.fixture(scope="module")
def rows():
    return planted_rows(lambda H, n: 1.2 + 0.5 * H, count=3_000)


def powers_of(kind, rows, domain):
    """(rows, k): what the coefficients of a kind are multiplied by."""
    if kind == "constant":
        return np.ones((len(rows.size), 1))
    if kind == "log-size":
        return np.column_stack([np.log(rows.items), np.ones(len(rows.size))])
    return np.vander(np.clip(rows.entropy, *domain), 5)


def covariance_of(candidate, rows, group):
    """J^-1 K J^-1 of the coefficients: J the information, K the sum of squares of group scores."""
    _, score, curvature = rows.profile.derivatives(applied_beta(candidate.coefficients, rows))
    x = powers_of(candidate.kind, rows, candidate.coefficients.only.domain)
    of_group = np.array([(score[:, None] * x)[group == g].sum(axis=0) for g in np.unique(group)])
    inverse = np.linalg.inv((x * -curvature[:, None]).T @ x)
    return inverse @ of_group.T @ of_group @ inverse


@pytest.mark.parametrize("kind", ["constant", "log-size", "polynomial"])
def test_standard_errors_and_band_are_those_of_the_sandwich_formula(rows, kind):
    candidate = fit_candidate(rows, KINDS[kind], OPTIONS)
    errors, band = bootstrap(candidate)
    covariance = covariance_of(candidate, rows, np.arange(len(rows.size)))
    expected = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(errors[-len(expected) :], expected, rtol=0.2)
    assert not any(errors[: -len(expected)])
    x, low, high = band.T
    powers = np.vander(x, len(expected))
    error = np.sqrt(np.einsum("ij,jk,ik->i", powers, covariance, powers))
    beta = powers @ np.array(candidate.coefficients.only.coefficients[-len(expected) :])
    inside = (beta - 2 * error > 1) & (beta + 2 * error < 64)  # no bound of beta cuts the band
    assert inside.mean() > 0.7
    np.testing.assert_allclose(((high - low) / 3.92)[inside], error[inside], rtol=0.4)
    assert (np.abs((high + low) / 2 - beta) < 0.6 * error)[inside].all()


def test_rows_of_a_group_are_drawn_together(rows):
    """Of twenty groups, whose rows are somewhat alike, the errors are larger."""
    alone = fit_candidate(rows, KINDS["constant"], OPTIONS)
    _, score, _ = rows.profile.derivatives(applied_beta(alone.coefficients, rows))
    luck = score + 3 * score.std() * np.random.default_rng(0).standard_normal(len(score))
    group = np.empty(len(score), int)
    group[np.argsort(luck)] = np.repeat(np.arange(20), len(score) // 20)
    candidate = fit_candidate(rows._replace(group=group), KINDS["constant"], OPTIONS)
    expected = np.sqrt(covariance_of(candidate, rows, group).item())
    errors, _ = bootstrap(candidate)
    assert expected > 3 * bootstrap(alone)[0][-1]
    assert errors[-1] == pytest.approx(expected, rel=0.15)


@pytest.mark.slow
def test_the_number_of_jobs_changes_nothing(rows):
    candidate = fit_candidate(rows, KINDS["polynomial"], Options())
    one, two = (bootstrap(candidate, jobs) for jobs in (Jobs(1), Jobs(2)))
    assert one[0] == two[0]
    np.testing.assert_array_equal(one[1], two[1])
