"""Wording of verdicts: the sentences on rules with planted gains."""

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
    ("gains", "items", "words"),
    [
        ((0.3,) * 4, ROWS, "Use mine@2: NLL 2."),
        ((0, 0, 0.3, 0.3), ROWS, "Use mine@2, which gains for long inputs, from 256 items on"),
        ((0, 0, 0, 0.3), ROWS, "Use mine@2, which gains at 1,024 items: NLL "),
        ((0, 0.3, 0.3, -0.3), ROWS, "Use mine@2 only from 64 to 256 items: NLL "),
        ((0.3, 0, 0.3, 0), ROWS, "Use mine@2, which gains at 16 and at 256 items: "),
        ((0, 0, 0, -0.3), ROWS, "Keep the baseline: mine@2 is significantly worse"),
        ((0,) * 4, ROWS, "Keep the baseline: mine@2 makes no significant difference: NLL "),
        ((-0.3,) * 4, ROWS, "Keep the baseline: mine@2 is significantly worse: NLL "),
        ((0.2,) * 4, SETS, "Use mine@2: accuracy "),
        ((0, 0, 0, 0.4), SETS, "Use mine@2, which gains at 1,024 items: accuracy "),
    ],
)
def test_advice_comes_with_the_numbers_before_and_after(gains, items, words):
    evidence = evidence_of_gains({"own": gains}, items)
    text = sentence(evidence, "own", "mine@2")
    assert text.startswith(words)
    metric = RIGHT if items == SETS else LOG_P
    before, after = (metric.factor * evidence.mean(x, metric).mean for x in ("plain", "own"))
    assert f"{before:.{metric.decimals}f} -> {after:.{metric.decimals}f}" in text
    gain = evidence.gain("own", metric)
    assert f"({gain.shown(f'+.{metric.decimals}f', metric.factor)}" in text
    assert f"on 800 {items.name} of toy" in text


def test_a_size_of_significant_loss_is_excepted():
    strata = tuple(s._replace(size=2**i) for i, s in enumerate(CELLS[:1] * 12, 1))
    evidence = evidence_of_gains({"own": (0.008,) * 11 + (-0.03,)}, strata=strata)
    assert sentence(evidence, "own").startswith("Use fitted rule, but not at 4,096 items: ")


def test_too_few_items():
    few = evidence_of_gains({"own": (1.0,) * 4}, count=1)
    text = sentence(few, "own")
    assert text.startswith("Unknown: 4 rows are too few to judge fitted rule: NLL ")
    assert "error unknown" in text
    of_group = evidence_of_gains({"own": (1.0,) * 4}, count=9)
    of_group = replace(of_group, group=np.zeros(36, int))
    assert "36 rows of 1 group are too few" in sentence(of_group, "own")


def test_heads_that_gain_lose_and_have_no_rule():
    gains = [0.5, 0.5, -0.5, *[0.0] * 37]
    evidence = evidence_of_gains({"own": [gains] * 4}, count=800, heads=40)
    text = " ".join(sentences(evidence, "own"))
    assert "Of 40 heads with a rule, 2 gain and 1 loses significantly (false discovery rate" in text
    fit = replace(calibrate.identity(), entries=(Entry((0.0,) * 5, (0, 1), 0, 0),))
    text = " ".join(sentences(replace(evidence, fits={"own": fit}), "own"))
    assert "Of 1 head with a rule, 1 gains and 0 lose significantly" in text
    assert "; 39 without a rule are unchanged." in text


def test_simpler_rules_that_do_as_well_and_all_that_do_better_are_named():
    rules = {"own": 0.3, "constant": 0.3, "paper": 0.1, "polynomial": 0.3, "log-n": 0.4}
    evidence = evidence_of_gains({name: (gain,) * 4 for name, gain in rules.items()})
    _, others = sentences(evidence, "own")
    assert others.startswith("Log n / log 16 (+0.1")
    level = "constant (maximum likelihood) is not significantly worse."
    assert others.endswith(f" nats) is significantly better, and {level}")
    worse = evidence_of_gains({"own": (0.3,) * 4, "paper": (0.1,) * 4})
    assert len(sentences(worse, "own")) == 1


def test_a_constant_that_does_as_well_as_a_richer_rule_comes_with_its_line():
    rules = {"own": fitted_at("log-size"), "constant": fitted_at("constant")}
    evidence = evidence_of_gains({"own": (0.3,) * 4, "constant": (0.3,) * 4}, fits=rules)
    first, last = sentences(evidence, "own", "mine@1")
    assert first.startswith("Use mine@1 (log-size (kappa log n + b)): ")
    assert last == (
        "Constant (maximum likelihood) (`query = 2.71 * query`) is not significantly worse."
    )
    assert "(constant, beta = 2.71, theta = 0.369)" in sentence(evidence, "constant")


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ((-0.004, -0.003, 0.3, 0.3), r"<= 64\): -0.00.* nats .* \(tolerance 0.005\)"),
        ((0.03, -0.03, 0.3, 0.3), r"= 64\): -0.0[23].* \(exceeds the tolerance of 0.005\)"),
    ],
)
def test_a_loss_at_trained_sizes_stands_beside_the_verdict(gains, words):
    fits = {"own": fitted_at("constant", 64)}
    evidence = evidence_of_gains({"own": gains}, count=4_000, fits=fits)
    assert re.match(rf"In distribution \(n {words}", sentences(evidence, "own")[1])


def test_retention_text():
    gains = {"own": (0.3, 0.3, 0.3, -0.05)}
    evidence = evidence_of_gains(gains, ANSWERS, strata=CELLS)
    first, last = sentences(evidence, "own")
    assert re.match("Use fitted rule: NLL .*, exact match .* on 600 answers", first)
    divergence = r": 0.02.. ± 0.0... nats per token of KL divergence from the baseline."
    assert re.fullmatch(rf"Retention text \(NLL \+0.05.. ± 0.00.. nats\){divergence}", last)
    of_batches = replace(evidence, of=evidence.of._replace(items=BATCHES))
    assert re.fullmatch(f"Retention batches{divergence}", sentences(of_batches, "own")[1])


def test_held_out_templates():
    strata = tuple(s._replace(unseen=s.template == "towns") for s in CELLS)
    evidence = evidence_of_gains({"own": (0.3, 0.3, -0.4, 0)}, ANSWERS, strata=strata)
    first, of_calibration, _ = sentences(evidence, "own")
    assert first.startswith("Keep the baseline: fitted rule is significantly worse: NLL ")
    assert first.endswith(" on 200 answers of toy in 1 held-out prompt template.")
    assert of_calibration.startswith(
        "In the 1 prompt template of the calibration split, on 400 new answers: NLL "
    )


def test_held_out_text_makes_no_prompt_template_held_out():
    """As of prompts of few templates beside the built-in text, half of whose domains are."""
    strata = tuple(s._replace(unseen=s.protected) for s in CELLS)
    evidence = evidence_of_gains({"own": (0.3, 0.3, 0.3, -0.05)}, ANSWERS, strata=strata)
    assert sentence(evidence, "own").endswith(" on 600 answers of toy.")


def test_rows_of_a_single_head_say_that_the_model_was_not_judged():
    evidence = replace(evidence_of_gains({"own": (0.3,) * 4}), heads=((3, 1),))
    assert sentences(evidence, "own")[1] == f"{NOT_JUDGED}."


def test_where_hard_attention_is_right_more_often_a_sentence_says_why():
    evidence = evidence_of_gains({"own": (0.2,) * 4, "hard": (0.4,) * 4}, SETS)
    reason = f" points) is significantly better; {WHY_HARD}."
    assert sentences(evidence, "own")[1].endswith(reason)


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
    assert re.match(
        r"Warning: the NLL is significantly worse than the baseline's \(\+.* nats at n = 16 and \+",
        warning,
    )
    accuracy = 100 * evidence.mean("q = 0.25", RIGHT).mean
    assert warning.endswith(f"; with q = 0.25 it is not (accuracy {accuracy:.1f} %).")
    assert nll_warning(evidence, "q = 0.25") == ""
    alone = replace(evidence, fits={"own": rules["own"]})
    assert nll_warning(alone, "own").endswith(" nats at n = 64).")


def test_a_note_where_no_rule_changes_the_accuracy_of_a_head(toy_head):
    """Its `correct` asks for the highest weight, which is the same for every beta."""
    rules = {"own": one_constant(2.0), "hard": hard_attention()}
    first, note, *_ = sentences(score_head(toy_head, [16, 64], 400, 0, rules), "own")
    assert first.startswith("Use fitted rule (constant, beta = 2, theta = 0.5)")
    assert note == "No rule changes this head's accuracy (`correct`), so the NLL decides."


def test_rows_that_a_fit_was_fitted_to_are_said_to_be(by_size):
    fit = replace(by_size, source={"fingerprint": "sha256:toy"})
    evidence = evidence_of_gains({"own": (0.2,) * 4}, fits={"own": fit})
    assert "rows of toy (those it was fitted to)" in sentence(evidence, "own")


def test_a_rule_without_a_gain_is_refused_with_its_verdict():
    evidence = evidence_of_gains({"own": (0.3,) * 4, "same": (0,) * 4})
    require_gain(evidence, "own")
    with pytest.raises(QualityError, match=r"Keep the baseline: mine .* of toy; give more rows$"):
        require_gain(evidence, "same", "mine")


def test_the_file_of_a_fit_through_a_model_has_its_verdict_and_weight():
    fit = fitted_at("constant", through="model", strength=0.5)
    fit = replace(fit, name="mine", quality={"trade": []})
    evidence = evidence_of_gains({"own": (0.3, 0.3, 0.3, 0)}, ANSWERS, strata=CELLS)
    quality = with_verdict(fit, evidence).quality
    assert list(quality) == ["trade", "verdict"]
    assert quality["verdict"].startswith("Use mine: NLL ")
    assert quality["verdict"].endswith(" baseline. Interpolation weight: 0.5")
