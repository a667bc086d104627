"""Optimisation of rules with a scorer in closed form: steps, weights, pruning, and the fit."""

from itertools import islice

import numpy as np
import pytest
from fake_progress import Told
from fakes import QuadraticScorer, even_examples
from rule_families import CONSTANTS, GLOBAL, HEADS, PER_HEAD, PER_LAYER, family

from calibrate.core.rule import CONSTANT, ENTROPY_AND_SIZE, LOG_SIZE, POLYNOMIAL
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.metrics import LOG_P
from calibrate.model.fit import fit_head_rules
from calibrate.model.natural_gradient import (
    damp,
    natural_gradient_step,
    shrink_gradient,
)
from calibrate.model.objective import ModelObjective
from calibrate.model.optimizer import HeadRuleOptimizer
from calibrate.model.options import ModelOptions, choose_families
from calibrate.model.parameters import Parameters
from calibrate.model.scored_splits import Calibration, Validation
from calibrate.model.splits import BatchSampler
from calibrate.parallel import SILENT
from calibrate.report.sentences import with_verdict

USEFUL = np.array([1.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # slopes: two heads of eight


def make_optimizer(scorer, families=(), steps=1, progress=SILENT, **limits):
    """An optimizer whose validation split has all examples."""
    objective = ModelObjective(scorer.examples, scorer.baseline(), **limits)
    calibration = Calibration(scorer, scorer.examples, steps, 0, progress)
    validation = Validation(scorer, objective, list(range(len(scorer.examples.examples))))
    return HeadRuleOptimizer(calibration, validation, list(families))


def fit_scorer(scorer, **options):
    max_kl = options.get("max_kl", 0.01)
    objective = ModelObjective(scorer.examples, scorer.baseline(), max_kl=max_kl)
    return fit_head_rules(scorer, objective, "x", {}, ModelOptions(**options))


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "cells", "sizes"),
    [(60, [[0, 0, 1, 1]] * 4, (4, 4)), (20, [[0], [0], [1], [1]], (1, 16))],
)
def test_batches_have_as_many_answers_of_each_cell_as_fit(tokens, cells, sizes):
    examples = even_examples([10, 20], [30])
    sampler = BatchSampler(examples, np.arange(24), 0, tokens)
    assert sorted(sorted(i // 8 for i in batch) for batch in islice(sampler, 4)) == cells
    assert (sampler.n_answers, sampler.n_epoch) == sizes


# --- natural gradient -----------------------------------------------------------------------------


def test_a_natural_gradient_step_gains_most_at_its_cost():
    rng = np.random.default_rng(3)
    gradient, roots = rng.standard_normal((2, 5)), rng.standard_normal((5, 2, 2))
    curvature = roots @ roots.mT
    step = natural_gradient_step(gradient, curvature, 0.01)
    cost = np.einsum("rc,crs,sc->", step, curvature, step) / 2
    assert cost == pytest.approx(0.01)

    def gain(numbers):
        cost = np.einsum("rc,crs,sc->", numbers, damp(curvature), numbers)
        return (gradient * numbers).sum() / np.sqrt(cost)

    others = step + 0.1 * np.abs(step).max() * rng.standard_normal((100, 2, 5))
    assert max(map(gain, others)) < gain(step)
    assert natural_gradient_step(0 * gradient, curvature, 0.01) is None
    assert natural_gradient_step(gradient, 0 * curvature, 0.01) is None


def test_a_natural_gradient_step_does_not_depend_on_the_scale_of_the_terms():
    rng = np.random.default_rng(4)
    gradient, roots = rng.standard_normal((3, 5)), rng.standard_normal((5, 3, 4))
    curvature, scale = roots @ roots.mT, np.diag([1.0, 0.1, 30.0])
    step = natural_gradient_step(gradient, curvature, 0.01)
    other = natural_gradient_step(scale @ gradient, scale @ curvature @ scale, 0.01)
    np.testing.assert_allclose(scale @ other, step, rtol=1e-6)


def test_curvature_is_damped_by_the_median_and_gradients_are_shrunk_by_their_noise():
    curvature = np.array([[[2.0]], [[4.0]], [[0.0]]])
    np.testing.assert_allclose(damp(curvature)[:, 0, 0], [2.6, 4.6, 0.6])
    signal, spread = np.array([1.0, 0.0, -0.1, 0.0]), np.array([0.1, 2.0, 0.0, 0.0])
    shrunk = shrink_gradient(signal + np.array([[1], [-1], [1], [-1]]) * spread)
    np.testing.assert_allclose(shrunk, [1 - 0.01 / 3, 0, -0.1, 0])
    np.testing.assert_array_equal(shrink_gradient(signal[None]), signal)


def test_families_share_derivatives():
    families = [CONSTANTS, family(CONSTANT, PER_HEAD)]

    def solve(families):
        scorer = QuadraticScorer(even_examples([10], [30]), USEFUL + 1, fisher=0.3)
        return make_optimizer(scorer, families).solve(), len(scorer.differentiated)

    (first, n_gradients), (second, _) = (solve([x]) for x in families)
    together, n_together = solve(families)
    assert [x.weight for x in (*first, *second)] == [x.weight for x in together]
    assert 0 < n_gradients == n_together


# --- the interpolation weight ---------------------------------------------------------------------


def one_head(power=2):
    """Text loses 0.04 nats per token at beta = 1.5, which is interpolation weight 1."""
    examples = even_examples([10], [30])
    return QuadraticScorer(examples, np.ones(1), curvature=0.0, fisher=0.32, power=power)


@pytest.mark.parametrize(("max_kl", "part"), [(0.01, 32), (0.0025, 16), (1e-9, 0), (0.2, 64)])
def test_the_weight_is_the_largest_that_text_allows(max_kl, part):
    scorer = one_head()
    (solution,) = make_optimizer(scorer, [CONSTANTS], max_kl=max_kl).solve()
    assert solution.weight * 64 == pytest.approx(part, abs=0.07 * part)
    assert solution.weight * 64 <= part
    assert solution.value.gain == pytest.approx(solution.weight / 2)
    assert len(scorer.scored) <= 10
    if max_kl == 0.01:  # the weight that the curvature predicts is tried first
        assert len(scorer.scored) == 2  # text, then answers at that weight
    lost = solution.value.losses[0].mean
    assert lost == pytest.approx(0.16 * (solution.weight / 2) ** 2)
    fit = solution.rules(HEADS)
    assert (fit is None) == (part == 0)
    assert part == 0 or fit.coefficients == pytest.approx((1 + solution.weight / 2,))


def test_a_loss_that_is_linear_in_the_weight_has_a_weight_too():
    (solution,) = make_optimizer(one_head(power=1), [CONSTANTS], max_kl=0.01).solve()
    assert 0.8 * 0.01 / 0.08 < solution.weight <= 0.01 / 0.08


# --- Adam -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("useful", [(2,), (2, 5), (1, 2, 5, 6)])
def test_heads_are_pruned_while_nothing_is_lost(useful):
    """The fewest heads that are as good stay; if each gains as much, all of them."""
    slope = np.where(np.isin(range(8), useful), 1.0, 1e-4)
    scorer = QuadraticScorer(even_examples([10]), slope, curvature=0.0, noise=0.01)
    optimizer = make_optimizer(scorer)
    changed = np.isin(range(8), (1, 2, 5, 6))
    parameters = Parameters(family(CONSTANT, PER_HEAD), 0.5 * changed[None])
    best = optimizer.validation.solution(parameters)
    assert best.value.gain == pytest.approx(0.5 * slope[changed].sum())
    fewest = optimizer.prune_heads(best, slope)
    assert fewest.parameters.changed_columns().tolist() == list(useful)
    np.testing.assert_array_equal(fewest.parameters.numbers[0, list(useful)], 0.5)
    assert fewest.value.gain == pytest.approx(0.5 * slope[list(useful)].sum())


def test_the_optimal_constants_are_found():
    """slope - curvature a = 0, for the heads that have a slope."""
    scorer = QuadraticScorer(even_examples([10]), USEFUL / 2, noise=0.01)
    optimizer = make_optimizer(scorer, [CONSTANTS, family(CONSTANT, PER_HEAD)], steps=60)
    shared, own = optimizer.solve()
    assert abs(shared.parameters.numbers).max() < 0.05  # one head gains what another one loses
    assert own.applied.heads_changed(scorer.heads) == [(0, 0), (0, 2)]
    np.testing.assert_allclose(own.parameters.numbers[0, [0, 2]], [0.5, -0.5], atol=0.05)


def test_a_search_is_repeated_from_the_rule_of_all_heads_if_that_is_better():
    """One step is too few for rules of each head from the baseline, but not from what all share."""
    scorer, told = QuadraticScorer(even_examples([10]), np.ones(8)), Told()
    families = [CONSTANTS, family(CONSTANT, PER_HEAD)]
    shared, own = make_optimizer(scorer, families, steps=1, progress=told).solve()
    assert sum(stage.startswith("constant, each head") for stage, *_ in told.stages) == 2
    assert own.value.gain >= shared.value.gain


# --- families and options -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "texts", "expected"),
    [
        ({}, [], [(CONSTANT, GLOBAL), (CONSTANT, PER_HEAD)]),
        ({"kind": LOG_SIZE}, [], [(CONSTANT, GLOBAL), (LOG_SIZE, GLOBAL), (CONSTANT, PER_HEAD),
                                  (LOG_SIZE, PER_HEAD)]),
        ({"kind": ENTROPY_AND_SIZE}, [], [(CONSTANT, GLOBAL), (CONSTANT, PER_HEAD),
                                          (POLYNOMIAL, PER_HEAD), (ENTROPY_AND_SIZE, PER_HEAD)]),
        ({}, [30], [(CONSTANT, GLOBAL), (CONSTANT, PER_HEAD)]),
        ({"kind": ENTROPY_AND_SIZE}, [30], [(CONSTANT, GLOBAL), (ENTROPY_AND_SIZE, PER_HEAD)]),
        ({"sharing": GLOBAL}, [], [(CONSTANT, GLOBAL)]),
        ({"sharing": GLOBAL, "kind": POLYNOMIAL}, [], [(CONSTANT, GLOBAL), (POLYNOMIAL, GLOBAL)]),
        ({"sharing": PER_LAYER}, [], [(CONSTANT, GLOBAL), (CONSTANT, PER_LAYER)]),
        ({"sharing": GLOBAL, "engines": PER_HEAD}, [], [(CONSTANT, GLOBAL)]),
        ({"sharing": PER_LAYER, "engines": GLOBAL}, [], [(CONSTANT, GLOBAL)]),
        ({"engines": PER_HEAD, "heads_per_layer": 1}, [],
         [(CONSTANT, GLOBAL), (CONSTANT, PER_HEAD)]),
    ],
)  # fmt: skip
def test_the_families_lead_from_one_constant_to_what_is_asked_for(options, texts, expected):
    families = choose_families(ModelOptions(**options), even_examples([10], texts))
    assert [(x.kind, x.sharing) for x in families] == expected


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"kind": "linear"}, "linear"),
        ({"max_kl": -1.0}, "max_kl"),
        ({"sharing": PER_LAYER, "heads_per_layer": 2}, "heads_per_layer"),
        ({"engines": PER_LAYER, "heads_per_layer": 2}, "heads_per_layer"),
        ({"engines": PER_HEAD, "kind": LOG_SIZE}, "kind"),
    ],
)
def test_options_out_of_range_or_against_each_other_are_refused(options, value):
    with pytest.raises(CalibrateError, match=value):
        ModelOptions(**options)


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ({}, {"max_kl": 0.01}),
        ({"max_kl": 0.05}, {"max_kl": 0.05}),  # no tolerance without trained lengths
        ({"trained_up_to": 8}, {"max_kl": 0.01, "tolerance": 0.01}),
        ({"trained_up_to": 8, "max_kl": 0.05}, {"max_kl": 0.05, "tolerance": 0.01}),
    ],
)
def test_a_file_records_the_limits_that_had_an_effect(options, recorded):
    record = ModelOptions(**options).record(1.0)
    assert {k: record[k] for k in ("max_kl", "tolerance") if k in record} == recorded


# --- the fit --------------------------------------------------------------------------------------


def test_a_fit_without_a_gain_is_refused():
    scorer = QuadraticScorer(even_examples([10, 20], count=16), np.zeros(8))
    with pytest.raises(QualityError, match=r"[+-]0\.\d{3} ± "):
        fit_scorer(scorer, max_steps=2)


@pytest.mark.parametrize("slope", [USEFUL + 1, USEFUL], ids=["constant-gains", "none-gains"])
def test_the_gain_over_one_constant_is_a_paired_difference(slope):
    scorer = QuadraticScorer(even_examples([10, 20], [30], 32), slope, fisher=0.05, noise=0.01)
    result = fit_scorer(scorer, max_kl=1.0, max_steps=40)
    answers = result.evidence.answers
    over = "constant" if slope is not USEFUL else "baseline"  # beta = 1 is not scored again
    assert ("constant" in answers.rules) == (over == "constant")
    difference = answers.scores("own", LOG_P) - answers.scores(over, LOG_P)
    mean = np.mean([difference[answers.stratum == i].mean() for i in (0, 1)])
    error = np.std(difference, ddof=1) / np.sqrt(len(difference))
    (record,) = result.coefficients.evidence["kinds"]
    assert record == {
        "kind": "constant", "gain": pytest.approx(mean), "se": pytest.approx(error),
    }  # fmt: skip
    assert mean > 0.05
    assert error > 1e-4
    verdict = with_verdict(result.coefficients, result.evidence).verdict
    assert f"{mean:+.3f} ± {error:.3f} nats" in verdict


def test_one_constant_for_all_heads_is_compared_with_the_baseline_alone():
    scorer = QuadraticScorer(even_examples([10, 20], count=32), USEFUL + 0.1, noise=0.01)
    result = fit_scorer(scorer, sharing=GLOBAL)
    assert "kinds" not in result.coefficients.evidence
    assert result.evidence.rules == ("baseline", "own", "paper")


def test_a_fit_has_the_heads_that_gain():
    scorer = QuadraticScorer(even_examples([10, 20], count=80), USEFUL, noise=0.01)
    result = fit_scorer(scorer, max_steps=60)
    betas = {(e.layer, e.head): e.coefficients[-1] for e in result.coefficients.entries}
    assert betas == pytest.approx({(0, 0): 2.0, (0, 2): 0.25}, abs=0.1)


@pytest.mark.parametrize(
    "texts", [pytest.param((), marks=pytest.mark.slow), (30,)], ids=["adam", "natural-gradient"]
)
def test_few_heads_of_each_layer_are_those_that_gain_most(texts):
    slope = np.array([1.0, 0.2, -0.6, 0.0, 0.0, 0.5, 0.4, 0.0])
    examples = even_examples([10, 20], texts, count=16)
    scorer = QuadraticScorer(examples, slope, fisher=0.05, noise=0.01)
    changed = {}
    for n in (1, 2):
        fit = fit_scorer(scorer, max_steps=40, max_kl=1.0, heads_per_layer=n).coefficients
        changed[n] = {(e.layer, e.head): e.coefficients[-1] - 1 for e in fit.entries}
        assert fit.source["options"]["heads_per_layer"] == n
    assert changed[1].keys() == {(0, 0), (1, 1)}
    assert changed[2].keys() == {(0, 0), (0, 2), (1, 1), (1, 2)}
    if not texts:  # the optimum of each head
        assert changed[1] == pytest.approx({(0, 0): 1.0, (1, 1): 0.5}, abs=0.1)
    else:  # with fewer heads, each may go further at the same KL divergence
        assert changed[1][0, 0] > changed[2][0, 0]
