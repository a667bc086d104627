"""Rules: what each makes of beta, and how the fitted ones are fitted."""

import math

import numpy as np
import pytest

import calibrate
from calibrate.errors import QualityError
from calibrate.maths import solver
from calibrate.pipeline.fit import Rows, fit_polynomial
from calibrate.pipeline.rules import (
    HINDSIGHT,
    LABELS,
    LogSize,
    fitted_rules,
    fixed_rules,
    in_order,
    rounded_paper,
)


def rows(sizes, seed=0):
    """Solved rows whose optimal beta is 1.5 log n, give or take."""
    rng = np.random.default_rng(seed)
    size = np.repeat(sizes, 400)
    H = rng.uniform(0.5, 0.9, len(size)) * np.log(size)
    beta = 1.5 * np.log(size) * rng.uniform(0.9, 1.1, len(size))
    status = np.full(len(size), solver.INTERIOR, np.int8)
    beta[::50], status[::50] = np.inf, solver.SHARP
    return Rows(H, beta, status, size)


def test_fixed_rules():
    rules = fixed_rules()
    assert rules["plain"].beta(999) == 1
    assert rules["log-n"].beta(16) == 1
    assert rules["log-n"].beta(256) == pytest.approx(2)
    assert rules["paper"].only.coefficients == calibrate.load("paper").only.coefficients
    trials = HINDSIGHT.trials()
    assert (len(trials), trials[0], trials[-1]) == (40, 1, pytest.approx(1000))


def test_what_rounding_costs():
    """Two decimals move beta(4) from 2.39 to 1.57, and the switch-off from 5.945 to 4.589 nats."""
    rounded = rounded_paper()
    assert float(calibrate.inverse_temperature(4.0, rounded)) == pytest.approx(1.57, abs=0.005)
    assert float(calibrate.inverse_temperature(4.58, rounded)) > 1
    assert float(calibrate.inverse_temperature(4.60, rounded)) == 1


def test_fitted_rules_are_least_squares_on_the_interior_rows():
    all_rows = rows([64, 256, 1024, 4096])
    used = all_rows.interior()
    rules = fitted_rules(all_rows)
    assert rules["constant"] == LogSize(0.0, pytest.approx(used.beta.mean()))
    slope = np.linalg.lstsq(np.log(used.size)[:, None], used.beta, rcond=None)[0][0]
    assert rules["kappa-log-n"].kappa == pytest.approx(slope)
    assert slope == pytest.approx(1.5, rel=0.02)
    powers, domain = fit_polynomial(used.entropy, used.beta)
    assert (rules["own"].only.coefficients, rules["own"].only.domain) == (powers, domain)
    few = used.size <= 512
    powers, _ = fit_polynomial(used.entropy[few], used.beta[few])
    assert rules["own-512"].only.coefficients == powers


def test_a_fit_up_to_512_needs_larger_sizes_to_differ_from_and_rows_to_be_made_of():
    assert "own-512" not in fitted_rules(rows([64, 256]))
    with pytest.warns(UserWarning, match="'own fit, sizes up to 512' is left out: 0 interior rows"):
        assert "own-512" not in fitted_rules(rows([1024, 4096]))
    with pytest.raises(QualityError, match="0 interior rows"):
        fitted_rules(Rows(*(column[:0] for column in rows([64]))))


def test_order_and_labels():
    names = in_order({"x@1": LogSize(0, 2), "hindsight": HINDSIGHT, "own": LogSize(0, 1),
                      "plain": LogSize(0, 1)})  # fmt: skip
    assert list(names) == ["plain", "own", "x@1", "hindsight"]
    assert set(fixed_rules()) < set(LABELS)
    assert LogSize(2.0, 1.0).beta(100) == pytest.approx(2 * math.log(100) + 1)
