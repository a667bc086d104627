"""Verdicts in words: the advice, and the numbers in it, for rules with planted gains."""

import re
from dataclasses import replace

import numpy as np
import pytest
from evidence_cases import CELLS, evidence_of_gains, fitted_at

from calibrate.evidence.baselines import one_constant
from calibrate.evidence.calibration_error import expected_calibration_error, reliability_of
from calibrate.evidence.evidence import Stratum
from calibrate.evidence.metrics import ANSWERS, LOG_P
from calibrate.report.sentences import finding, sentences, with_verdict
from calibrate.rows.score import score_head


@pytest.mark.parametrize(
    ("gains", "outcome", "sizes"),
    [
        ((0.3,) * 4, "significantly better", []),
        ((0, 0, 0.3, 0.3), "significantly better", ["256", "1,024"]),
        ((0, 0, 0, 0.3), "significantly better", ["1,024"]),
        ((0, 0.3, 0.3, -0.3), "significantly better", ["64", "256", "1,024"]),
        ((0.3, 0, 0.3, 0), "significantly better", ["16", "256"]),
        ((0, 0, 0, -0.3), "significantly worse", []),
        ((0,) * 4, "not significantly different", []),
        ((-0.3,) * 4, "significantly worse", []),
    ],
)
def test_a_finding_comes_with_the_numbers_before_and_after(gains, outcome, sizes):
    evidence = evidence_of_gains({"own": gains})
    text = finding(evidence, "own", "mine@2")
    assert text.startswith(f"mine@2 is {outcome} ")
    before_numbers = text.split("mine@2")[1].split(": ")[0]
    assert re.findall(r"\b[\d,]+\b", before_numbers) == sizes
    before, after = (-evidence.mean(rule, LOG_P).mean for rule in ("baseline", "own"))
    change = -evidence.gain("own", LOG_P)
    assert f"NLL {before:.3f} -> {after:.3f} nats ({change.shown('+.3f')}" in text
    assert "800 inputs" in text


def test_a_size_of_significant_loss_is_excepted():
    strata = tuple(s._replace(size=2**i) for i, s in enumerate(CELLS[:1] * 12, 1))
    evidence = evidence_of_gains({"own": (0.008,) * 11 + (-0.03,)}, strata=strata)
    assert re.match(".* better .* worse .*4,096", finding(evidence, "own"))


def test_too_few_items():
    evidence = evidence_of_gains({"own": (1.0,) * 4}, count=9)
    evidence = replace(evidence, group=np.zeros(36, int))
    text = finding(evidence, "own")
    assert re.match("Unknown: 36 inputs .*error unknown", text)


def test_simpler_rules_that_do_as_well_and_all_that_do_better_are_named():
    rules = {"own": 0.3, "constant": 0.3, "paper": 0.1, "polynomial": 0.3, "log n / log 16": 0.4}
    evidence = evidence_of_gains({name: (gain,) * 4 for name, gain in rules.items()})
    _, others = sentences(evidence, "own")
    better, level = others.removesuffix(".").split(". ")
    assert re.search(r" log n / log 16 \(\+0\.1\d\d nats\)$", better)
    assert re.search(" constant$", level)
    assert "polynomial" not in others
    worse = evidence_of_gains({"own": (0.3,) * 4, "paper": (0.1,) * 4})
    assert len(sentences(worse, "own")) == 1


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ((-0.004, -0.003, 0.3, 0.3), r"n <= 64\): -0\.00.* \(tolerance 0\.005\)"),
        ((0.03, -0.03, 0.3, 0.3), r"n = 64\): -0\.0[23].* \(exceeds .* 0\.005\)"),
    ],
)
def test_a_loss_at_trained_sizes_stands_beside_the_verdict(gains, words):
    fits = {"own": fitted_at("constant", 64)}
    evidence = evidence_of_gains({"own": gains}, count=4_000, fits=fits)
    assert re.search(words, sentences(evidence, "own")[1])


def test_retention_text():
    gains = {"own": (0.3, 0.3, 0.3, -0.05)}
    evidence = evidence_of_gains(gains, ANSWERS, strata=CELLS)
    first, last = sentences(evidence, "own")
    assert re.match(".* better .*: NLL .*, exact match .* 600 answers", first)
    assert re.match(r"Retention text: 0\.02.. ± 0\.0... nats per token", last)


def test_held_out_templates():
    strata = tuple(s._replace(unseen=s.template == "towns") for s in CELLS)
    evidence = evidence_of_gains({"own": (0.3, 0.3, -0.4, 0)}, ANSWERS, strata=strata)
    first, _ = sentences(evidence, "own")
    assert re.match(".* worse .* 200 answers .* 1 held-out prompt template", first)


def test_held_out_text_makes_no_prompt_template_held_out():
    """As of prompts of few templates beside the built-in text, half of whose domains are."""
    strata = tuple(s._replace(unseen=s.protected) for s in CELLS)
    evidence = evidence_of_gains({"own": (0.3, 0.3, 0.3, -0.05)}, ANSWERS, strata=strata)
    text = finding(evidence, "own")
    assert "600 answers" in text
    assert "held-out" not in text


def test_the_sentence_has_the_calibration_error(toy_head):
    """Beta = 30 is far too confident."""
    evidence = score_head(toy_head, [16, 64], 400, 0, {"own": one_constant(30.0)})
    text, rules = finding(evidence, "own"), ("baseline", "own")
    nll, ece = (re.search(rf"{word} ([\d.]+) -> ([\d.]+)", text) for word in ("NLL", "ECE"))
    before, after = (-evidence.mean(rule, LOG_P).mean for rule in rules)
    assert (float(nll[1]), float(nll[2])) == pytest.approx((before, after), abs=6e-4)
    errors = [100 * expected_calibration_error(reliability_of(evidence, rule)) for rule in rules]
    assert [float(ece[1]), float(ece[2])] == pytest.approx(errors, abs=0.06)
    assert errors[1] > errors[0] + 5


def test_rows_that_a_fit_was_fitted_to_are_said_to_be(by_size):
    evidence = evidence_of_gains({"own": (0.2,) * 4}, fits={"own": by_size})
    assert "fitted to" not in finding(evidence, "own")
    fit = replace(by_size, source={"fingerprint": "sha256:toy"})
    assert "fitted to" in finding(replace(evidence, fits={"own": fit}), "own")


@pytest.mark.parametrize("count", [29, 30])
def test_a_verdict_of_few_answers_has_a_caution(count):
    strata = (Stratum(16, "towns", False),)
    evidence = evidence_of_gains({"own": (0.3,)}, ANSWERS, strata=strata, count=count)
    assert evidence.n == count
    assert any("Caution" in text for text in sentences(evidence, "own")) == (count < 30)


def test_the_file_of_a_fit_through_a_model_has_its_verdict_and_weight():
    fit = fitted_at("constant", through="model", interpolation=0.5)
    fit = replace(fit, name="mine", evidence={"kinds": []})
    evidence = evidence_of_gains({"own": (0.3, 0.3, 0.3, 0)}, ANSWERS, strata=CELLS)
    with_it = with_verdict(fit, evidence)
    assert list(with_it.evidence) == ["kinds", "verdict"]
    assert re.match(r"mine is .*: NLL .*: 0\.5\.$", with_it.verdict)
