"""Baselines: what each makes of beta, and which ones a fit is scored beside."""

import pytest
from evidence_cases import fitted_at

import calibrate
from calibrate.evidence.baselines import (
    baselines_beside,
    fixed_rules,
    log_size_rule,
    one_constant,
    paper,
    without_equals,
)


def beta(fit, n):
    return float(calibrate.inverse_temperature(1.0, fit, n=n))


def test_fixed_rules():
    rules = fixed_rules()
    assert list(rules) == ["baseline", "paper", "log n / log 16", "hard"]
    assert beta(rules["baseline"], 999) == 1
    assert [beta(rules["log n / log 16"], n) for n in (4, 16, 256)] == pytest.approx([1, 1, 2])
    assert beta(log_size_rule(64), 4096) == pytest.approx(2)
    assert beta(one_constant(0.3), 99) == pytest.approx(0.3)
    assert rules["paper"].only.coefficients == calibrate.load("paper").only.coefficients


def test_a_fit_is_scored_beside_what_people_compare_it_with(make_fit):
    fit = make_fit(name="mine")
    rules = baselines_beside(fit, 2.5)
    assert set(rules) == {"baseline", "paper", "constant", "hard", "mine@1"}
    assert rules["mine@1"] is fit
    assert beta(rules["constant"], 8) == 2.5
    assert "constant" not in baselines_beside(fit, None)
    assert "constant" not in baselines_beside(fitted_at("constant"), 2.71)


def test_the_published_polynomial_is_scored_once():
    assert set(baselines_beside(paper(), None)) == {"baseline", "hard", "paper@1"}
    rules = {"baseline": one_constant(1), "hard": one_constant(2), "a": one_constant(3)}
    assert set(without_equals(rules, {"x": one_constant(2)})) == {"baseline", "a"}
    assert set(without_equals(rules, {"x": one_constant(1)})) == set(rules)
