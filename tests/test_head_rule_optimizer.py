"""Optimisation of rules by a scorer that is known: steps, weights, pruning, selection."""

import numpy as np
import pytest
from fake_progress import Told
from fakes import QuadraticScorer, even_examples, scores_of
from rule_families import CONSTANTS, GLOBAL, HEADS, PER_HEAD, family

from calibrate.core.parameter_sharing import Sharing
from calibrate.core.rule import LOG_SIZE
from calibrate.core.rule_kinds import CONSTANT, KINDS, POLYNOMIAL
from calibrate.errors import CalibrateError, QualityError
from calibrate.export.plan import Exportable
from calibrate.model.basis import SHARED_SLOPE
from calibrate.model.calibration_and_validation import ModelSolution, Validation, calibration_of
from calibrate.model.candidates import ModelOptions, candidate_families, select_solution
from calibrate.model.fit import fit_head_rules
from calibrate.model.head_rule_optimizer import HeadRuleOptimizer
from calibrate.model.natural_gradient import damped, natural_gradient_step, shrink_gradient
from calibrate.model.objective import ModelObjective
from calibrate.model.parameters import Parameters
from calibrate.parallel import SILENT

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
        optimizer.solve([each])
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


def test_the_families_of_a_round_share_passes_of_text():
    families, text = [CONSTANTS, family(CONSTANT, PER_HEAD)], list(range(8, 16))

    def solved(*rounds):
        scorer = QuadraticScorer(even_examples([10], [30]), USEFUL + 1, fisher=0.3)
        optimizer = optimizer_of(scorer, families)
        solutions = [x for families in rounds for x in optimizer.solve(families)]
        return solutions, [n_rules for indices, n_rules in scorer.scored if indices == text]

    alone, n_alone = solved(families[:1], families[1:])
    together, n_together = solved(families)
    assert [x.weight for x in alone] == [x.weight for x in together]
    assert [x.value.limiting for x in alone] == [x.value.limiting for x in together]
    assert set(n_alone) == {1}
    assert len(n_together) < len(n_alone)
    assert max(n_together) == 2


def test_rules_that_gain_little_at_first_order_are_not_evaluated():
    """One head gains what another one loses: a constant of all heads gains nothing."""
    scorer = QuadraticScorer(even_examples([10], [30]), USEFUL, fisher=0.3)
    families = [CONSTANTS, family(CONSTANT, PER_HEAD)]
    shared, own = optimizer_of(scorer, families, max_kl=0.01).solve(families)
    assert not shared.is_evaluated
    assert shared.weight == pytest.approx(0.5)  # what the curvature predicts
    assert own.is_evaluated
    assert {n_rules for _, n_rules in scorer.scored} == {1}


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
    (solution,) = optimizer_of(scorer, [CONSTANTS], given, max_kl=max_kl).solve([CONSTANTS])
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
    assert part == 0 or fit.only.coefficients[1] == pytest.approx(1 + solution.weight / 2)


def test_a_cost_that_is_linear_in_the_weight_has_a_weight_too():
    (solution,) = optimizer_of(one_head(power=1), [CONSTANTS], max_kl=0.01).solve([CONSTANTS])
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
    shared, own = optimizer.solve(families)
    assert abs(shared.parameters.numbers).max() < 0.05  # one head gains what another one loses
    assert own.heads_changed(scorer.heads) == [(0, 0), (0, 2)]
    np.testing.assert_allclose(own.parameters.numbers[0, [0, 2]], [0.5, -0.5], atol=0.05)
    assert optimizer.solutions == [shared, own]


def test_rules_of_all_heads_begin_anew_where_they_are_better():
    """One step is too few for rules of each head, but not from what all have in common."""
    scorer, told = QuadraticScorer(even_examples([10]), np.ones(8)), Told()
    families = [CONSTANTS, family(CONSTANT, PER_HEAD)]
    optimizer = optimizer_of(scorer, families, steps=1, progress=told)
    shared = optimizer.validation.solution(Parameters(CONSTANTS, np.full((1, 1), 0.9)))
    optimizer.solutions.append(shared)
    (own,) = optimizer.solve(families[1:])
    assert [stage for stage, *_ in told.stages if stage.startswith("constant, each head")] == [
        "constant, each head: step 1 of 1"
    ] * 2
    assert own.value.gain >= shared.value.gain


# --- selection -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gain_of_each", "noise", "selected"),
    [(0.3, 0.1, PER_HEAD), (0.205, 0.0, GLOBAL), (0.3, 3.0, GLOBAL), (None, 0.0, None)],
)
def test_the_simplest_that_no_other_beats_is_selected(gain_of_each, noise, selected):
    examples = even_examples([10, 20], count=40)
    objective = ModelObjective(examples, scores_of(np.full(80, -1.0)))
    error = noise * np.random.default_rng(2).standard_normal(80)
    small = 0.01 * (np.arange(80) % 2)
    gains = {GLOBAL: small + 0.2, PER_HEAD: small + error - error.mean() + (gain_of_each or 0.0)}
    solutions = [
        ModelSolution(
            family(CONSTANT, sharing).baseline(HEADS),
            objective.value(range(80), scores_of(-1 + (gain if gain_of_each else 0 * gain))),
        )
        for sharing, gain in gains.items()
    ]
    best = select_solution(solutions, ModelOptions())
    assert (best and best.family.sharing) == selected


@pytest.mark.parametrize(
    ("lengths", "text", "kinds"),
    [
        ([10], [], [CONSTANT, POLYNOMIAL]),
        ([10], [30], [CONSTANT]),
        ([10, 20], [30], [CONSTANT, LOG_SIZE, POLYNOMIAL]),
        ([10, 20, 40], [30], [*KINDS]),
    ],
)
def test_kinds_are_tried_where_lengths_determine_and_bound_them(lengths, text, kinds):
    families = candidate_families(ModelOptions(), even_examples(lengths, text))
    assert [family.kind for family in families if not family.is_global] == kinds
    for kind in KINDS:
        assert candidate_families(ModelOptions(kind), even_examples([10], text))[-1].kind == kind


def test_solutions_stay_in_the_order_of_the_families():
    """The simplest first, whatever goes by natural gradient before the others are searched for."""
    scorer = QuadraticScorer(even_examples([10, 20], [30]), USEFUL + 0.1, fisher=0.3)
    families = candidate_families(ModelOptions(engines=Exportable(PER_HEAD)), scorer.examples)
    assert [x.kind for x in families] == [
        CONSTANT, LOG_SIZE, SHARED_SLOPE, CONSTANT, SHARED_SLOPE,
    ]  # fmt: skip
    optimizer = optimizer_of(scorer, families)
    optimizer.solve(families)
    assert [solution.family for solution in optimizer.solutions] == families


@pytest.mark.parametrize(
    ("options", "n_solved"), [({}, 3), ({"trained_up_to": 10}, 5), ({"kind": LOG_SIZE}, 4)]
)
def test_a_fit_without_a_gain_stops_early(options, n_solved):
    scorer, told = QuadraticScorer(even_examples([10, 20], count=16), np.zeros(8)), Told()
    objective = ModelObjective(scorer.examples, scorer.baseline(), options.get("trained_up_to"))
    options = ModelOptions(max_steps=2, **options)
    with pytest.raises(QualityError, match=r"[+-]0\.\d{3} ± "):
        fit_head_rules(scorer, objective, "x", {}, options, told)
    assert len(told.notes) == n_solved


def test_a_fit_is_of_the_heads_that_gain():
    scorer = QuadraticScorer(even_examples([10, 20], count=16), USEFUL, noise=0.01)
    objective = ModelObjective(scorer.examples, scorer.baseline())
    fit = fit_head_rules(scorer, objective, "x", {}, ModelOptions(CONSTANT, max_steps=60))
    betas = {(e.layer, e.head): e.coefficients[-1] for e in fit.coefficients.entries}
    assert betas == pytest.approx({(0, 0): 2.0, (0, 2): 0.25}, abs=0.1)
    assert [x["strength"] for x in fit.coefficients.quality["trade"]] == [0.25, 0.5, 1.0]


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
        told = Told()
        fit = fit_head_rules(scorer, objective, "x", {}, options, told).coefficients
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
        (Exportable(Sharing.PER_LAYER), None, "^heads .*heads_per_layer="),
        (Exportable(PER_HEAD), LOG_SIZE, "log n .*heads_per_layer="),
    ],
)
def test_few_heads_need_rules_of_their_own(engines, kind, match):
    with pytest.raises(CalibrateError, match=match):
        ModelOptions(kind, engines=engines, heads_per_layer=2)


def test_few_heads_for_export_are_constants():
    options = ModelOptions(engines=Exportable(PER_HEAD), heads_per_layer=1)
    families = candidate_families(options, even_examples([10, 20]))
    assert [(x.kind, x.sharing) for x in families] == [(CONSTANT, GLOBAL), (CONSTANT, PER_HEAD)]
