"""Verdicts in words: the advice, and the numbers in it, for rules with planted gains."""

import re
from dataclasses import replace

import numpy as np
import pytest
from evidence_cases import CELLS, evidence_of_gains, fitted_at

import calibrate
from calibrate.errors import QualityError
from calibrate.evidence.baselines import hard_attention, one_constant
from calibrate.evidence.calibration_error import expected_calibration_error, reliability
from calibrate.evidence.metrics import ANSWERS, BATCHES, LOG_P, RIGHT, ROWS, SETS
from calibrate.fitting.verdict_clauses import NOT_JUDGED
from calibrate.report.before_after import nll_warning
from calibrate.report.sentences import (
    WHY_HARD,
    require_gain,
    sentence,
    sentences,
    with_verdict,
)
from calibrate.rows.score_head import score_head
from calibrate.store.entry import Entry


@pytest.mark.parametrize(
    ("gains", "items", "advice", "sizes"),
    [
        ((0.3,) * 4, ROWS, "Use", []),
        ((0, 0, 0.3, 0.3), ROWS, "Use", ["256"]),
        ((0, 0, 0, 0.3), ROWS, "Use", ["1,024"]),
        ((0, 0.3, 0.3, -0.3), ROWS, "Use", ["64", "256"]),
        ((0.3, 0, 0.3, 0), ROWS, "Use", ["16", "256"]),
        ((0, 0, 0, -0.3), ROWS, "Keep", []),
        ((0,) * 4, ROWS, "Keep", []),
        ((-0.3,) * 4, ROWS, "Keep", []),
        ((0.2,) * 4, SETS, "Use", []),
        ((0, 0, 0, 0.4), SETS, "Use", ["1,024"]),
    ],
)
def test_advice_comes_with_the_numbers_before_and_after(gains, items, advice, sizes):
    evidence = evidence_of_gains({"own": gains}, items)
    text = sentence(evidence, "own", "mine@2")
    assert text.startswith(f"{advice} ")
    before_numbers = text.split("mine@2")[1].split(": ")[0]
    assert re.findall(r"\b[\d,]+\b", before_numbers) == sizes
    metric = RIGHT if items == SETS else LOG_P
    before, after = (metric.factor * evidence.mean(x, metric).mean for x in ("plain", "own"))
    assert f"{before:.{metric.decimals}f} -> {after:.{metric.decimals}f}" in text
    gain = evidence.gain("own", metric)
    assert f"({gain.shown(f'+.{metric.decimals}f', metric.factor)}" in text
    assert f"800 {items.name}" in text


def test_a_size_of_significant_loss_is_excepted():
    strata = tuple(s._replace(size=2**i) for i, s in enumerate(CELLS[:1] * 12, 1))
    evidence = evidence_of_gains({"own": (0.008,) * 11 + (-0.03,)}, strata=strata)
    assert re.match("Use .* not .*4,096", sentence(evidence, "own"))


def test_too_few_items():
    few = evidence_of_gains({"own": (1.0,) * 4}, count=1)
    assert re.match("Unknown: 4 rows .*error unknown", sentence(few, "own"))
    of_group = evidence_of_gains({"own": (1.0,) * 4}, count=9)
    of_group = replace(of_group, group=np.zeros(36, int))
    assert re.match("Unknown: 36 rows of 1 group ", sentence(of_group, "own"))


def test_heads_that_gain_lose_and_have_no_rule():
    gains = [0.5, 0.5, -0.5, *[0.0] * 37]
    evidence = evidence_of_gains({"own": [gains] * 4}, count=800, heads=40)
    text = " ".join(sentences(evidence, "own"))
    assert re.search(r"\b40 heads\D* 2 gain\D* 1 loses", text)
    fit = replace(calibrate.identity(), entries=(Entry((0.0,) * 5, (0, 1), 0, 0),))
    text = " ".join(sentences(replace(evidence, fits={"own": fit}), "own"))
    assert re.search(r"\b1 head \D* 1 gains\D* 0 lose.*\b39 without a rule", text)


def test_simpler_rules_that_do_as_well_and_all_that_do_better_are_named():
    rules = {"own": 0.3, "constant": 0.3, "paper": 0.1, "polynomial": 0.3, "log-n": 0.4}
    evidence = evidence_of_gains({name: (gain,) * 4 for name, gain in rules.items()})
    _, others = sentences(evidence, "own")
    assert re.match(
        r"Log n / log 16 \(\+0\.1.* better.* constant .*not significantly worse", others
    )
    assert "polynomial" not in others
    worse = evidence_of_gains({"own": (0.3,) * 4, "paper": (0.1,) * 4})
    assert len(sentences(worse, "own")) == 1


def test_a_constant_that_does_as_well_as_a_richer_rule_comes_with_its_line():
    rules = {"own": fitted_at("log-size"), "constant": fitted_at("constant")}
    evidence = evidence_of_gains({"own": (0.3,) * 4, "constant": (0.3,) * 4}, fits=rules)
    first, last = sentences(evidence, "own", "mine@1")
    assert first.startswith("Use mine@1 (log-size ")
    assert "`query = 2.71 * query`" in last
    assert "(constant, beta = 2.71, theta = 0.369)" in sentence(evidence, "constant")


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
    assert re.match("Use .*: NLL .*, exact match .* 600 answers", first)
    divergence = r": 0\.02.. ± 0\.0... nats per token"
    assert re.match(rf"Retention text .*\+0\.05.. ± 0\.00.. nats\){divergence}", last)
    of_batches = replace(evidence, of=evidence.of._replace(items=BATCHES))
    assert re.match(f"Retention batches{divergence}", sentences(of_batches, "own")[1])


def test_held_out_templates():
    strata = tuple(s._replace(unseen=s.template == "towns") for s in CELLS)
    evidence = evidence_of_gains({"own": (0.3, 0.3, -0.4, 0)}, ANSWERS, strata=strata)
    first, of_calibration, _ = sentences(evidence, "own")
    assert re.match("Keep .* 200 answers .* 1 held-out prompt template", first)
    assert re.match("In the 1 prompt template .* 400 new answers", of_calibration)


def test_held_out_text_makes_no_prompt_template_held_out():
    """As of prompts of few templates beside the built-in text, half of whose domains are."""
    strata = tuple(s._replace(unseen=s.protected) for s in CELLS)
    evidence = evidence_of_gains({"own": (0.3, 0.3, 0.3, -0.05)}, ANSWERS, strata=strata)
    text = sentence(evidence, "own")
    assert "600 answers" in text
    assert "held-out" not in text


def test_rows_of_a_single_head_say_that_the_model_was_not_judged():
    evidence = replace(evidence_of_gains({"own": (0.3,) * 4}), heads=((3, 1),))
    assert NOT_JUDGED in sentences(evidence, "own")[1]


def test_where_hard_attention_is_right_more_often_a_sentence_says_why():
    evidence = evidence_of_gains({"own": (0.2,) * 4, "hard": (0.4,) * 4}, SETS)
    assert WHY_HARD in sentences(evidence, "own")[1]


def test_accuracy_that_costs_log_likelihood_is_a_warning_with_the_q_that_does_not(toy_head):
    """Beta = 30 is as accurate, and too confident; of the smaller q that are not, the largest."""
    toy_head.correct = lambda batch, weights: (
        np.asarray(weights)[np.arange(len(weights)), batch.target] > 0.5
    )
    betas = {"own": (30.0, 0.8), "q = 0.5": (28.0, 0.5), "q = 0.25": (4.0, 0.25)}
    rules = {name: replace(one_constant(b), quality={"q": q}) for name, (b, q) in betas.items()}
    evidence = score_head(toy_head, [16, 64], 400, 0, rules)
    first, warning, *_ = sentences(evidence, "own")
    nll, ece = (re.search(rf"{word} ([\d.]+) -> ([\d.]+)", first) for word in ("NLL", "ECE"))
    before, after = (-evidence.mean(rule, LOG_P).mean for rule in ("plain", "own"))
    assert (float(nll[1]), float(nll[2])) == pytest.approx((before, after), abs=6e-4)
    errors = [
        100 * expected_calibration_error(reliability(evidence, rule)) for rule in ("plain", "own")
    ]
    assert [float(ece[1]), float(ece[2])] == pytest.approx(errors, abs=0.06)
    assert re.match(r"Warning: .*\(\+.* at n = 16 and \+.* at n = 64", warning)
    accuracy = 100 * evidence.mean("q = 0.25", RIGHT).mean
    assert f"q = 0.25 it is not (accuracy {accuracy:.1f} %)" in warning
    assert nll_warning(evidence, "q = 0.25") == ""
    alone = replace(evidence, fits={"own": rules["own"]})
    assert "it is not" not in nll_warning(alone, "own")


def test_a_note_where_no_rule_changes_the_accuracy_of_a_head(toy_head):
    """Its `correct` asks for the highest weight, which is the same for every beta."""
    rules = {"own": one_constant(2.0), "hard": hard_attention()}
    first, note, *_ = sentences(score_head(toy_head, [16, 64], 400, 0, rules), "own")
    assert first.startswith("Use fitted rule (constant, beta = 2, theta = 0.5)")
    assert "`correct`" in note


def test_rows_that_a_fit_was_fitted_to_are_said_to_be(by_size):
    evidence = evidence_of_gains({"own": (0.2,) * 4}, fits={"own": by_size})
    assert "fitted to" not in sentence(evidence, "own")
    fit = replace(by_size, source={"fingerprint": "sha256:toy"})
    assert "fitted to" in sentence(replace(evidence, fits={"own": fit}), "own")


def test_a_rule_without_a_gain_is_refused_with_its_verdict():
    evidence = evidence_of_gains({"own": (0.3,) * 4, "same": (0,) * 4})
    require_gain(evidence, "own")
    with pytest.raises(QualityError, match=r"Keep .* mine .* toy"):
        require_gain(evidence, "same", "mine")


def test_the_file_of_a_fit_through_a_model_has_its_verdict_and_weight():
    fit = fitted_at("constant", through="model", strength=0.5)
    fit = replace(fit, name="mine", quality={"trade": []})
    evidence = evidence_of_gains({"own": (0.3, 0.3, 0.3, 0)}, ANSWERS, strata=CELLS)
    quality = with_verdict(fit, evidence).quality
    assert list(quality) == ["trade", "verdict"]
    assert re.match(r"Use mine: NLL .*: 0\.5$", quality["verdict"])
