"""The polynomial of optimal betas: robust, never refused, and least squares of what it says."""

import numpy as np
import pytest
from scipy.optimize import minimize

from calibrate.core.rule import horner
from calibrate.fitting.fit_polynomial import LEAST_SQUARES, LOG_LEAST_SQUARES, fit_powers

BOUNDS = (1.0, 64.0)


def rows(n=3_000, seed=0, spread=0.3):
    """Entropies, and optimal betas about a polynomial of them."""
    rng = np.random.default_rng(seed)
    H = rng.uniform(0.6, 6, n)
    beta = np.polyval((-0.036, 0.716, -2.723, 4.356, 1.4), H).clip(1) * np.exp(
        spread * rng.standard_normal(n)
    )
    return H, beta, np.ones(n)


def on_domain(fit, points=5_000):
    return horner(np.linspace(*fit.domain, points), fit.coefficients)


def test_least_squares_is_that_of_numpy():
    H, beta, weight = rows()
    fit = fit_powers(H, beta, weight, BOUNDS, LEAST_SQUARES)
    expected = np.polyfit(np.clip(H, *fit.domain), np.clip(beta, *BOUNDS), 4)
    np.testing.assert_allclose(fit.coefficients, expected, rtol=1e-6)


def test_log_least_squares_minimises_the_squares_of_log_beta():
    """A general minimiser from elsewhere finds nothing better, grid included."""
    H, beta, weight = rows(n=400)
    fit = fit_powers(H, beta, weight, BOUNDS)
    lo, hi = fit.domain
    inside, y = np.clip(H, lo, hi), np.log(np.clip(beta, *BOUNDS))
    grid = np.linspace(lo, hi, 200)

    def squares(c):
        p, q = np.polyval(c, inside), np.polyval(c, grid)
        if min(p.min(), q.min()) <= 0:
            return np.inf
        return np.mean((np.log(p) - y) ** 2) + 0.01 * np.mean((np.log(q) - y.mean()) ** 2)

    ours = squares(fit.coefficients)
    rng = np.random.default_rng(1)
    for _ in range(4):
        start = np.array(fit.coefficients) * (1 + 0.05 * rng.standard_normal(5))
        theirs = minimize(squares, start, method="Nelder-Mead", options={"maxiter": 4_000})
        assert ours <= theirs.fun * (1 + 1e-9)
    share = 1 - np.mean((np.log(np.polyval(fit.coefficients, inside).clip(*BOUNDS)) - y) ** 2) / (
        np.var(y)
    )
    assert fit.r_squared == pytest.approx(share, rel=1e-6)


def test_one_near_tie_moves_nothing():
    """Its optimal beta of 191,564 turned least squares of beta into -339 on the domain."""
    H, beta, weight = rows(n=4_626)
    expected = fit_powers(H, beta, weight, BOUNDS)
    beta[7] = 191_564.0
    fit = fit_powers(H, beta, weight, BOUNDS)
    assert fit.n_at_bound == expected.n_at_bound + 1
    np.testing.assert_allclose(on_domain(fit), on_domain(expected), rtol=0.02)
    assert on_domain(fit_powers(H, beta, weight, BOUNDS, LEAST_SQUARES)).min() > 0


@pytest.mark.parametrize("seed", range(30))
def test_it_is_positive_between_clusters_of_entropies(seed):
    """On the whole domain, whatever the betas, and as float32 evaluates it."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(100, 2_000))
    centres = rng.uniform(0.2, 9, int(rng.integers(1, 6)))
    width = 10 ** rng.uniform(-4, -0.3, n)
    H = np.abs(rng.choice(centres, n) + width * rng.standard_normal(n))
    beta = np.exp(rng.uniform(0.1, 3) * rng.standard_normal(n) + rng.uniform(-3, 4))
    beta[:3] = 1e6
    fit = fit_powers(H, beta, rng.uniform(0.1, 1, n), BOUNDS)
    p = on_domain(fit)
    assert 0 < p.min() <= p.max() < 2 * BOUNDS[1]
    narrow = [np.float32(c) for c in fit.coefficients]
    rounded = horner(np.linspace(*fit.domain, 5_000).astype(np.float32), narrow)
    np.testing.assert_allclose(rounded, p, atol=0.02 * max(1, p.max()))


@pytest.mark.parametrize("factor", [1 / 8, 8])
def test_logits_of_another_scale_are_not_refused(factor):
    H, beta, weight = rows()
    fit = fit_powers(H, beta / factor, weight, BOUNDS)
    assert on_domain(fit).min() > 0
    assert fit.n_at_bound > 0


@pytest.mark.parametrize("loss", [LOG_LEAST_SQUARES, LEAST_SQUARES])
@pytest.mark.parametrize("n_distinct", [1, 2, 4])
def test_few_different_entropies_determine_less_and_are_not_refused(loss, n_distinct):
    H = np.resize(np.linspace(1, 3, n_distinct), 500)
    fit = fit_powers(H, H + 1, np.ones(500), BOUNDS, loss)
    np.testing.assert_allclose(horner(H, fit.coefficients), H + 1, rtol=0.05)
    assert fit.domain[0] < fit.domain[1]


def test_weights_are_those_of_repeated_rows():
    H, beta, _ = rows(n=300)
    weight = np.where(np.arange(300) < 100, 3.0, 1.0)
    again = np.repeat(np.arange(300), weight.astype(int))
    inside = (H > 0.7) & (H < 5.9)  # else the percentiles of the domain differ
    kept = again[inside[again]]
    one = fit_powers(H[inside], beta[inside], weight[inside], BOUNDS)
    two = fit_powers(H[kept], beta[kept], np.ones(len(kept)), BOUNDS)
    x = np.linspace(max(one.domain[0], two.domain[0]), min(one.domain[1], two.domain[1]), 50)
    np.testing.assert_allclose(horner(x, one.coefficients), horner(x, two.coefficients), rtol=5e-3)


def test_equal_betas_are_a_constant():
    H, _, weight = rows(n=200)
    fit = fit_powers(H, np.full(200, 5.0), weight, BOUNDS)
    np.testing.assert_allclose(on_domain(fit), 5.0, rtol=1e-6)
    assert fit.r_squared == 0
