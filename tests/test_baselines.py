"""Rules: what each makes of beta, and how the fitted ones and the paper's are fitted."""

import numpy as np
import pytest
from planted import planted_rows

import calibrate
from calibrate.errors import QualityError
from calibrate.evidence.baselines import (
    beside,
    fixed_rules,
    log_size,
    one_constant,
    rounded_paper,
)
from calibrate.files.coefficients import Entry
from calibrate.rows.choose_rule import choose
from calibrate.rows.rivals import (
    fit_as_in_the_paper,
    fit_polynomial,
    fitted_rules,
    refuse_negative,
)
from calibrate.rows.row_problem import fit_rule
from calibrate.rows.rule_fitting import Options


def beta(fit, n):
    return float(calibrate.inverse_temperature(1.0, fit, n=n))


def test_fixed_rules():
    rules = fixed_rules()
    assert list(rules) == ["plain", "paper", "rounded", "log-n", "hard"]
    assert beta(rules["plain"], 999) == 1
    assert [beta(rules["log-n"], n) for n in (4, 16, 256)] == pytest.approx([1, 1, 2])
    assert beta(log_size(64), 4096) == pytest.approx(2)
    assert beta(one_constant(0.3), 99) == pytest.approx(0.3)
    assert rules["paper"].only.coefficients == calibrate.load("paper").only.coefficients


def test_what_rounding_costs():
    """Two decimals move beta(4) from 2.39 to 1.57, and the switch-off from 5.945 to 4.589 nats."""
    rounded = rounded_paper()
    assert float(calibrate.inverse_temperature(4.0, rounded)) == pytest.approx(1.57, abs=0.005)
    assert float(calibrate.inverse_temperature(4.58, rounded)) > 1
    assert float(calibrate.inverse_temperature(4.60, rounded)) == 1


def rising(H, n):
    return 1.2 + 0.5 * H


def test_fitted_rules_are_what_the_rows_call_for_and_every_other_kind():
    rows = planted_rows(rising, (16, 64, 1024))
    choice = choose(rows, Options())
    rules = fitted_rules(rows, choice)
    kind = choice.chosen.kind
    assert rules["own"] == choice.chosen.fit == fit_rule(rows, kind)
    assert rules["polynomial"] == fit_rule(rows, "polynomial")
    assert rules["entropy-and-size"] == fit_rule(rows, "entropy-and-size")
    assert rules["constant"] == fit_rule(rows, "constant")
    assert rules["kappa-log-n"] == fit_rule(rows, "log-size")
    assert rules["procedure"] == fit_as_in_the_paper(rows)
    assert rules["own-512"] == fit_rule(rows.take(rows.size <= 512), kind)
    assert [rules[name].name for name in rules] == list(rules)


@pytest.mark.slow
def test_a_fit_up_to_512_needs_larger_sizes_to_differ_from_and_rows_to_be_made_of():
    assert "own-512" not in fitted_rules(planted_rows(rising, (64, 256)))
    assert "own-512" not in fitted_rules(planted_rows(rising, (1024, 2048)))
    with pytest.raises(QualityError, match="0 usable rows"):
        fitted_rules(planted_rows(rising, (64,)).take(np.empty(0, int)))


def test_beside_a_fit_are_others_only():
    one, two, own = (one_constant(b) for b in (1, 2, 2))
    rules = beside(own, {"plain": one, "hard": two, "own": one, "again": one})
    assert rules == {"plain": one, "own": own}


def test_it_is_least_squares():
    rng = np.random.default_rng(0)
    H = rng.uniform(0.3, 7, 5_000)
    beta = np.polyval((0.02, -0.3, 1.2, 0.4, 0.9), H) + 0.1 * rng.standard_normal(len(H))
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
