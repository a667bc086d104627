"""The objective of a fit through a model: gains, losses, and margins of constraints."""

import numpy as np
import pytest
from fakes import even_examples, scores_of
from tiny_causal import some_examples

from calibrate.evidence.evidence import BASELINE
from calibrate.evidence.metrics import LOG_P, RIGHT
from calibrate.model.objective import ModelObjective, compare_rules
from calibrate.model.scored_splits import validation_indices
from calibrate.model.splits import VALIDATION, assign_splits
from calibrate.prompts.examples import Cell, Example, ExampleSet, Scores


@pytest.fixture
def objective():
    """Answers at 10 and 20 tokens; those at 10 are constrained, as text is."""
    examples = even_examples([10, 20], [30])
    return ModelObjective(examples, scores_of(np.full(24, -1.0)), 10)


def test_gains_are_means_over_cells_and_losses_are_per_token(objective):
    log_p = np.array([-0.5] * 8 + [-1.5] * 8 + [-1.29] * 8)
    kl = np.repeat([0, 0.29], [16, 8])  # of windows with 29 tokens
    scores = scores_of(log_p, kl + 1e-4 * (np.arange(24) % 2))
    value = objective.value(range(24), scores)
    assert value.gain == 0
    np.testing.assert_allclose([loss.mean for loss in value.losses], [0.01, -0.25], atol=1e-5)
    assert value.limiting[0] == pytest.approx(value.losses[0].mean + 2 * value.losses[0].error)
    assert not value.is_allowed
    assert objective.value(range(24), scores._replace(kl=kl * 0)).is_allowed
    better = objective.value(range(24), scores_of(log_p + np.arange(24) % 2))
    lead = better.over(value)
    assert lead.mean == pytest.approx(0.5)
    assert lead.error == pytest.approx(np.std([0, 1] * 8, ddof=1) / 4)
    (*_, absent) = objective.value(range(8, 24), scores_of(log_p[8:])).losses
    assert absent.mean == 0


def test_trained_lengths_may_lose_half_of_their_margin_on_the_validation_split(objective):
    """The test split has the last word: 0.01 nats per token counts as 0.02, without its error."""
    log_p = np.full(24, -1.0)
    for lost in (0.0049, 0.0051, 0.01):
        log_p[:8] = -1 - 2 * lost - np.resize([-0.3, 0.3], 8)  # answers of two tokens
        value = objective.value(range(24), scores_of(log_p))
        assert value.losses[1].mean == pytest.approx(lost)
        assert value.losses[1].error > 0.01
        assert value.limiting[0] == pytest.approx(2 * lost)
        assert value.is_allowed == (lost < objective.constraints[1].margin / 2)


@pytest.mark.parametrize(
    ("max_kl", "tolerance", "limiting"),
    [
        (0.01, 0.01, (0.02, 0.01)),
        (0.001, 0.1, (0.01, 0.001)),
        (0.1, 0.001, (0.02, 0.001)),
        (0.0, 0.01, (0.01, 0.0)),
        (0.01, 0.0, (0.02, 0.0)),
        (0.1, 0.1, (0.02, 0.1)),
    ],
)
def test_the_constraint_with_the_largest_share_of_its_margin_limits(max_kl, tolerance, limiting):
    examples = even_examples([10, 20], [30])
    baseline = scores_of(np.full(24, -1.0))
    objective = ModelObjective(examples, baseline, 10, max_kl=max_kl, tolerance=tolerance)
    log_p, kl = np.repeat([-1.02, -1.0], [8, 16]), np.repeat([0, 0.29], [16, 8])
    value = objective.value(range(24), scores_of(log_p, kl))
    assert value.limiting == pytest.approx(limiting)
    assert value.is_allowed == (limiting[0] <= limiting[1])


def test_lengths_of_text_have_equal_weight_for_any_number_of_windows():
    examples = even_examples([10], [20, 30])
    objective = ModelObjective(examples, scores_of(np.full(24, -1.0)))
    scores = scores_of(np.full(18, -1.0), np.repeat([0, 0.2, 0.6], [8, 8, 2]))
    (loss,) = objective.value(range(18), scores).losses
    assert loss.mean == pytest.approx((0.2 / 19 + 0.6 / 29) / 2)


def test_means_by_hand():
    """Answers have equal weight, and so have lengths of text, per token."""
    cells = [Cell(*cell) for cell in (("a", 32, False), ("a", 64, False), ("text", 32, True))]
    tokens, empty = np.zeros(12, np.int32), Cell("empty", 32, False)
    members = [Example(tokens, 2, cell) for cell in (0, 0, 0, 1, 1, 2, 2)]
    examples = ExampleSet((*cells, empty), tuple(members))
    baseline = Scores.baseline(np.full(7, -90.0), np.int32([10, 10, 8, 9, 8, 5, 6]))
    log_p = baseline.log_p + np.array([1, 2, 3, 5, 7, 1, 2])
    own = Scores.baseline(log_p, np.int32([10] * 5 + [7, 8]))
    evidence = compare_rules(examples, range(7), {"own": own, "baseline": baseline})
    assert evidence.rules == ("baseline", "own")
    assert evidence.strata[0] == (32, "a", False, False)
    assert evidence.answers.gain("own", LOG_P).mean == pytest.approx((3 * 2 + 2 * 6) / 5)
    assert evidence.text.gain("own", LOG_P).mean == pytest.approx(1.5 / 10)
    assert evidence.answers.mean("baseline", RIGHT).mean == pytest.approx(2 / 5)
    assert evidence.answers.mean("own", RIGHT).mean == pytest.approx(1)
    assert evidence.text.by("size")[32].mean("baseline", RIGHT).mean == pytest.approx(5.5 / 10)
    assert {n: part.n for n, part in evidence.answers.by("size").items()} == {32: 3, 64: 2}


def test_errors_are_of_groups():
    examples = some_examples((20,) * 12)
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(4), 3)
    log_p = -1 + 0.5 * rng.standard_normal(4)[group] + 0.01 * rng.standard_normal(12)
    pairs = zip(examples.examples, group.tolist(), strict=True)
    grouped = ExampleSet(examples.cells, tuple(x._replace(group=g) for x, g in pairs))
    baseline = {BASELINE: Scores.baseline(log_p, np.zeros(12, np.int32))}
    evidence = compare_rules(grouped, range(12), baseline)
    means = log_p.reshape(4, 3).mean(axis=1)  # of the groups, which are equally large
    expected = np.std(means, ddof=1) / np.sqrt(4)
    assert evidence.mean(BASELINE, LOG_P).error == pytest.approx(expected)
    assert evidence.n_groups == 4
    mixed = ExampleSet(examples.cells, (*grouped.examples[:6], *examples.examples[6:]))
    assert compare_rules(mixed, range(12), baseline).n_groups == 8


def test_constrained_cells_are_validated_in_full():
    examples = even_examples([10], count=32)
    baseline = scores_of(np.full(32, -1.0))
    in_validation = np.flatnonzero(assign_splits(examples) == VALIDATION).tolist()
    constrained = ModelObjective(examples, baseline, trained_up_to=10)
    assert validation_indices(constrained, 3) == in_validation
    assert validation_indices(ModelObjective(examples, baseline), 3) == in_validation[:3]
