"""Likelihood: planted rules come back, and nothing that is allowed is better."""

import numpy as np
import pytest
from reference import entropy, softmax

from calibrate.core.bernstein import basis, plain_powers
from calibrate.core.rule_kinds import KINDS
from calibrate.fitting.constrained_newton import Objective, newton
from calibrate.fitting.multistart import NEAR, TOLERANCE, maximise
from calibrate.solver.likelihood_profile import Profile, profile

LOW, HIGH = 1.0, 64.0
DOMAIN = (0.5, 4.5)


def planted(beta_of, sizes=(16, 64, 256), count=1_500, seed=0):
    """Rows whose target is drawn from softmax at a planted beta."""
    rng = np.random.default_rng(seed)
    series, H, size = [], [], []
    for n in sizes:
        z = (rng.uniform(0.3, 2.0, (count, 1)) * rng.standard_normal((count, n))).astype(np.float32)
        h = entropy(z)
        p = softmax(z, beta=beta_of(h, n)[:, None])
        target = (p.cumsum(axis=1) > rng.random((count, 1))).argmax(axis=1)
        series.append(profile(z, target, LOW, HIGH)[0].series)
        H.append(h)
        size.append(np.full(count, n))
    return Profile(np.concatenate(series), LOW, HIGH), np.concatenate(H), np.concatenate(size)


def maximised(objective, form, *start, **options):
    return maximise([objective], form, LOW, HIGH, *start, **options)[0]


def best(rows, form, weight):
    return maximised(Objective(rows, weight / weight.sum()), form)


def form_of(H, domain=DOMAIN):
    return KINDS["polynomial"].form(H, H, domain, LOW, HIGH)


def constant_form(rows):
    return KINDS["constant"].form(np.ones(rows), np.ones(rows), DOMAIN, LOW, HIGH)


def line_form(log_n):
    return KINDS["log-size"].form(log_n, log_n, (), LOW, HIGH)


def test_bounds_hold_on_the_whole_domain():
    """Targets drawn at beta = 0.2 want less than the least that is allowed."""
    rows, H, _ = planted(lambda h, n: np.where(h < 2.5, 0.2, 5.0))
    solution = best(rows, form_of(H), np.ones(len(H)))
    t = np.linspace(0, 1, 1_001)
    beta = basis(t, 4) @ solution.coefficients
    assert beta.min() > LOW - 1e-6
    assert beta.min() < LOW + 0.05  # and it is reached


def test_of_constants_within_tolerance_it_is_the_least():
    """Far above fifteen others, any beta from 1.5 up has the target win."""
    z = np.tile(np.float32([9.6] + [0] * 15), (100, 1))
    rows = profile(z, np.zeros(100, int), LOW, HIGH)[0]
    betas = np.linspace(LOW, HIGH, 10_000)
    values = rows.take(np.arange(1)).log_p_at_each(betas)[0]
    least = betas[np.argmax(values >= values.max() - TOLERANCE)]
    solution = best(rows, constant_form(100), np.ones(100))
    assert solution.coefficients[0] == pytest.approx(least, abs=0.01)
    assert solution.value >= values.max() - 1.01 * TOLERANCE
    form, start = constant_form(100), np.array([20.0])  # as a resample has
    again = maximised(Objective(rows, np.full(100, 1 / 100)), form, start, tolerance=None)
    assert again.coefficients[0] == pytest.approx(least, abs=0.01)


def test_rules_are_not_sharper_than_what_some_sizes_tell():
    """One size in three wants 2.5, the others are served by any beta above 1.5."""
    rows, H, _ = planted(lambda h, n: np.full_like(h, 2.5), sizes=(16,))
    z = np.tile(np.float32([9.6] + [0] * 15), (3_000, 1))
    flat = profile(z, np.zeros(3_000, int), LOW, HIGH)[0]
    both = rows._replace(series=np.concatenate([rows.series, flat.series]))
    x = np.concatenate([1 + 0 * H, np.linspace(3, 4, 3_000)])
    for form in (line_form(x), form_of(x)):
        solution = best(both, form, np.ones(len(x)))
        beta = form.design @ solution.coefficients
        assert beta[0] == pytest.approx(2.5, abs=0.15)
        assert beta.max() < 2.7
        none = best(flat, form._replace(design=form.design[len(H) :]), np.ones(3_000))
        assert (form.design @ none.coefficients).max() < 1.6
        lower = LOW * form.ones + NEAR * (none.coefficients - LOW * form.ones)
        value = Objective(flat, np.full(3_000, 1 / 3_000)).values(form.design[len(H) :] @ lower)
        assert value < none.value  # nothing to spare


NEARLY_ALIKE = np.float32([0, 0.02, -0.11, -0.05, 0.04, -0.08, -0.01])


def sets(z, targets, count):
    wins = np.isin(np.arange(len(z)), targets)
    return profile(np.tile(z, (count, 1)), np.tile(wins, (count, 1)), LOW, HIGH)[0]


def test_a_resample_may_prefer_another_peak():
    """Where rows of one kind prevail the constant is 64, where those of another do about 1."""
    sharp, soft = sets(NEARLY_ALIKE, [2, 3, 4], 50), sets(NEARLY_ALIKE, [2, 3, 5], 50)
    rows = sharp._replace(series=np.concatenate([sharp.series, soft.series]))
    form = constant_form(100)
    for share, expected in ((0.99, HIGH), (0.1, LOW)):
        weight = np.repeat([share, 1 - share], 50) / 50
        for start in (None, np.array([LOW]), np.array([HIGH])):
            found = maximised(Objective(rows, weight), form, start, tolerance=None)
            assert found.coefficients[0] == pytest.approx(expected, rel=0.01)
            assert np.isnan(found.gap)  # nothing bounds what an objective of several peaks may gain


def test_rows_of_sets_that_want_far_apart_betas_get_a_rule_that_follows_them():
    """From a constant of 8 the solver stops 0.26 nats below."""
    sharp, soft = sets(NEARLY_ALIKE, [2, 3, 4], 50), sets(3 * NEARLY_ALIKE, [0, 2, 3], 50)
    rows = sharp._replace(series=np.concatenate([sharp.series, soft.series]))
    x = np.repeat([1.0, 3.0], 50)
    objective = Objective(rows, np.full(100, 1 / 100))
    best_of_each = objective.of_constants(np.geomspace(LOW, HIGH, 500)).max(axis=1).sum()
    for form in (line_form(x), form_of(x, (1, 3))):
        assert maximised(objective, form).value == pytest.approx(best_of_each, abs=1e-4)


def test_plain_powers_are_the_same_polynomial():
    c, domain = np.array([1.0, -2.0, 5.0, 0.5, 3.0]), (0.6, 5.2)
    H = np.linspace(*domain, 101)
    exact = basis((H - 0.6) / 4.6, 4) @ c
    np.testing.assert_allclose(np.polyval(plain_powers(c, domain), H), exact, rtol=0, atol=1e-11)
    constant = plain_powers(np.full(5, 2.5), domain)
    np.testing.assert_allclose(np.polyval(constant, H), 2.5, atol=1e-12)


def test_rows_beyond_the_domain_count_as_at_its_ends():
    """As the runtime has it, which clamps their entropy."""
    design = form_of(np.array([-0.5, 0.5, 4.5, 5.5])).design
    np.testing.assert_array_equal(design[[0, 3]], design[[1, 2]])


def test_it_climbs_out_of_a_hollow_and_stops_where_bounds_end_it():
    def hollow(x):
        """Convex along the first axis."""
        slope = np.array([2, -2, -2]) * x
        return (slope * x).sum(-1) / 2, slope, np.diag([2, -2, -2])[None]

    box = np.concatenate([np.eye(3), -np.eye(3)])
    (c,), (value,), _ = newton(hollow, box, np.full(6, -2.0), np.array([[0.1, 1.0, -1.0]]), 1e-12)
    np.testing.assert_allclose(c, [2, 0, 0], atol=1e-6)
    assert value == pytest.approx(4)
