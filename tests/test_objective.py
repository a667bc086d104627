"""The objective of a fit through a model: gains, losses, and the margins of its constraints."""

import numpy as np
import pytest
from fakes import even_examples, scores_of

from calibrate.errors import QualityError
from calibrate.model.objective import ModelObjective


@pytest.fixture
def objective():
    """Answers at 10 and 20 tokens; those at 10 are constrained, as text is."""
    examples = even_examples([10, 20], [30])
    return ModelObjective(examples, scores_of(np.full(24, -1.0)), 10)


def test_gains_are_means_over_cells_and_losses_are_a_token(objective):
    log_p = np.array([-0.5] * 8 + [-1.5] * 8 + [-1.29] * 8)
    kl = np.repeat([0, 0.29], [16, 8])  # of windows with 29 tokens
    scores = scores_of(log_p, kl + 1e-4 * (np.arange(24) % 2))
    value = objective.value(range(24), scores)
    assert value.gain == 0
    np.testing.assert_allclose([loss.mean for loss in value.losses], [0.01, -0.25], atol=1e-5)
    assert value.limiting.loss == pytest.approx(value.losses[0].mean + 2 * value.losses[0].error)
    assert not value.is_allowed
    assert objective.value(range(24), scores._replace(kl=kl * 0)).is_allowed
    better = objective.value(range(24), scores_of(log_p + np.arange(24) % 2))
    lead = better.over(value)
    assert lead.mean == pytest.approx(0.5)
    assert lead.error == pytest.approx(np.std([0, 1] * 8, ddof=1) / 4)
    (*_, none) = objective.value(range(8, 24), scores_of(log_p[8:])).losses
    assert none.mean == 0


def test_trained_lengths_may_lose_half_of_their_margin_on_the_validation_split(objective):
    """As the test split has the last word: 0.01 nats a token counts as 0.02; no error is added."""
    log_p = np.full(24, -1.0)
    for lost in (0.0049, 0.0051, 0.01):
        log_p[:8] = -1 - 2 * lost - np.resize([-0.3, 0.3], 8)  # answers of two tokens
        value = objective.value(range(24), scores_of(log_p))
        assert value.losses[1].mean == pytest.approx(lost)
        assert value.losses[1].error > 0.01
        assert value.limiting.loss == pytest.approx(2 * lost)
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
def test_text_and_trained_lengths_have_margins_of_their_own(max_kl, tolerance, limiting):
    """The constraint that takes most of its own margin limits the rule."""
    examples = even_examples([10, 20], [30])
    plain = scores_of(np.full(24, -1.0))
    objective = ModelObjective(examples, plain, 10, max_kl=max_kl, tolerance=tolerance)
    log_p, kl = np.repeat([-1.02, -1.0], [8, 16]), np.repeat([0, 0.29], [16, 8])
    value = objective.value(range(24), scores_of(log_p, kl))
    assert value.limiting == pytest.approx(limiting)
    assert value.is_allowed == (limiting[0] <= limiting[1])


def test_lengths_of_text_have_equal_weight_however_many_windows_they_have():
    examples = even_examples([10], [20, 30])
    objective = ModelObjective(examples, scores_of(np.full(24, -1.0)))
    scores = scores_of(np.full(18, -1.0), np.repeat([0, 0.2, 0.6], [8, 8, 2]))
    (loss,) = objective.value(range(18), scores).losses
    assert loss.mean == pytest.approx((0.2 / 19 + 0.6 / 29) / 2)


def test_the_constraint_that_limits_a_rule_is_named(objective):
    value = objective.value(range(24), scores_of(np.repeat([-1.5, -0.3, -1.0], 8)))
    message = str(QualityError(objective.describe_most_exceeded(value)))
    part = "gains +0.100 nats costs answers of 10 tokens (trained_up_to=) 0.2500 nats per token"
    assert part in message
    assert message.endswith("and 0.01 is allowed (tolerance=)")
