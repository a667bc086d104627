"""Optimisation of rules by a scorer that is known: steps, weights, pruning, and the fit."""

import numpy as np
import pytest
from fake_progress import Told
from fakes import QuadraticScorer, even_examples
from rule_families import CONSTANTS, GLOBAL, HEADS, PER_HEAD, family

from calibrate.core.parameter_sharing import Sharing
from calibrate.core.rule import CONSTANT, ENTROPY_AND_SIZE, LOG_SIZE, POLYNOMIAL
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.metrics import LOG_P
from calibrate.export.plan import Exportable
from calibrate.model.calibration_and_validation import Validation, calibration_of
from calibrate.model.fit import fit_head_rules
from calibrate.model.head_rule_optimizer import HeadRuleOptimizer
from calibrate.model.natural_gradient import damped, natural_gradient_step, shrink_gradient
from calibrate.model.objective import ModelObjective
from calibrate.model.options import ModelOptions, families_of
from calibrate.model.parameters import SHARED_SLOPE, Parameters
from calibrate.parallel import SILENT
from calibrate.report.sentences import with_verdict

USEFUL = np.array([1.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # slopes: two heads of eight


def optimizer_of(scorer, families=(), weight=None, steps=1, progress=SILENT, **bounds):
    """Its validation split has all examples."""
    objective = ModelObjective(scorer.examples, scorer.baseline(), **bounds)
    calibration = calibration_of(scorer, scorer.examples, steps, 0, progress)
    validation = Validation(scorer, objective, list(range(len(scorer.examples.examples))))
    return HeadRuleOptimizer(calibration, validation, list(families), weight)


# --- a step of natural gradient ------------------------------------------------------------------


def test_a_step_of_natural_gradient_gains_most_of_those_that_cost_as_much():
    rng = np.random.default_rng(3)
    gradient, roots = rng.standard_normal((2, 5)), rng.standard_normal((5, 2, 2))
    curvature = roots @ roots.mT
    step = natural_gradient_step(gradient, curvature, 0.01)
    cost = np.einsum("rc,crs,sc->", step, curvature, step) / 2
    assert cost == pytest.approx(0.01)

    def gain(numbers):
        cost = np.einsum("rc,crs,sc->", numbers, damped(curvature), numbers)
        return (gradient * numbers).sum() / np.sqrt(cost)

    others = step + 0.1 * np.abs(step).max() * rng.standard_normal((100, 2, 5))
    assert max(map(gain, others)) < gain(step)
    assert natural_gradient_step(0 * gradient, curvature, 0.01) is None
    assert natural_gradient_step(gradient, 0 * curvature, 0.01) is None


def test_a_step_is_the_same_rule_in_any_scale_of_the_terms():
    rng = np.random.default_rng(4)
    gradient, roots = rng.standard_normal((3, 5)), rng.standard_normal((5, 3, 4))
    curvature, scale = roots @ roots.mT, np.diag([1.0, 0.1, 30.0])
    step = natural_gradient_step(gradient, curvature, 0.01)
    other = natural_gradient_step(scale @ gradient, scale @ curvature @ scale, 0.01)
    np.testing.assert_allclose(scale @ other, step, rtol=1e-6)


def test_the_curvature_of_a_head_that_costs_nothing_is_that_of_the_others():
    curvature = np.array([[[2.0]], [[4.0]], [[0.0]]])
    np.testing.assert_allclose(damped(curvature)[:, 0, 0], [2.6, 4.6, 0.6])


def test_noise_is_taken_from_a_mean_gradient():
    signal = np.array([1.0, 0.0, -0.1, 0.0])
    spread = np.array([0.1, 2.0, 0.0, 0.0])
    shrunk = shrink_gradient(signal + np.array([[1], [-1], [1], [-1]]) * spread)
    np.testing.assert_allclose(shrunk, [1 - 0.01 / 3, 0, -0.1, 0])
    np.testing.assert_array_equal(shrink_gradient(signal[None]), signal)


def test_all_families_go_by_the_same_derivatives():
    scorer = QuadraticScorer(even_examples([10], [30]), USEFUL, fisher=0.3)
    families = [CONSTANTS, family(CONSTANT, PER_HEAD), family(LOG_SIZE, PER_HEAD)]
    optimizer, n_made = optimizer_of(scorer, families), []
    for each in families:
        optimizer.natural_gradient.step(each)
        n_made.append(len(scorer.differentiated))
    assert 0 < n_made[0] == n_made[1] == n_made[2]


def test_derivatives_by_entropy_are_made_for_rules_of_it_alone():
    for kinds, full in (
        ([CONSTANT, LOG_SIZE], LOG_SIZE),
        ([CONSTANT, POLYNOMIAL], "entropy-and-size"),
    ):
        scorer = QuadraticScorer(even_examples([10], [30]), USEFUL, fisher=0.3)
        optimizer = optimizer_of(scorer, [family(kind, PER_HEAD) for kind in kinds])
        assert optimizer.natural_gradient.full.kind == full


def test_families_share_passes_of_text():
    families, text = [CONSTANTS, family(CONSTANT, PER_HEAD)], list(range(8, 16))

    def solved(families):
        scorer = QuadraticScorer(even_examples([10], [30]), USEFUL + 1, fisher=0.3)
        solutions = optimizer_of(scorer, families).solve()
        return solutions, [n_rules for indices, n_rules in scorer.scored if indices == text]

    alone, n_alone = zip(*(solved([x]) for x in families), strict=True)
    together, n_together = solved(families)
    assert [x.weight for (x,) in alone] == [x.weight for x in together]
    assert [x.value.limiting for (x,) in alone] == [x.value.limiting for x in together]
    assert {*n_alone[0], *n_alone[1]} == {1}
    assert len(n_together) < len(n_alone[0]) + len(n_alone[1])
    assert max(n_together) == 2


# --- the interpolation weight --------------------------------------------------------------------


def one_head(power=2):
    """Text loses 0.04 nats a token where beta is 1.5, which is interpolation weight 1."""
    examples = even_examples([10], [30])
    return QuadraticScorer(examples, np.ones(1), curvature=0.0, fisher=0.32, power=power)


@pytest.mark.parametrize(
    ("given", "max_kl", "part"),
    [(None, 0.01, 32), (None, 0.0025, 16), (None, 1e-9, 0), (None, 0.2, 64), (0.5, 0.01, 32)],
)
def test_the_weight_is_the_largest_that_text_allows(given, max_kl, part):
    scorer = one_head()
    (solution,) = optimizer_of(scorer, [CONSTANTS], given, max_kl=max_kl).solve()
    assert solution.weight * 64 == pytest.approx(part, abs=0.07 * part)
    assert solution.weight * 64 <= part
    assert solution.value.gain == pytest.approx(solution.weight / 2)
    assert len(scorer.scored) <= 10
    if (given, max_kl) == (None, 0.01):  # what the curvature predicts is the first trial
        assert len(scorer.scored) == 2  # text, then answers at that weight
    lost = solution.value.losses[0].mean
    assert lost == pytest.approx(0.16 * (solution.weight / 2) ** 2 if given is None else 0.0)
    fit = solution.rules(HEADS)
    assert (fit is None) == (part == 0)
    assert part == 0 or fit.coefficients == pytest.approx((1 + solution.weight / 2,))


def test_a_cost_that_is_linear_in_the_weight_has_a_weight_too():
    (solution,) = optimizer_of(one_head(power=1), [CONSTANTS], max_kl=0.01).solve()
    assert 0.8 * 0.01 / 0.08 < solution.weight <= 0.01 / 0.08


# --- proximal Adam -------------------------------------------------------------------------------


@pytest.mark.parametrize("useful", [(2,), (2, 5), (1, 2, 5, 6)])
def test_heads_are_pruned_while_nothing_is_lost(useful):
    """The fewest heads that are as good stay; where each gains as much, all of them."""
    slope = np.where(np.isin(range(8), useful), 1.0, 1e-4)
    scorer = QuadraticScorer(even_examples([10]), slope, curvature=0.0, noise=0.01)
    optimizer = optimizer_of(scorer)
    changed = np.isin(range(8), (1, 2, 5, 6))
    best = optimizer.validation.solution(
        Parameters(family(CONSTANT, PER_HEAD), 0.5 * changed[None])
    )
    assert best.value.gain == pytest.approx(0.5 * slope[changed].sum())
    fewest = optimizer.prune_heads(best, slope)
    assert fewest.parameters.changed_columns().tolist() == list(useful)
    np.testing.assert_array_equal(fewest.parameters.numbers[0, list(useful)], 0.5)
    assert fewest.value.gain == pytest.approx(0.5 * slope[list(useful)].sum())


def test_the_best_constants_are_found():
    """Where slope - curvature a = 0, of the heads that have a slope."""
    scorer = QuadraticScorer(even_examples([10]), USEFUL / 2, noise=0.01)
    families = [CONSTANTS, family(CONSTANT, PER_HEAD)]
    optimizer = optimizer_of(scorer, families, steps=60)
    shared, own = optimizer.solve()
    assert abs(shared.parameters.numbers).max() < 0.05  # one head gains what another one loses
    assert own.heads_changed(scorer.heads) == [(0, 0), (0, 2)]
    np.testing.assert_allclose(own.parameters.numbers[0, [0, 2]], [0.5, -0.5], atol=0.05)


def test_rules_of_all_heads_begin_anew_where_they_are_better():
    """One step is too few for rules of each head, but not from what all have in common."""
    scorer, told = QuadraticScorer(even_examples([10]), np.ones(8)), Told()
    families = [CONSTANTS, family(CONSTANT, PER_HEAD)]
    shared, own = optimizer_of(scorer, families, steps=1, progress=told).solve()
    assert [stage for stage, *_ in told.stages if stage.startswith("constant, each head")] == [
        "constant, each head: step 1 of 1"
    ] * 2
    assert own.value.gain >= shared.value.gain


# --- the fit --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (CONSTANT, [], [(CONSTANT, GLOBAL), (CONSTANT, PER_HEAD)]),
        (LOG_SIZE, [], [(CONSTANT, GLOBAL), (LOG_SIZE, GLOBAL), (CONSTANT, PER_HEAD),
                        (LOG_SIZE, PER_HEAD)]),
        (ENTROPY_AND_SIZE, [], [(CONSTANT, GLOBAL), (CONSTANT, PER_HEAD), (POLYNOMIAL, PER_HEAD),
                                (ENTROPY_AND_SIZE, PER_HEAD)]),
        (CONSTANT, [30], [(CONSTANT, GLOBAL), (CONSTANT, PER_HEAD)]),
        (ENTROPY_AND_SIZE, [30], [(CONSTANT, GLOBAL), (ENTROPY_AND_SIZE, PER_HEAD)]),
    ],
)  # fmt: skip
def test_a_search_begins_at_simpler_kinds_and_a_step_from_text_does_not(kind, text, expected):
    families = families_of(ModelOptions(kind), even_examples([10], text))
    assert [(x.kind, x.sharing) for x in families] == expected


def test_solutions_are_in_the_order_of_the_families():
    """The simplest first, whatever goes by natural gradient before the others are searched for."""
    scorer = QuadraticScorer(even_examples([10, 20], [30]), USEFUL + 0.1, fisher=0.3)
    options = ModelOptions(LOG_SIZE, engines=Exportable(PER_HEAD))
    families = families_of(options, scorer.examples)
    assert [x.kind for x in families] == [
        CONSTANT, LOG_SIZE, SHARED_SLOPE, CONSTANT, SHARED_SLOPE,
    ]  # fmt: skip
    assert [x.family for x in optimizer_of(scorer, families).solve()] == families


def test_a_fit_without_a_gain_is_refused():
    scorer = QuadraticScorer(even_examples([10, 20], count=16), np.zeros(8))
    objective = ModelObjective(scorer.examples, scorer.baseline())
    with pytest.raises(QualityError, match=r"[+-]0\.\d{3} ± "):
        fit_head_rules(scorer, objective, "x", {}, ModelOptions(max_steps=2))


@pytest.mark.parametrize("slope", [USEFUL + 1, USEFUL], ids=["a constant gains", "none gains"])
def test_a_fit_says_what_it_gains_over_one_constant_for_all_heads(slope):
    """The mean of paired differences and its standard error, by hand."""
    scorer = QuadraticScorer(even_examples([10, 20], [30], 32), slope, fisher=0.05, noise=0.01)
    objective = ModelObjective(scorer.examples, scorer.baseline(), max_kl=1.0)
    found = fit_head_rules(scorer, objective, "x", {}, ModelOptions(max_kl=1.0))
    answers = found.evidence.answers
    over = "constant" if slope is not USEFUL else "baseline"  # beta = 1, which nobody scores again
    assert ("constant" in answers.rules) == (over == "constant")
    difference = answers.scores("own", LOG_P) - answers.scores(over, LOG_P)
    of_lengths = [difference[answers.stratum == i] for i in (0, 1)]
    mean = np.mean([x.mean() for x in of_lengths])
    error = np.std(difference, ddof=1) / np.sqrt(len(difference))
    (known,) = found.coefficients.evidence["kinds"]
    assert known == {
        "kind": "constant", "gain": pytest.approx(mean), "se": pytest.approx(error),
    }  # fmt: skip
    assert mean > 0.05
    assert error > 1e-4
    verdict = with_verdict(found.coefficients, found.evidence).verdict
    assert f"one constant for all heads: {mean:+.3f} ± {error:.3f} nats" in verdict


def test_one_constant_for_all_heads_is_compared_with_the_baseline_alone():
    scorer = QuadraticScorer(even_examples([10, 20], count=32), USEFUL + 0.1, noise=0.01)
    objective = ModelObjective(scorer.examples, scorer.baseline())
    found = fit_head_rules(scorer, objective, "x", {}, ModelOptions(sharing=GLOBAL))
    assert "kinds" not in found.coefficients.evidence
    assert found.evidence.rules == ("baseline", "own", "paper")


def test_a_fit_is_of_the_heads_that_gain():
    scorer = QuadraticScorer(even_examples([10, 20], count=16), USEFUL, noise=0.01)
    objective = ModelObjective(scorer.examples, scorer.baseline())
    fit = fit_head_rules(scorer, objective, "x", {}, ModelOptions(CONSTANT, max_steps=60))
    betas = {(e.layer, e.head): e.coefficients[-1] for e in fit.coefficients.entries}
    assert betas == pytest.approx({(0, 0): 2.0, (0, 2): 0.25}, abs=0.1)
    records = fit.coefficients.evidence["interpolation"]
    assert [record["weight"] for record in records] == [0.25, 0.5, 1.0]


def test_the_table_of_weights_and_the_verdict_are_of_the_same_answers():
    scorer = QuadraticScorer(even_examples([10, 20], count=80), USEFUL, noise=0.01)
    objective = ModelObjective(scorer.examples, scorer.baseline())
    found = fit_head_rules(scorer, objective, "x", {}, ModelOptions(CONSTANT, max_steps=20))
    records = found.coefficients.evidence["interpolation"]
    n_answers = found.evidence.answers.n
    assert n_answers == 40
    assert [record["inputs"] for record in records] == [n_answers] * 3
    gain = found.evidence.answers.gain("own", LOG_P)
    assert (records[-1]["gain"], records[-1]["gain_se"]) == pytest.approx(gain[:2])


@pytest.mark.parametrize("texts", [(), (30,)])
def test_few_heads_of_each_layer_are_those_that_gain_most(texts):
    """By proximal Adam, or with text by natural gradient; they are refitted without the others."""
    slope = np.array([1.0, 0.2, -0.6, 0.0, 0.0, 0.5, 0.4, 0.0])
    examples = even_examples([10, 20], texts, count=16)
    scorer = QuadraticScorer(examples, slope, fisher=0.05, noise=0.01)
    objective = ModelObjective(scorer.examples, scorer.baseline(), max_kl=1.0)
    changed = {}
    for n in (1, 2):
        options = ModelOptions(CONSTANT, max_steps=40, max_kl=1.0, heads_per_layer=n)
        fit = fit_head_rules(scorer, objective, "x", {}, options).coefficients
        changed[n] = {(e.layer, e.head): e.coefficients[-1] - 1 for e in fit.entries}
        assert fit.source["options"]["heads_per_layer"] == n
    assert changed[1].keys() == {(0, 0), (1, 1)}
    assert changed[2].keys() == {(0, 0), (0, 2), (1, 1), (1, 2)}
    if not texts:  # the optimum of each
        assert changed[1] == pytest.approx({(0, 0): 1.0, (1, 1): 0.5}, abs=0.1)
    else:  # with fewer heads, each may go further at the same KL divergence
        assert changed[1][0, 0] > changed[2][0, 0]


@pytest.mark.parametrize(
    ("engines", "kind", "match"),
    [
        (Exportable(Sharing.PER_LAYER), CONSTANT, "^heads .*heads_per_layer="),
        (Exportable(PER_HEAD), LOG_SIZE, "log n .*heads_per_layer="),
    ],
)
def test_few_heads_need_rules_of_their_own(engines, kind, match):
    with pytest.raises(CalibrateError, match=match):
        ModelOptions(kind, engines=engines, heads_per_layer=2)


def test_few_heads_for_export_are_constants():
    options = ModelOptions(engines=Exportable(PER_HEAD), heads_per_layer=1)
    families = families_of(options, even_examples([10, 20]))
    assert [(x.kind, x.sharing) for x in families] == [(CONSTANT, GLOBAL), (CONSTANT, PER_HEAD)]
