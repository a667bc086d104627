"""Limits on harm: which items they apply to, what is lost there, and what margin holds."""

from dataclasses import replace

import numpy as np
import pytest
from evidence_cases import CELLS, evidence_of_gains, fitted_at

from calibrate.defaults import MAX_KL, NLL_TOLERANCE
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.harm_limits import (
    NonInferiorityResult,
    check_limits,
    retention_text,
    trained_sizes,
)
from calibrate.evidence.metrics import ANSWERS, KL, LOG_P, LOG_P_PER_TOKEN


def test_rows_lose_in_the_mean_of_the_trained_sizes_where_each_keeps_the_margin():
    evidence = evidence_of_gains({"own": (-0.004, -0.003, 0.3, 0.3)}, count=4_000)
    result = trained_sizes(64).check(evidence, "own")
    assert result.passed
    assert (result.n, result.size, result.limit.metric) == (8_000, None, LOG_P)
    assert result.loss.mean == pytest.approx(0.0035, abs=0.002)
    assert result.share == pytest.approx(result.loss.mean / NLL_TOLERANCE)


def test_the_size_that_exceeds_the_margin_stands_for_all():
    evidence = evidence_of_gains({"own": (0.03, -0.03, 0.3, 0.3)}, count=4_000)
    result = trained_sizes(64).check(evidence, "own")
    assert not result.passed
    assert result.significantly_exceeded
    assert result.size == 64
    assert result.loss.mean == pytest.approx(0.03, abs=0.005)
    assert trained_sizes(64, margin=0.05).check(evidence, "own").passed


@pytest.mark.parametrize("up_to", ["16", True, -1, 3, None])
def test_a_file_without_trained_sizes_among_the_items_limits_nothing(up_to):
    fit = fitted_at("constant", up_to)
    assert check_limits(evidence_of_gains({"own": (0.3,) * 4}, fits={"own": fit}), "own") == []


def test_a_model_may_lose_what_its_file_says_per_token():
    fit = fitted_at("constant", 128, through="model", max_kl=0.01, tolerance=0.01)
    gains, tokens = (-0.03, -0.03, -0.03, -0.5), np.repeat([4, 4, 4, 1], 200)
    evidence = evidence_of_gains(
        {"own": gains}, ANSWERS, strata=CELLS, fits={"own": fit}, tokens=tokens
    )
    text, answers = check_limits(evidence, "own")
    assert (text.limit.metric, answers.limit.metric) == (KL, LOG_P_PER_TOKEN)
    assert text.loss.mean == pytest.approx(0.025, abs=0.003)
    assert 0.005 < answers.loss.mean < 0.01
    assert [result.limit.margin for result in (text, answers)] == [0.01, 0.01]
    assert [result.passed for result in (text, answers)] == [False, True]
    margins = {"max_kl": 0.04, "tolerance": 0.002}
    fit = fitted_at("constant", 128, through="model", **margins)
    results = check_limits(replace(evidence, fits={"own": fit}), "own")
    assert [result.limit.margin for result in results] == [0.04, 0.002]
    assert [result.passed for result in results] == [True, False]
    of_rows = replace(evidence, fits={"own": fitted_at("constant", 128)})  # items, not tokens
    assert [result.limit.metric for result in check_limits(of_rows, "own")] == [KL]


def test_an_unknown_margin_is_kept():
    evidence = evidence_of_gains({"own": (0.3,) * 4}, ANSWERS, strata=CELLS)
    (text,) = check_limits(evidence, "own")
    assert np.isnan(text.limit.margin)
    assert text.passed


def test_a_choice_counts_errors_of_kl_and_half_of_a_tolerance():
    loss = Estimate(0.004, 0.001)
    of_text = NonInferiorityResult(retention_text(), loss, 9)
    assert of_text.limit.margin == MAX_KL
    assert of_text.cautious_loss == pytest.approx(0.006)
    trained = NonInferiorityResult(trained_sizes(16), loss, 9)
    assert trained.cautious_loss == pytest.approx(0.008)
    assert trained.passed


def test_of_a_margin_of_0_any_loss_is_infinitely_much():
    limit = retention_text(0.0)
    assert limit.share(1e-9) == np.inf
    assert limit.share(0.0) == 0
