"""Rules: what each makes of beta, and how the fitted ones and the paper's are fitted."""

import pytest
from planted import planted_rows

import calibrate
from calibrate.evidence.baselines import (
    fixed_rules,
    log_size,
    one_constant,
    rounded_paper,
)
from calibrate.fitting.fit_rule import fit_kind
from calibrate.fitting.fitted_baselines import fitted_baselines
from calibrate.fitting.options import Options
from calibrate.fitting.select import fit_and_select
from calibrate.report.labels import beside


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
    selection = fit_and_select(rows, Options())
    rules = fitted_baselines(rows, selection)
    kind = selection.published.kind
    assert rules["own"] == selection.published.coefficients == fit_kind(rows, kind)
    assert rules["polynomial"] == fit_kind(rows, "polynomial")
    assert rules["entropy-and-size"] == fit_kind(rows, "entropy-and-size")
    assert rules["constant"] == fit_kind(rows, "constant")
    assert rules["kappa-log-n"] == fit_kind(rows, "log-size")
    assert rules["procedure"] == fit_kind(rows, "polynomial", Options.of_the_paper())
    assert rules["own-512"] == fit_kind(rows.take(rows.size <= 512), kind)
    assert [rules[name].name for name in rules] == list(rules)


@pytest.mark.slow
def test_a_fit_up_to_512_needs_larger_sizes_to_differ_from():
    for sizes in ((64, 256), (1024, 2048)):
        rows = planted_rows(rising, sizes)
        assert "own-512" not in fitted_baselines(rows, fit_and_select(rows, Options()))


def test_beside_a_fit_are_others_only():
    one, two, own = (one_constant(b) for b in (1, 2, 2))
    rules = beside(own, {"plain": one, "hard": two, "own": one, "again": one})
    assert rules == {"plain": one, "own": own}
