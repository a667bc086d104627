"""Fits per head: each head has the rule that it needs, or keeps softmax; the runtime applies it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import reference
from commands import call
from fake_progress import Told
from planted import planted_rows

import calibrate
from calibrate.core.rule import POLYNOMIAL
from calibrate.errors import QualityError
from calibrate.fitting.fit_collection import drop_refused_rules, fit_collection, fit_head
from calibrate.fitting.fit_rule import FittedRule
from calibrate.fitting.head_fit import HeadFit
from calibrate.fitting.held_out import HeldOut
from calibrate.fitting.options import FitOptions
from calibrate.parallel import Jobs
from calibrate.rows.collect import collect_arrays
from calibrate.rows.logits_files import Arrays

BETAS = {(0, 0): 1.0, (0, 1): 2.5, (4, 0): 1.0, (4, 1): 0.4}  # at which targets are drawn
ROWS = 600  # of a head


def arrays_of(betas=BETAS, rows=ROWS, n=32, seed=0):
    """Logits of heads whose targets are drawn from softmax(beta z)."""
    rng = np.random.default_rng(seed)
    z = rng.uniform(0.3, 2, (rows * len(betas), 1)) * rng.standard_normal((rows * len(betas), n))
    beta = np.repeat(list(betas.values()), rows)[:, None]
    target = (beta * z + rng.gumbel(size=z.shape)).argmax(axis=1)
    layer, head = np.repeat(np.array(list(betas)), rows, axis=0).T
    return {"logits": z.astype(np.float32), "target": target, "layer": layer, "head": head}


def few_groups(arrays):
    """Too few groups for a slope: a fit is quick."""
    return arrays | {"group": np.arange(len(arrays["target"])) % 15}


def fit_arrays(arrays, **options):
    collection = collect_arrays(Arrays.in_memory("model", arrays))
    return fit_collection(collection, "model", FitOptions(**options))


@pytest.fixture(scope="module")
def result():
    return fit_arrays(arrays_of())


def test_heads_that_gain_have_a_rule_and_no_others(result):
    assert [(e.layer, e.head) for e in result.fit.entries] == [(0, 1), (4, 1)]
    assert [bool(head.rule) for head in result.heads] == [False, True, False, True]
    assert all(bool(head.refusal) != bool(head.rule) for head in result.heads)
    assert "2 of 4 heads" in result.fit.verdict
    records = result.fit.evidence["heads"]
    assert [(r["layer"], r["head"]) for r in records] == list(BETAS)
    assert ["penalty" in r for r in records] == [False, True, False, True]


def test_each_head_is_fitted_as_by_itself(result):
    arrays = arrays_of()
    own = (arrays["layer"] == 0) & (arrays["head"] == 1)
    alone = calibrate.fit(arrays["logits"][own], arrays["target"][own])
    assert result.fit.entry_of(0, 1).coefficients == alone.coefficients
    record = next(r for r in result.fit.evidence["heads"] if (r["layer"], r["head"]) == (0, 1))
    assert record["r_squared_log_beta"] == alone.r_squared
    assert record["gain"] == pytest.approx(alone.evidence["heads"][0]["gain"])


def test_the_evidence_is_of_the_calibrated_heads_together(result):
    evidence = result.fit.evidence
    assert evidence["inputs"]["fitted"] == 2 * ROWS
    assert evidence["inputs"]["seen"] == 4 * ROWS
    (held_out,) = evidence["held_out"]
    assert held_out["inputs"] == 2 * ROWS
    gains = [r["gain"] for r in evidence["heads"] if "penalty" in r]
    assert held_out["nll_before"] - held_out["nll_after"] == pytest.approx(np.mean(gains))
    kinds = {record["kind"] for record in evidence["kinds"]}
    assert kinds == {"baseline", "constant", "polynomial"}


def test_no_head_that_gains_is_an_answer():
    with pytest.raises(QualityError):
        fit_arrays(arrays_of({(0, 0): 1.0, (4, 1): 1.0}))


def test_a_named_kind_is_saved_of_heads_that_do_not_gain():
    fit = fit_arrays(few_groups(arrays_of()), kind="constant").fit
    assert [(e.layer, e.head) for e in fit.entries] == list(BETAS)
    betas = [entry.coefficients[0] for entry in fit.entries]
    np.testing.assert_allclose(betas, list(BETAS.values()), rtol=0.15)
    assert fit.rule.kind == "constant"


@pytest.mark.slow
def test_gains_by_chance_among_many_heads_are_left_out():
    """One in twenty heads that softmax fits would be significant by itself."""
    many = {(i // 8, i % 8): 1.0 for i in range(24)} | {(9, 0): 3.0}
    result = fit_arrays(arrays_of(many, rows=120, n=8))
    assert [(e.layer, e.head) for e in result.fit.entries] == [(9, 0)]


def test_a_head_with_few_inputs_keeps_softmax_and_is_counted():
    arrays = few_groups(arrays_of())
    few = np.ones(4 * ROWS, bool)
    few[ROWS + 99 : 2 * ROWS] = False  # 99 of head (0, 1)
    result = fit_arrays({name: column[few] for name, column in arrays.items()}, kind="polynomial")
    assert [(e.layer, e.head) for e in result.fit.entries] == [(0, 0), (4, 0), (4, 1)]
    assert "99" in result.heads[1].refusal
    assert "3 of 4 heads" in result.fit.verdict
    assert "1 keep" in result.fit.verdict


def test_least_squares_of_each_head_with_enough_misranked_inputs():
    arrays = arrays_of()
    right = np.arange(4 * ROWS) >= 3 * ROWS + 50  # of the last head
    arrays["target"][right] = arrays["logits"][right].argmax(axis=1)
    result = fit_arrays(arrays, loss="least-squares")
    saved = {(e.layer, e.head): e for e in result.fit.entries}
    assert (0, 1) in saved
    assert (4, 1) not in saved
    for (layer, head), entry in saved.items():
        own = (arrays["layer"] == layer) & (arrays["head"] == head)
        solved = calibrate.optimal_beta(arrays["logits"][own], arrays["target"][own])
        used = np.isfinite(solved.beta) & (solved.beta > 0)
        used &= arrays["logits"][own].argmax(axis=1) != arrays["target"][own]
        H = np.asarray(calibrate.entropy(arrays["logits"][own][used]), float)
        theirs = np.polyval(np.polyfit(H, solved.beta[used], 4), H)
        np.testing.assert_allclose(
            np.polyval(entry.coefficients, H), theirs, atol=1e-3 * np.abs(theirs).max()
        )


def test_from_arrays_on_disk_to_the_runtime(here):
    np.savez("model.npz", **few_groups(arrays_of()))
    call("collect", "--logits", "model.npz")
    call("fit", "runs/model", "--name", "model", "--kind", "constant")
    fit = calibrate.load("model")
    logits = np.random.default_rng(1).standard_normal((2, 2, 3, 48)).astype(np.float32)
    probs = np.asarray(calibrate.adaptive_softmax(logits, fit.layer(4)))
    for head in (0, 1):
        beta = fit.entry_of(4, head).coefficients[0]
        expected = reference.softmax(logits[:, head], beta=beta)
        np.testing.assert_allclose(probs[:, head], expected, rtol=1e-4, atol=1e-7)
    unnamed = np.asarray(calibrate.adaptive_softmax(logits, fit.layer(3)))
    np.testing.assert_allclose(unnamed, reference.softmax(logits), rtol=1e-5)
    again = call("fit", "runs/model", "--name", "model", "--kind", "constant", "--json")
    assert json.loads(again.stdout)["reference"] == "model@1"


@pytest.mark.parametrize("jobs", [Jobs(), pytest.param(Jobs(2), marks=pytest.mark.slow)])
def test_neither_jobs_nor_groups_change_a_fit(jobs, result, here):
    collection = collect_arrays(Arrays.in_memory("model", arrays_of()), here / "run")
    told = Told()
    other = fit_collection(collection, "model", None, jobs, told, rows_per_group=1)
    assert other.heads == result.heads
    assert other.fit == result.fit
    assert other.fit.evidence == result.fit.evidence
    assert told.stages[0] == ("fitting heads", 4, 4)
    assert told.steps == [(1, False)] * 4


def test_heads_without_a_row_are_refused(here):
    z = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)
    right = {"logits": z, "target": z.argmax(axis=1), "head": np.arange(200) % 2}
    rows = collect_arrays(Arrays.in_memory("right", right), here / "run", keep="misranked")
    with pytest.raises(QualityError):
        calibrate.fit_polynomial(calibrate.solve(rows), loss="least-squares")


def test_a_head_without_any_weight_keeps_softmax():
    arrays = arrays_of({(5, 5): 2.5, (5, 6): 2.5})
    arrays["weight"] = (arrays["head"] == 5).astype(float)
    fit = fit_arrays(arrays).fit
    assert [e.head for e in fit.entries] == [5]


def test_planted_rows_of_two_heads_have_their_own_penalties():
    """One depends on the entropy, the other does not."""
    parts = []
    for head, beta_of in enumerate((lambda H, n: 0.5 + 1.2 * H, lambda H, n: 2.5 + 0 * H)):
        rows = planted_rows(beta_of, count=400, seed=head)
        parts.append(rows._replace(head=np.full(len(rows.beta), head, np.int16)))
    fits = [fit_head(p, FitOptions().resolved(), procedures=["polynomial"]) for p in parts]
    assert fits[0].rule.penalty < fits[1].rule.penalty
    assert fits[0].rule.degrees_of_freedom > fits[1].rule.degrees_of_freedom


def test_heads_that_could_not_be_fitted_are_no_tests_of_the_false_discovery_rate():
    options = FitOptions().resolved()
    gain = np.random.default_rng(0).standard_normal(200)
    gain += 2.2 / np.sqrt(200) * gain.std(ddof=1) - gain.mean()  # a t of 2.2: p = 0.029
    items = np.full(200, 16), np.ones(200), np.full(200, -1)
    log_p = {"baseline": np.zeros(200), "polynomial": gain}
    held_out = HeldOut(*items, np.full(200, -9.0), np.zeros(200), log_p)
    rule = FittedRule(options.form(POLYNOMIAL), (0, 0, 0, 0, 2.0), (0.5, 2.0), 1.0, 1.0)
    tried = HeadFit(0, 0, 200, 0.5, rule, held_out=held_out)
    few = [HeadFit(0, 1 + i, 9, 0.5, refusal="too few") for i in range(5)]
    assert drop_refused_rules([tried, *few], options)[0].rule
    none = {**log_p, "polynomial": gain - gain.mean()}
    second = replace(tried, head=9, held_out=held_out._replace(log_p=none))
    assert not drop_refused_rules([tried, second], options)[0].rule
