"""Sizes that a head was trained on, at which a fit may cost NLL_TOLERANCE at most."""

import re

import numpy as np
import pytest
from conftest import ToyHead
from planted import planted_rows, regression_of

from calibrate.core.rule_kinds import CONSTANT, KINDS
from calibrate.defaults import NLL_TOLERANCE
from calibrate.errors import QualityError
from calibrate.evidence.metrics import LOG_P
from calibrate.evidence.non_inferiority import SAFETY_FACTOR, trained_sizes
from calibrate.fitting.constrained_newton import last_feasible
from calibrate.fitting.cross_validate import baseline_evidence, cross_validate, scores_at
from calibrate.fitting.fit_collection import fit_collection
from calibrate.fitting.fit_rule import applied_beta, fit_kind
from calibrate.fitting.options import Options
from calibrate.fitting.select import fit_and_select, select_rule
from calibrate.rows.collect import collect
from calibrate.rows.heads import load_head

HELD = Options(prior_rows=0, q=0.0, trained_up_to=16)


@pytest.fixture(scope="module")
def rows():
    """Calibrated at 16 items, and dispersed at more."""
    return planted_rows(lambda H, n: np.full_like(H, 1.0 if n <= 16 else 4.0))


def costs_at_16(rows, options, kind):
    small = rows.take(rows.size == 16)
    beta = applied_beta(fit_kind(rows, kind, options), small)
    return -np.mean(small.log_p(beta) - small.log_p(np.ones_like(beta)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("q", [0.0, 0.5])
def test_a_fit_costs_no_more_than_is_allowed_there(rows, kind, q):
    free = costs_at_16(rows, HELD._replace(trained_up_to=0, q=q), kind)
    held = costs_at_16(rows, HELD._replace(q=q), kind)
    assert (
        held <= SAFETY_FACTOR * NLL_TOLERANCE + 5e-4
    )  # cells put rows together that are not quite alike
    assert free > 2 * NLL_TOLERANCE or kind in ("log-size", "entropy-and-size")
    if free > 2 * NLL_TOLERANCE:
        assert held > 0.5 * SAFETY_FACTOR * NLL_TOLERANCE  # no more is given up than needed


@pytest.mark.parametrize("kind", KINDS)
def test_no_other_rule_that_keeps_to_it_is_more_likely(rows, kind):
    problem = regression_of(rows, kind, HELD)
    weights = np.ones(100)
    objective, held = problem.pool.objective(weights), problem.pool.constraint(weights)
    c = problem.solve()

    def at(c):
        beta = np.clip(problem.form.design @ c, 1, 64)
        return objective.values(beta), (held.of_rows(beta)[0] - held.least).min()

    assert at(c)[1] >= -1e-6
    rng, tried = np.random.default_rng(0), 0
    for scale in np.repeat([1e-4, 1e-3, 1e-2, 0.1], 60):
        inwards = rng.uniform(0, 10) * scale * (problem.form.ones - c)
        other = c + inwards + scale * rng.standard_normal(len(c))
        bound = problem.form.matrix @ other
        if ((bound >= problem.form.low) & (bound <= problem.form.high)).all() and at(other)[1] >= 0:
            tried += 1
            assert at(other)[0] <= at(c)[0] + 2e-5
    assert tried


def test_a_kind_that_cannot_keep_to_it_loses_to_one_that_can(rows):
    free, held = (fit_and_select(rows, HELD._replace(trained_up_to=n)) for n in (0, 16))
    (of_free, *_), (of_held, *_) = (x.held_out_evidence.gain_records() for x in (free, held))
    assert of_free["after"] < of_free["before"] or free.published.kind != "constant"
    assert held.published.kind in ("log-size", "entropy-and-size")
    assert of_held["after"] > of_held["before"] - NLL_TOLERANCE - 2 * of_held["error"]


@pytest.mark.parametrize("kind", ["constant", "log-size"])
def test_sizes_that_are_put_together_are_held_together(rows, kind):
    """Neighbours among more than 64 sizes share cells, some on either side of the size."""
    some = rows.take(rows.size <= 64)
    rng, small = np.random.default_rng(0), some.size == 16
    items = np.where(small, rng.integers(4, 41, len(small)), rng.integers(41, 160, len(small)))
    many = some._replace(items=items.astype(np.int32))

    def cost(n):
        at_most = many.take(items <= (n or 40))
        beta = applied_beta(fit_kind(many, kind, HELD._replace(trained_up_to=n)), at_most)
        return -np.mean(at_most.log_p(beta) - at_most.log_p(np.ones_like(beta)))

    assert cost(0) > 0.1
    for n in (20, 30, 36, 40):
        assert cost(n) <= SAFETY_FACTOR * NLL_TOLERANCE + 5e-4


def test_what_held_out_rows_show_to_cost_more_is_left_out(rows):
    """Without any tolerance a constant fits the rows of other folds, and costs some on its own."""
    fewer = rows._replace(items=np.where(rows.size == 16, 12, rows.items).astype(np.int32))
    options = HELD._replace(trained_up_to=12, tolerance=0.0)
    (why,) = cross_validate(fewer, [KINDS[CONSTANT]], options).left_out.values()
    assert re.search(r"\b16\b.* 12 .*\b0\b", why)
    with pytest.raises(QualityError, match="tolerance.* trained_up_to"):
        fit_and_select(rows, HELD._replace(kind=CONSTANT, tolerance=0.0))


@pytest.mark.parametrize(("first", "last"), [(0.0, 0.3), (-1e-17, 0.3), (0.01, 0.3), (0.0, 1e-9)])
def test_the_last_feasible_rule_is_not_the_baseline_where_the_slack_grows(first, last):
    """Without a tolerance the slack is 0 at the baseline, and where a gain turns to a loss."""

    def slack(c):
        return first + c * (last - c), (last - 2 * c)[None]

    plain = np.zeros(1)
    (found,) = last_feasible(plain, np.ones(1), slack)
    root = (last + np.sqrt(last**2 + 4 * first)) / 2
    assert found == pytest.approx(root, abs=3e-6)
    assert slack(found)[0] >= min(0, first)


def test_a_larger_tolerance_allows_more_and_is_in_the_file(rows):
    costs = [costs_at_16(rows, HELD._replace(tolerance=t), CONSTANT) for t in (0.005, 0.02)]
    np.testing.assert_allclose(costs, [0.0025, 0.01], rtol=0.3)
    assert HELD._replace(tolerance=0.02).record()["tolerance"] == 0.02
    assert "tolerance" not in HELD.record()  # as in files from before it could be set


def test_the_size_is_named_where_it_is_why_no_rule_gains():
    rows = planted_rows(lambda H, n: np.full_like(H, 1.0 if n <= 16 else 1.7), (16, 64), 300)
    validation = cross_validate(rows, [KINDS[CONSTANT]], HELD)
    with pytest.raises(QualityError, match="trained_up_to = 16"):
        select_rule(validation, (CONSTANT,))


def test_the_mean_decides_though_few_rows_have_wide_errors(rows):
    """A loss of 0.02 nats on 30 rows is within chance, and more than is allowed."""
    some = rows.take(np.flatnonzero(rows.size == 16)[:30])
    evidence = baseline_evidence(some)
    log_p = evidence.scores("plain", LOG_P) - 0.02 + np.tile([0.3, -0.3], 15)
    worse = evidence.with_rule("worse", {**scores_at(some, np.ones(30)), LOG_P: log_p})
    assert not worse.gain("worse", LOG_P).significant
    result = trained_sizes(16).check(worse, "worse")
    assert result.loss.mean == pytest.approx(0.02)
    assert not result.passed
    assert not result.significantly_exceeded


@pytest.mark.slow
def test_the_size_is_the_heads_own_unless_it_is_given(tmp_path):
    class Trained(ToyHead):
        trained_up_to = 64

    collect(Trained(noise=0.2), [16, 64, 256], 200, 0, tmp_path / "run")
    fit = fit_collection(tmp_path / "run", "toy")
    assert fit.coefficients.source["options"]["trained_up_to"] == 64
    assert load_head("max-retrieval").trained_up_to == 16


def test_another_kind_is_no_cause_why_a_named_one_is_refused(rows):
    """Rows of two sizes do not determine a rule of both, whatever the sizes of the training."""
    two = rows.take(rows.size < 256)
    with pytest.raises(QualityError, match=r"have 2 .* nats") as failed:
        fit_and_select(two, HELD._replace(kind="entropy-and-size"))
    assert "is the cause" not in str(failed.value)
