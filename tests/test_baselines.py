"""Rules: what each makes of beta, and how the fitted ones are fitted."""

import math

import numpy as np
import pytest
from planted import planted_rows

import calibrate
from calibrate.errors import QualityError
from calibrate.rows.baselines import (
    HINDSIGHT,
    HINDSIGHT_BETAS,
    LABELS,
    LogSize,
    beside,
    by_sharpness,
    fitted_rules,
    fixed_rules,
    in_order,
    label,
    rounded_paper,
)
from calibrate.rows.model_selection import choose
from calibrate.rows.paper_procedure import fit_as_in_the_paper
from calibrate.rows.rule_fitting import Options, fit_rule


def test_fixed_rules():
    rules = fixed_rules()
    assert rules["plain"].beta(999) == 1
    assert rules["log-n"].beta(16) == 1
    assert rules["log-n"].beta(256) == pytest.approx(2)
    assert rules["paper"].only.coefficients == calibrate.load("paper").only.coefficients
    trials = HINDSIGHT_BETAS
    assert (len(trials), trials[0], trials[-1]) == (40, 1, pytest.approx(1000))


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
    assert choice.chosen.kind == "polynomial"
    sharp = Options(q=choice.chosen.q)
    assert rules["own"] == choice.chosen.fit == fit_rule(rows, "polynomial", sharp)
    assert rules["polynomial"] == fit_rule(rows, "polynomial")
    assert rules["entropy-and-size"] == fit_rule(rows, "entropy-and-size")
    assert rules["constant"] == fit_rule(rows, "constant")
    assert rules["kappa-log-n"] == fit_rule(rows, "log-size")
    assert rules["procedure"] == fit_as_in_the_paper(rows)
    assert rules["own-512"] == fit_rule(rows.take(rows.size <= 512), "polynomial", sharp)
    assert [rules[name].name for name in rules] == list(rules)


@pytest.mark.slow
def test_a_fit_up_to_512_needs_larger_sizes_to_differ_from_and_rows_to_be_made_of():
    assert "own-512" not in fitted_rules(planted_rows(rising, (64, 256)))
    with pytest.warns(UserWarning, match="'own fit, sizes up to 512' is left out: 0 usable rows"):
        assert "own-512" not in fitted_rules(planted_rows(rising, (1024, 2048)))
    with pytest.raises(QualityError, match="0 usable rows"):
        fitted_rules(planted_rows(rising, (64,)).take(np.empty(0, int)))


def test_beside_a_fit_are_others_only():
    one, two, own = (LogSize(0, b) for b in (1, 2, 2))
    rules = beside(own, {"plain": one, "hard": two, "own": one, "again": one})
    assert rules == {"plain": one, "own": own}


def test_each_q_of_the_chosen_kind_is_a_rule_of_its_own():
    choice = choose(planted_rows(rising, (16, 64, 256)), Options())
    tried = by_sharpness(choice)
    assert list(tried) == ["q-0", "q-0.25", "q-0.5"][: len(choice.trade)]
    assert [fit.name for fit in tried.values()] == list(tried)
    assert list(tried.values()) == [candidate.fit for candidate in choice.trade]
    kept = beside(choice.chosen.fit, fixed_rules() | tried | fitted_rules(choice.rows, choice))
    assert set(tried) - set(kept) == {f"q-{choice.chosen.q:g}"}  # it is the fit
    assert label("q-0.25") == "the same kind at q = 0.25"


def test_order_and_labels():
    names = in_order({"x@1": LogSize(0, 2), "hindsight": HINDSIGHT, "own": LogSize(0, 1),
                      "plain": LogSize(0, 1)})  # fmt: skip
    assert list(names) == ["plain", "own", "x@1", "hindsight"]
    assert set(fixed_rules()) < set(LABELS)
    assert LogSize(2.0, 1.0).beta(100) == pytest.approx(2 * math.log(100) + 1)
