"""What a fit asks of an engine: factors of heads, and one slope by log n."""

import math

import numpy as np
import pytest

from calibrate.core.rule import ENTROPY_AND_SIZE, POLYNOMIAL, RuleForm, beta_of
from calibrate.errors import CoefficientsError
from calibrate.export.plan import make_plan
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

DOMAIN = (0.0, math.log(512))
SIZES = np.arange(1, 1025)


def log_size(*lines, bounds=(0.25, 16.0), domain=DOMAIN):
    entries = [Entry(line, domain, i // 2, i % 2) for i, line in enumerate(lines)]
    return Fit(RuleForm.log_size(*bounds), tuple(entries))


def assert_is_beta(fit, plan):
    """The plan gives the beta of the fit's own rule at every n of the context."""
    for (layer, head), factor in plan.factors.items():
        entry = fit.entry_of(layer, head)
        H = np.full(len(SIZES), 2.0)
        own = 1.0 if entry is None else beta_of(
            H, np.log(SIZES), entry.coefficients, entry.domain, fit.rule, np
        )  # fmt: skip
        np.testing.assert_allclose(factor * (1 + plan.ratio * np.log(SIZES)), own, rtol=1e-6)


@pytest.mark.parametrize(
    ("lines", "domain", "ratio", "factors"),
    [
        ([(0.3 * b, b) for b in (0.5, 1.0, 1.7, 0.81)], DOMAIN, 0.3, [0.5, 1.0, 1.7, 0.81]),
        ([(0.0, 1.3), (0.0, 0.7), (0.0, 2.0)], DOMAIN, 0, [1.3, 0.7, 2.0, 1.0]),
        # Bounds make them constants.
        ([(0.0, 20.0), (0.1, 17.0), (0.0, 0.1)], DOMAIN, 0, [16.0, 16.0, 0.25, 1.0]),
        # A line may fall within its domain.
        ([(-0.05, 1.4)] * 4, (0.0, 7.0), -0.05 / 1.4, [1.4] * 4),
    ],
    ids=["common slope", "constants", "bounds", "falling"],
)
def test_factors_and_one_slope_are_the_rule(lines, domain, ratio, factors):
    fit = log_size(*lines, domain=domain)
    plan = make_plan(fit, 2, 2, 1024)
    assert plan.ratio == pytest.approx(ratio)
    assert plan.layer_factors(0) + plan.layer_factors(1) == factors
    assert_is_beta(fit, plan)


@pytest.mark.parametrize("kind", [POLYNOMIAL, ENTROPY_AND_SIZE])
def test_other_kinds_without_terms_of_entropy(kind):
    extra = (0.0, 0.0, 0.2) if kind == ENTROPY_AND_SIZE else ()
    domain = (0.0, 5.0, *DOMAIN) if kind == ENTROPY_AND_SIZE else (0.0, 5.0)
    entry = Entry((0.0, 0.0, 0.0, 0.0, 1.5, *extra), domain)
    fit = Fit(RuleForm(0.0, kind=kind), (entry,))
    plan = make_plan(fit, 2, 2, 1024)
    assert plan.ratio == pytest.approx(0.2 / 1.5 if extra else 0.0)
    assert_is_beta(fit, plan)


ALIKE = [(0.1, 1.0)] * 4


@pytest.mark.parametrize(
    ("kappa", "bounds"),
    [
        (0.3, (0.25, (1 + 0.3 * math.log(1024)) * (1 - 5e-4))),
        (0.3, (1 + 5e-4, 16.0)),
        (-0.1, ((1 - 0.1 * math.log(1024)) * (1 + 5e-4), 16.0)),
    ],
    ids=["upper bound at the context", "lower bound at n = 1", "lower bound at the context"],
)
def test_bounds_just_within_the_line_are_refused(kappa, bounds):
    """Half a thousandth is far above rounding; at the line itself, a bound changes nothing."""
    lines, domain = [(kappa, 1.0)] * 4, (0.0, 7.0)
    with pytest.raises(CoefficientsError, match=r"n = 1,024"):
        make_plan(log_size(*lines, bounds=bounds, domain=domain), 2, 2, 1024)
    ends = sorted((1.0, 1 + kappa * math.log(1024)))
    fit = log_size(*lines, bounds=(ends[0], ends[1]), domain=domain)
    assert_is_beta(fit, make_plan(fit, 2, 2, 1024))


def test_slopes_that_differ_by_more_than_rounding_are_refused():
    lines = [(0.1, 1.0)] * 3 + [(0.1 * (1 + 5e-4), 1.0)]
    with pytest.raises(CoefficientsError, match=r"kappa / b: 0\.1\b.*0\.1001"):
        make_plan(log_size(*lines), 2, 2, 1024)


def test_heads_that_a_model_lacks_are_refused():
    with pytest.raises(CoefficientsError, match="head 1, "):
        make_plan(log_size((0.0, 1.1), (0.0, 1.2)), 2, 1, 1024)


def test_rules_of_entropy_are_refused(paper, by_both):
    gated = Fit(RuleForm(0.5), (Entry((0.0, 0.0, 0.0, 0.0, 1.5), (0.0, 5.0)),))
    for fit in (paper, by_both, gated):
        with pytest.raises(CoefficientsError, match="entropy"):
            make_plan(fit, 2, 2, 1024)
